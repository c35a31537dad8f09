"""The parts of a key, and the server that keeps each: pure functions, the same in all processes.

One server keeps a key of fewer than `WHOLE` elements, or one that its updater needs whole. Others
are divided evenly over all servers.

References
----------
The constants are those of mshadow-ps, which the parameter server of dmlc and MXNet's KVStore share.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

WHOLE = 1000  # keys of at least so many elements are divided
_FACTOR = 991


class KeyPart(NamedTuple):
    """Elements `begin` to `end` of the flat array of a key, on one server."""

    server: int
    begin: int
    end: int


def parts(key: int | str, size: int, n_servers: int, is_whole: bool = False) -> list[KeyPart]:
    """Return the parts of a key of so many elements, in their order.

    `is_whole` says that it is not to be divided.

    >>> parts(3, 10, n_servers=2)
    [KeyPart(server=1, begin=0, end=10)]
    >>> parts("weights", 1001, n_servers=2)
    [KeyPart(server=0, begin=0, end=500), KeyPart(server=1, begin=500, end=1001)]
    """
    if size < WHOLE or is_whole:
        number = zlib.crc32(key.encode()) if isinstance(key, str) else key
        return [KeyPart(number * _FACTOR % n_servers, 0, size)]
    bounds = [size * server // n_servers for server in range(n_servers + 1)]
    return [
        KeyPart(server, begin, end)
        for server, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        if begin < end
    ]


def part_of(
    server: int, key: int | str, size: int, n_servers: int, is_whole: bool = False
) -> KeyPart | None:
    """Return the part of a key that a server keeps; None if it keeps none.

    >>> part_of(0, 3, 10, n_servers=2)
    """
    found = parts(key, size, n_servers, is_whole)
    return next((each for each in found if each.server == server), None)
