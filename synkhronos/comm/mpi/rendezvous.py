"""The begin of a mesh: processes agree on a key, find one another, and prove that they have it.

    agree    MPI tells each process the addresses and the random numbers of all
    Start    each process calls those before it, at one of their addresses after the other

A program that connects meanwhile and has no key is sent away, and when all are connected nothing
listens any more.
"""

from __future__ import annotations

import concurrent.futures
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

import numpy as np

from synkhronos.comm.channel import is_own
from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.sealed import AESGCM

VARIABLE = "SYNKHRONOS_NETWORK"  # the networks of which a job uses its machines' addresses
_OF_OPEN_MPI = "OMPI_MCA_btl_tcp_if_include"
_HELLO = b"synkhronos: this process of a job has the secret"
_CALLS, _CALLED, _TAKEN = b"calls", b"is called", b"!"
_NONCE, _PROOF, _NUMBER = 16, 32, struct.Struct(">Q")  # bytes; who calls
_FACTS = 2048  # bytes of what a process says of itself
_START_SECONDS, _CALL_SECONDS = 60.0, 5.0  # for all connections, for each address
_CALLS_AT_ONCE, _NAP_SECONDS = 32, 0.05
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
MOST_LEADERS = 250  # the system passes 253 descriptors at once


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
            raise secret.NoSecret(
                f"process {rank} of this job has another secret than this one. {secret.ADVICE}"
            )
    key = hmac.digest(given, everyone.tobytes(), "sha256")
    return key, [json.loads(hello[32:-32].tobytes()) for hello in everyone]


class Start:
    """The sockets of a process at which others call it, until all are connected."""

    def __init__(self, rank, stack, is_on_network):
        self._rank, self._key, self._end, self._is_over = rank, None, 0.0, False
        self._called: queue.Queue = queue.Queue()  # (rank, connection)
        name = f"synkhronos-{secrets.token_hex(16)}"
        self.facts = {"host": socket.gethostname()[:64], "unix": name, "addresses": []}
        self.facts.update(gmac=AESGCM is not None, trusts=bool(os.environ.get(secret.TRUST)))
        self._listeners = [stack.enter_context(socket.socket(socket.AF_UNIX))]
        self._listeners[0].bind(f"\0{name}")
        self._listeners[0].listen(1024)
        if is_on_network:
            listener = stack.enter_context(socket.socket(socket.AF_INET))
            listener.bind(("", 0))
            listener.listen(1024)
            self._listeners.append(listener)
            self.facts.update(port=listener.getsockname()[1], addresses=addresses()[:32])

    def connect(self, key, facts, with_leaders):
        """Return the (number, connection) of all other processes, whose numbers are their ranks.

        `with_leaders` the first has two with each other one: that of their leaders has a number
        that is larger by the number of processes.
        """
        self._key, self._end = key, time.monotonic() + _START_SECONDS
        n_all = self._n_all = len(facts)
        for each in self._listeners:
            threading.Thread(target=self._listen, args=(each,), daemon=True).start()
        has_two = with_leaders and n_all <= MOST_LEADERS

        def numbers_of(ranks):
            two = [rank for rank in ranks if has_two and 0 in (rank, self._rank)]
            return [*ranks, *(n_all + rank for rank in two)]

        before, after = numbers_of(range(self._rank)), numbers_of(range(self._rank + 1, n_all))
        try:
            with concurrent.futures.ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
                called = [facts[number % n_all] for number in before]
                found = dict(zip(before, pool.map(self._call, before, called)))
            while len(found) < len(before) + len(after):
                seconds = max(self._end - time.monotonic(), 0)
                try:
                    number, connection = self._called.get(timeout=seconds)
                except queue.Empty:
                    missing = {number % n_all for number in after if number not in found}
                    hosts = ", ".join(facts[rank]["host"] for rank in sorted(missing))
                    raise Unreachable(_unreachable(hosts, facts[self._rank])) from None
                found[number] = connection
        finally:
            self._is_over = True
            for each in self._listeners:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # ends `accept`
        return sorted(found.items())

    def _call(self, number, facts):
        """Return a connection with a process before this one, which may be late."""
        own = self._rank + number // self._n_all * self._n_all
        ways = [(socket.AF_UNIX, f"\0{facts['unix']}")]
        for address in _nearest_first(facts["addresses"], self.facts["addresses"]):
            ways.append((socket.AF_INET, (address, facts["port"])))
        while True:
            for family, address in ways:
                connection = socket.socket(family)
                with contextlib.suppress(OSError, EOFError):
                    connection.settimeout(_CALL_SECONDS)
                    connection.connect(address)
                    nonce = _read_exactly(connection, _NONCE)
                    connection.sendall(_NUMBER.pack(own))
                    connection.sendall(self._proof(_CALLS, own, number, nonce))
                    answer = _read_exactly(connection, _PROOF)
                    if hmac.compare_digest(answer, self._proof(_CALLED, own, number, nonce)):
                        connection.sendall(_TAKEN)
                        return connection
                connection.close()
            if time.monotonic() > self._end:
                raise Unreachable(_unreachable(socket.gethostname(), facts))
            time.sleep(_NAP_SECONDS)

    def _listen(self, listener):
        while not self._is_over:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor, or no thread, is left now
                time.sleep(_NAP_SECONDS)

    def _answer(self, connection):
        """Take a connection if it is that of a later process of this job."""
        with contextlib.suppress(OSError, EOFError):
            connection.settimeout(_CALL_SECONDS)
            nonce = os.urandom(_NONCE)
            connection.sendall(nonce)
            [number] = _NUMBER.unpack(_read_exactly(connection, _NUMBER.size))
            if number >= 2 * self._n_all:
                raise EOFError
            ends = number, self._rank + number // self._n_all * self._n_all
            proof = _read_exactly(connection, _PROOF)
            is_right = hmac.compare_digest(proof, self._proof(_CALLS, *ends, nonce))
            if is_right and (connection.family != socket.AF_UNIX or is_own(connection)):
                connection.sendall(self._proof(_CALLED, *ends, nonce))
                if _read_exactly(connection, len(_TAKEN)) == _TAKEN:  # else it has called again
                    self._called.put((number, connection))
                    return
        connection.close()

    def _proof(self, what, caller, called, nonce):
        ends = _NUMBER.pack(caller) + _NUMBER.pack(called)
        return hmac.digest(self._key, what + ends + nonce, "sha256")


def _read_exactly(connection, nbytes):
    data, end = b"", time.monotonic() + _CALL_SECONDS
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more or time.monotonic() > end:
            raise EOFError
        data += more
    return data


def _nearest_first(theirs, own):
    """Sort addresses: first those that begin as one of this machine's, last those that are its own.

    >>> _nearest_first(["172.17.0.1", "192.168.7.2", "10.1.0.9"], ["172.17.0.1", "10.1.0.3"])
    ['10.1.0.9', '192.168.7.2', '172.17.0.1']
    """
    number = {each: int(ipaddress.ip_address(each)) for each in (*theirs, *own)}
    distance = {
        each: min((number[each] ^ number[one] for one in own), default=0) for each in theirs
    }
    return sorted(theirs, key=lambda each: (each in own, distance[each]))


def _unreachable(host, of):
    tried = ", ".join(of["addresses"]) or "none"
    return (
        f"{host} can't connect to {of['host']}, whose addresses are {tried}. If machines have "
        f"others for one another, name their network, such as {VARIABLE}=10.1.0.0/16, in the "
        "environment of all processes; and let their firewalls pass connections between them"
    )


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine at which others of the job may call it.

    Those in the networks that ``SYNKHRONOS_NETWORK``, or else Open MPI's ``btl_tcp_if_include``,
    names; or all, with that of the machine itself last. Networks are like ``10.1.0.0/16``, or names
    of interfaces, with commas between them.
    """
    found = []  # (name of an interface, address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    wanted = os.environ.get(VARIABLE) or os.environ.get(_OF_OPEN_MPI) or ""
    chosen = [each for each in found if _is_in(*each, wanted.replace(" ", "").split(","))] or found
    return [address for name, address in sorted(chosen, key=lambda each: each[0] == "lo")]


def _is_in(name, address, networks):
    for each in networks:
        with contextlib.suppress(ValueError):
            network = ipaddress.ip_network(each, strict=False)
            if ipaddress.ip_address(address) in network:
                return True
    return name in networks
