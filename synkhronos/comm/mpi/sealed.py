"""Authenticated messages: each is from a process of the job, for its receiver, and not a replay.

    sender     payload ──▶ MAC of it, its tag and its number ──▶ with it over the network
    receiver   the same MAC?   yes ──▶ taken
                               no  ──▶ the end of the connection

Each direction of a connection has a key of its own, and numbers its messages: so a message that was
recorded on the network is valid only once, there. Nobody can make a valid one without the key.
Nothing is encrypted, and no payload is copied.

The MAC is GMAC, AES in Galois/counter mode with nothing to encrypt (Dworkin, NIST SP 800-38D), of
the package cryptography: it takes a tenth of the time of HMAC-SHA256 (RFC 2104), which is taken if
a process of the job lacks that package.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any

try:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError:
    AESGCM = None

MAC = 16  # bytes
_MOST = 1 << 30  # bytes that AESGCM takes at once
_NONCE, _DIRECTION = struct.Struct(">IQ"), struct.Struct(">2Q")  # tag, number; sender, receiver


class Seal:
    """Makes the MACs of one direction of a connection, in the order of its messages.

    The `key` is that of the job; both ends have a Seal for each direction.

    >>> ours, theirs = Seal(b"key", 0, 1), Seal(b"key", 0, 1)
    >>> mac = ours.next(5, b"payload")
    >>> theirs.is_next(5, b"payload", mac), theirs.is_next(5, b"payload", mac)  # once more
    (True, False)
    """

    def __init__(self, key: bytes, sender: int, receiver: int, with_gmac: bool = True) -> None:
        own = hmac.digest(key, _DIRECTION.pack(sender, receiver), "sha256")
        if with_gmac:
            encrypt = AESGCM(own).encrypt
            self._mac = lambda nonce, payload: encrypt(nonce, b"", payload)
        else:
            self._mac = lambda *both: hmac.digest(own, b"".join(both), "sha256")[:MAC]
        self._count = 0

    def next(self, tag: int, payload: Any) -> bytes:
        """Return the MAC of the next message."""
        macs = []
        for at in range(0, max(len(payload), 1), _MOST):  # each is numbered
            macs.append(self._mac(_NONCE.pack(tag, self._count), payload[at : at + _MOST]))
            self._count += 1
        return macs[0] if len(macs) == 1 else self.next(tag, b"".join(macs))

    def is_next(self, tag: int, payload: Any, mac: Any) -> bool:
        """Return whether this is the next message, with its MAC; others count, too."""
        return hmac.compare_digest(self.next(tag, payload), mac)
