"""The begin of a mesh: processes agree on a key, find one another, and prove that they have it.

    agree    MPI tells each process the addresses and the random numbers of all
    Start    each process calls those before it, at one of their addresses after the other

A program that connects meanwhile and has no key is sent away, and when all are connected nothing
listens any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from typing import NamedTuple

import numpy as np

from synkhronos.comm.channel import is_own
from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.sealed import has_gmac

VARIABLE = "SYNKHRONOS_NETWORK"  # the networks of which a job uses its machines' addresses
_OF_OPEN_MPI = "OMPI_MCA_btl_tcp_if_include"
_HELLO = b"synkhronos: this process of a job has the secret"
_CALLS, _CALLED = b"calls", b"is called"
_PROOF, _RANK = 32, struct.Struct(">Q")  # bytes; who calls
_FACTS = 2048  # bytes of what a process says of itself
_START_SECONDS, _CALL_SECONDS = 60.0, 5.0  # for all connections, for each address
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


class SecretsDiffer(RuntimeError):
    """Processes of a job do not have the same secret."""


class Unreachable(RuntimeError):
    """Two processes of a job can't connect."""


def agree(comm, given, facts):
    """Return the key of this job, and the facts that each process tells of itself.

    The key is made of the `given` secret and of a random number of each process: so no message of
    another job is valid in this one, even with the same secret.
    """
    own = os.urandom(32) + json.dumps(facts).encode().ljust(_FACTS)
    own += hmac.digest(given, _HELLO + own, "sha256")
    everyone = np.empty((comm.size, len(own)), np.uint8)
    comm.Allgather(np.frombuffer(own, np.uint8), everyone)
    for rank, hello in enumerate(everyone):
        expected = hmac.digest(given, _HELLO + hello[:-32].tobytes(), "sha256")
        if not hmac.compare_digest(expected, hello[-32:].tobytes()):
            raise SecretsDiffer(f"process {rank} of this job has another secret than this one")
    key = hmac.digest(given, everyone.tobytes(), "sha256")
    return key, [json.loads(hello[32:-32].tobytes()) for hello in everyone]


class Start:
    """The sockets of a process at which others call it, until all are connected."""

    def __init__(self, rank, stack, is_on_network):
        self._rank, self._key = rank, None
        self._called: queue.Queue = queue.Queue()  # (rank, connection)
        name = f"synkhronos-{secrets.token_hex(16)}"
        self.facts = {
            "host": socket.gethostname()[:64],
            "gmac": has_gmac(),
            "trusts": bool(os.environ.get(secret.TRUST)),
            "unix": name,
            "port": 0,
            "addresses": [],
        }
        self._listeners = [stack.enter_context(socket.socket(socket.AF_UNIX))]
        self._listeners[0].bind(f"\0{name}")
        self._listeners[0].listen(1024)
        if is_on_network:
            listener = stack.enter_context(socket.socket(socket.AF_INET))
            listener.bind(("", 0))
            listener.listen(1024)
            self._listeners.append(listener)
            self.facts.update(port=listener.getsockname()[1], addresses=addresses()[:32])

    def connect(self, key, facts):
        """Return the (rank, connection) of all other processes."""
        end = time.monotonic() + _START_SECONDS
        self._key = key
        for each in self._listeners:
            threading.Thread(target=self._listen, args=(each,), daemon=True).start()
        try:
            found = {rank: self._call(rank, facts[rank]) for rank in range(self._rank)}
            while len(found) < len(facts) - 1:
                try:
                    rank, connection = self._called.get(timeout=max(end - time.monotonic(), 0))
                except queue.Empty:
                    missing = {*range(len(facts))} - {self._rank, *found}
                    hosts = ", ".join(facts[rank]["host"] for rank in sorted(missing))
                    raise Unreachable(_unreachable(hosts, facts[self._rank])) from None
                found.setdefault(rank, connection)
        finally:
            for each in self._listeners:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # ends `accept`
        return sorted(found.items())

    def _call(self, rank, facts):
        """Return a connection with a process before this one."""
        ways = [(socket.AF_UNIX, f"\0{facts['unix']}")]
        for address in facts["addresses"]:
            ways.append((socket.AF_INET, (address, facts["port"])))
        for family, address in ways:
            connection = socket.socket(family)
            connection.settimeout(_CALL_SECONDS)
            with contextlib.suppress(OSError, EOFError):
                connection.connect(address)
                connection.sendall(_RANK.pack(self._rank) + self._proof(_CALLS, self._rank, rank))
                answer = _read_exactly(connection, _PROOF)
                if hmac.compare_digest(answer, self._proof(_CALLED, self._rank, rank)):
                    return connection
            connection.close()
        raise Unreachable(_unreachable(socket.gethostname(), facts))

    def _listen(self, listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        """Take a connection if it is that of a later process of this job."""
        with contextlib.suppress(OSError, EOFError):
            connection.settimeout(_CALL_SECONDS)
            [rank] = _RANK.unpack(_read_exactly(connection, _RANK.size))
            proof = _read_exactly(connection, _PROOF)
            is_right = hmac.compare_digest(proof, self._proof(_CALLS, rank, self._rank))
            if is_right and (connection.family != socket.AF_UNIX or is_own(connection)):
                connection.sendall(self._proof(_CALLED, rank, self._rank))
                self._called.put((rank, connection))
                return
        connection.close()

    def _proof(self, what, caller, called):
        return hmac.digest(self._key, what + _RANK.pack(caller) + _RANK.pack(called), "sha256")


def _read_exactly(connection, nbytes):
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _unreachable(host, of):
    tried = ", ".join(of["addresses"]) or "none"
    return (
        f"{host} can't connect to {of['host']}, whose addresses are {tried}. If machines have "
        f"others for one another, name their network, such as {VARIABLE}=10.1.0.0/16, in the "
        "environment of all processes; and let their firewalls pass connections between them"
    )


class _Interface(NamedTuple):
    name: str
    address: str


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine at which others of the job may call it.

    Those in the networks that ``SYNKHRONOS_NETWORK``, or else Open MPI's ``btl_tcp_if_include``,
    names; or all, with that of the machine itself last. Networks are like ``10.1.0.0/16``, or names
    of interfaces, with commas between them.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, request)
                found.append(_Interface(name, socket.inet_ntoa(answer[20:24])))
    wanted = os.environ.get(VARIABLE) or os.environ.get(_OF_OPEN_MPI) or ""
    chosen = [each for each in found if _is_in(each, wanted.split(","))] or found
    return [each.address for each in sorted(chosen, key=lambda each: each.name == "lo")]


def _is_in(interface, networks):
    for each in networks:
        if each == interface.name:
            return True
        with contextlib.suppress(ValueError):
            network = ipaddress.ip_network(each.strip(), strict=False)
            if ipaddress.ip_address(interface.address) in network:
                return True
    return False
