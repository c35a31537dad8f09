"""Sockets and files that processes of a run have open, and their tables in docs/security.rst."""

import contextlib
import ipaddress
import os
import re
import stat
import sys
import time
from pathlib import Path

import psutil

from support.leaks import processes_with

PAGE = Path(__file__).parents[2] / "docs" / "security.rst"
NOBODY = 65534
_LISTENS = "0A"
_KINDS = "tcp", "tcp6", "udp", "udp6", "raw", "raw6"
# Part of a command line -> what the page calls the process.
_NAMES = {
    "prted": "mpirun",
    "prterun": "mpirun",
    "comm.mpi.carrier": "carrier",
    "synkhronos.parameter_server.group.machine": "machine",
    "synkhronos.rules.worker": "rank",
    "parameter_server.remote.node": "rank",
}


def listening(variable):
    """Return (process, kind, address) of each socket that listens -> its ports or names.

    Of all processes that have a variable of the environment.
    """
    found = {}
    for process, name in _named(variable):
        with contextlib.suppress(psutil.Error, OSError):
            sockets = _sockets(process.pid)
            for each in inodes(process.pid):
                if each in sockets:
                    *key, where = sockets[each]
                    found.setdefault((name, *key), []).append(where)
    return found


def _named(variable):
    """Yield processes with a variable of the environment, and what the page calls them."""
    for process in processes_with(variable):
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            yield process, next((_NAMES[part] for part in _NAMES if part in line), "script")


def written(variable, asked):
    """Return (process, file, mode) of each file that stays open for writing, but those `asked`."""
    stays = _written_now(variable)
    for _ in range(3):
        time.sleep(0.1)  # by now a file that was open for a moment is closed
        stays &= _written_now(variable)
    return {(name, _without_numbers(path), mode) for name, path, mode in stays if path not in asked}


def _written_now(variable):
    found = set()
    for process, name in _named(variable):
        for number in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                file = Path(f"/proc/{process.pid}/fd/{number}")
                path, status = os.readlink(file), file.stat()
                flags = Path(f"/proc/{process.pid}/fdinfo/{number}").read_text().split()
                is_written = int(flags[flags.index("flags:") + 1], 8) & (os.O_WRONLY | os.O_RDWR)
                if stat.S_ISREG(status.st_mode) and is_written:
                    found.add((name, path, f"{stat.S_IMODE(status.st_mode):04o}"))
    return found


def _without_numbers(path):
    """Return a path as the page has it."""
    path = path.replace(" (deleted)", "")
    if not path.startswith(("/memfd:", "/dev/shm/#", "/dev/shm/open_mpi.")):
        return os.path.basename(path)
    return re.sub(r"\d+$", "N", path.replace("/memfd:", "memfd:"))


def memory_of_mpi(variable):
    """Return the paths of the memory that processes with a variable share by Open MPI."""
    found = set()
    for process in processes_with(variable):
        with contextlib.suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found.update(line.split(maxsplit=5)[5] for line in lines if "/sm_segment." in line)
    return found


def inodes(pid):
    """Yield the number of each socket of a process."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{number}"))
            if found:
                yield found[1]


def _sockets(pid):
    """Return what listens in the network of a process: inode -> (kind, address, port or name)."""
    found = {}
    for kind in _KINDS:
        for words in _lines(pid, kind):
            if words[3] == _LISTENS or not kind.startswith("tcp"):
                text, _, port = words[1].partition(":")
                found[words[9]] = kind, _address(text), int(port, 16)
    for words in _lines(pid, "packet"):
        found[words[8]] = "packet", "all", 0
    for words in _lines(pid, "unix"):
        if int(words[3], 16) & 0x10000:
            name = words[7] if len(words) > 7 else ""
            kind = "unix, abstract" if name.startswith("@") else "unix"
            found[words[6]] = kind, re.sub("[0-9a-f]{32}", "RANDOM", name), name
    return found


def _lines(pid, kind):
    path = Path(f"/proc/{pid}/net/{kind}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(text):
    """Return an address as usual: the kernel prints words of 4 bytes, in the processor's order."""
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return str(ipaddress.ip_address(b"".join(words)))


def of_the_page(title="Sockets that listen"):
    """Return a table: command -> {(process, kind, address)}, or {(process, file, mode)}."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(title)
    edges = [at for at, line in enumerate(lines) if at > begin and line.strip().startswith("====")]
    spans = [match.span() for match in re.finditer("=+", lines[edges[0]])]
    found, command = {}, ""
    for line in lines[edges[1] + 1 : edges[2]]:
        first, process, *words = (line[slice(*span)].strip(" `") for span in spans[:4])
        command = first.strip("`\\") or command
        found.setdefault(command, set())
        if process:
            found[command].add((process, *words))
    return found


def as_nobody(function):
    """Run a function in a child that is another user; return whether its result is true.

    It can import nothing: the user may not be able to read the files of this one.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
