"""The ports of an mpirun of which all processes are on this machine: they are closed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
import threading
import time

from synkhronos._machine.log import log

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_CONNECTED, _CONNECTING = "01", "02"  # as the tables have states
# Of Linux, on all processors.
_PIDFD_OPEN, _PIDFD_GETFD, _SO_ATTACH_FILTER = 434, 438, 26
_LOAD_SOURCE_PORT, _IF_EQUAL, _RETURN = 0x28, 0x15, 0x06  # instructions of a filter


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
    are_closed = False
    while mpirun.poll() is None and not are_closed:
        try:
            has_own, are_closed = _close_some(mpirun.pid, n_processes)
        except _Intruder:
            mpirun.kill()
            log.error("another user has connected to mpirun: it was ended. Start again")
            return
        except OSError as error:
            if mpirun.poll() is None:
                log.warning("mpirun listens on ports that ask for no key; closing them: %s", error)
            return
        time.sleep(0.01 if has_own else 0.002)


def _close_some(pid, n_processes):
    """Close the ports that are there; return whether PMIx has its own, and whether it is closed."""
    own, n_connected = [], 0
    with contextlib.ExitStack() as taken:
        for number, name in _descriptors(pid):
            sock = _take(pid, number) if name.startswith("socket:") else None
            if sock is None or taken.enter_context(sock).family not in _TABLES:
                continue
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                n_connected += 1
            elif sock.getsockname()[0] in ("0.0.0.0", "::"):
                _take_only(sock, [])
            else:
                own.append(sock)
        are_all = bool(own) and n_connected >= n_processes
        for sock in own:
            _take_only(sock, [] if are_all else _own_ports(sock))
    return bool(own), are_all


def _take_only(listener, ports):
    """Let a socket take only packets from some ports."""
    code = [(_LOAD_SOURCE_PORT, 0, 0, 0)]
    for port in ports:
        code += [(_IF_EQUAL, 0, 1, port), (_RETURN, 0, 0, 0xFFFFFFFF)]
    code.append((_RETURN, 0, 0, 0))
    memory = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _own_ports(listener):
    """Return the ports of this user's sockets that are connected, or connect, with a listener."""
    address, port = listener.getsockname()[:2]
    packed = socket.inet_pton(listener.family, address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    remote, found = "".join(f"{word:08X}" for word in words) + f":{port:04X}", []
    with open(_TABLES[listener.family]) as table:
        for line in table:
            _, local, to, state, _, _, _, user, _, inode = line.split()[:10]
            if to != remote or state not in (_CONNECTED, _CONNECTING) or inode == "0":
                continue
            if int(user) == os.geteuid():
                found.append(int(local.rpartition(":")[2], 16))
            elif state == _CONNECTED:
                raise _Intruder
    return found


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
