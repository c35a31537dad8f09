"""The ports of an mpirun of which all processes are on this machine: they are closed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import subprocess
import threading
import time

from synkhronos._machine.log import log

_TABLES = "/proc/net/tcp", "/proc/net/tcp6"
_CONNECTING = "02"  # a state of the tables
# Of Linux, on all processors.
_PIDFD_OPEN, _PIDFD_GETFD, _SO_ATTACH_FILTER = 434, 438, 26
# Instructions of a filter, and where it finds a packet's source: in the header of IP, of TCP.
_LOAD_WORD, _LOAD_HALF, _IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SOURCE_ADDRESS, _SOURCE_PORT = {4: 0xFFF00000 + 12, 6: 0xFFF00000 + 8}, 0


class _Intruder(Exception):
    """Another user was faster."""


def close(mpirun: subprocess.Popen, n_processes: int) -> threading.Thread:
    """Close the ports of an mpirun of which all processes are on this machine.

    PRRTE and PMIx ask for no key: a program that connects can start others as this user. So ports
    drop all packets, but for that of PMIx: until all processes have connected it takes those of
    sockets of this user, which the system lists. A process has sent its first packet before it is
    listed, and sends it again after a second.
    """
    thread = threading.Thread(target=_close_all, args=(mpirun, n_processes), daemon=True)
    thread.start()
    return thread


def _close_all(mpirun, n_processes):
    known: set = set()  # the connections of this user's sockets with PMIx, also of earlier looks
    is_last = False  # once more after all ports are closed
    while mpirun.poll() is None:
        try:
            has_own, are_all = _close_some(mpirun.pid, n_processes, known, is_last)
        except _Intruder:
            mpirun.kill()
            log.error("another user has connected to mpirun: it was ended. Start again")
            return
        except OSError as error:
            if mpirun.poll() is None:
                log.warning("mpirun listens on ports that ask for no key; closing them: %s", error)
            return
        if is_last:
            return
        is_last = are_all
        time.sleep(0.01 if has_own else 0.002)


def _close_some(pid, n_processes, known, is_last):
    """Close the ports that are there; return whether PMIx has its own, and whether all are closed.

    Raise `_Intruder` if one of its connections is not with a socket of this user.
    """
    own, accepted = {}, []
    with contextlib.ExitStack() as taken:
        for sock in map(taken.enter_context, _sockets(pid)):
            here = _end(*sock.getsockname()[:2])
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with contextlib.suppress(OSError):  # it is no longer connected
                    accepted.append((_end(*sock.getpeername()[:2]), here))
            elif here[0].is_unspecified:
                _take_only(sock, [])
            else:
                own[here] = sock
        listed = _own_connections(own)  # after the accepted ones, which are listed or known so
        known |= listed
        accepted = [each for each in accepted if each[1] in own]
        if not known.issuperset(accepted):
            raise _Intruder
        are_all = is_last or (bool(own) and len(accepted) >= n_processes)
        for here, sock in own.items():
            _take_only(sock, [] if are_all else [other for other, to in listed if to == here])
    return bool(own), are_all


def _take_only(listener, ends):
    """Let a socket take only packets from some addresses and ports."""
    code = []
    for address, port in ends:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        begin = _SOURCE_ADDRESS[address.version]
        tests = [(_LOAD_WORD, begin + 4 * at, word) for at, word in enumerate(words)]
        tests.append((_LOAD_HALF, _SOURCE_PORT, port))
        for left, (load, where, value) in zip(range(len(tests), 0, -1), tests):
            code += [(load, 0, 0, where), (_IF_EQUAL, 0, 2 * left - 1, value)]
        code.append((_RETURN, 0, 0, 0xFFFFFFFF))
    code.append((_RETURN, 0, 0, 0))
    memory = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _own_connections(listeners):
    """Return (end, listener's end) of this user's sockets that are connected, or connect, to some.

    Raise `_Intruder` if one of another user is connected, or was.
    """
    found = set()
    for line in _rows():
        _, local, remote, state, _, _, _, user, _, inode = line.split()[:10]
        to = _listed_end(remote)
        if to not in listeners or inode == "0":  # the system no longer knows whose that one was
            continue
        if int(user) == os.geteuid():
            found.add((_listed_end(local), to))
        elif state != _CONNECTING:
            raise _Intruder
    return found


def _rows():
    for name in _TABLES:
        with contextlib.suppress(FileNotFoundError), open(name) as table:  # without IPv6
            yield from list(table)[1:]


def _listed_end(text):
    """Return an address and a port of a table, which has words in the processor's order."""
    address, port = text.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return _end(struct.pack(f"={len(words)}I", *words), int(port, 16))


def _end(address, port):
    """Return an address and a port: those of IPv4 also if they come as IPv6.

    >>> _end("::ffff:127.0.0.1", 80) == _end("127.0.0.1", 80)
    True
    """
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found, port


def _sockets(pid):
    """Yield copies of the internet sockets of a child."""
    for number, name in _descriptors(pid):
        sock = _take(pid, number) if name.startswith("socket:") else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock
        elif sock is not None:
            sock.close()


def _descriptors(pid):
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                yield int(number), os.readlink(f"/proc/{pid}/fd/{number}")


def _take(pid, number):
    """Return a socket of a child, or None if it has closed it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    process = call(_PIDFD_OPEN, pid, 0)
    descriptor = call(_PIDFD_GETFD, process, number, 0) if process >= 0 else -1
    code = ctypes.get_errno()
    if process >= 0:
        os.close(process)
    if descriptor >= 0:
        try:
            return socket.socket(fileno=descriptor)
        except OSError as error:
            os.close(descriptor)
            code = error.errno
    if code in (errno.EBADF, errno.ENOTSOCK):  # the number may be another file's by now
        return None
    raise OSError(code, os.strerror(code))
