"""Sample running sessions from outside, without work of their ranks.

    /proc/<pid>/fd    ──▶ which processes share the memory of a gate (`gate_memory`)
    its cells         ──▶ 50 times a second: the number of the call, and who waits for whom
    /proc/<pid>/stat  ──▶ once a second: CPU time, state, memory

Each look opens the memory for reading and closes it, so that the memory of a session that ends is
freed. If root asks for any process, another user may have written what is read: sizes, numbers and
texts are checked before they are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections import Counter
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from synkhronos import _systems
from synkhronos._machine.processes import cpu_seconds_of, life_and_memory_of, stat_of
from synkhronos._machine.shared_memory import mapped_by
from synkhronos.comm.shared import gate_memory
from synkhronos.comm.shared.gate_memory import LABEL, LINE, NAME, GateMemory

LOOK_SECONDS = 0.02
MOST_RANKS, MOST_GATES = 4096, 64  # of a gate, and of a process
_MOST_RANKS_ANYWHERE, _MOST_PID = 1 << 20, 1 << 22
COMPUTES, WAITS, NO_CALL = "computes", "waits", "no_call"
# Processes that a command or script starts: the command or script is shown in their place.
_BEGUN = frozenset(program for system in _systems.there() for program in system.programs)
_MOST_BEGUN = 8  # generations of such processes
_MOST_BYTES = 1 << 16  # of the command line or environment of a process
_LINK = f"/memfd:{NAME} (deleted)"


class Seen(NamedTuple):
    """The state of the cells at one look: the number of the call, and what each rank does."""

    call: int
    meeting: int
    does: list[str]


def read_cells(cells: list[int], has_master: bool = True) -> Seen:
    """Return what the cells of a gate show; `has_master` if the session's master is one of them.

    Master and worker are in the second call, in which the worker has come to a meeting:

    >>> of_master, of_worker = [1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, (2 << 20) + 1, 0, 0]
    >>> read_cells([2, 0, 0, 0, 0, 0, 0, 0, *of_master, *of_worker])
    Seen(call=2, meeting=0, does=['computes', 'waits'])
    """
    call = cells[gate_memory.SEQUENCE]
    ranks = [cells[at : at + LINE] for at in range(LINE, len(cells), LINE)]
    begin = call << gate_memory.MEETINGS
    met = [max(rank[gate_memory.MET], begin) for rank in ranks]
    meeting = min(met) - begin
    inside = [rank[gate_memory.DONE] < call for rank in ranks]
    away = [rank[gate_memory.ASLEEP] == gate_memory.ELSEWHERE for rank in ranks]
    if not any(inside):  # a rank of another machine may be: then the master waits for it
        return Seen(call, meeting, [WAITS if has_master and any(away) else NO_CALL] * len(ranks))
    fewest = min(each for each, is_in in zip(met, inside) if is_in)
    waits = [not i or m > fewest or a for i, m, a in zip(inside, met, away)]
    return Seen(call, meeting, [WAITS if each else COMPUTES for each in waits])


class ObservedGate:
    """The memory of a gate: its device and inode, the descriptor of each process, and its user."""

    def __init__(self, file: tuple[int, int], holders: dict[int, int], owner: int) -> None:
        self.file, self.holders, self.owner = file, holders, owner
        self.labels: list[dict[str, Any]] = []  # of the ranks here; empty until all have one
        self.is_wrong = False  # whether no gate of this version wrote the memory

    def look(self, with_labels: bool = False) -> Seen | None:
        """Return what the cells show; None if the memory has gone, or is not in use yet."""
        data = self._read()
        if data is None:
            return None
        n_ranks = len(data) // (8 * LINE + LABEL)
        end = 8 * LINE * (n_ranks + 1)
        if with_labels:
            texts = [data[at : at + LABEL] for at in range(end, end + LABEL * n_ranks, LABEL)]
            try:
                self.labels = [json.loads(text.rstrip(b"\0")) for text in texts]
            except ValueError:  # a rank has not begun, or is just ending
                self.labels = []
            if not _are_labels(self.labels):
                self.labels, self.is_wrong = [], True
            if not any(label["pid"] in self.holders for label in self.labels):
                self.labels = []  # with process numbers of another container
        has_master = any(label.get("role") == "master" for label in self.labels)
        return read_cells(memoryview(data)[:end].cast("q").tolist(), has_master)

    def _read(self):
        for pid, number in self.holders.items():
            with contextlib.suppress(OSError):  # it has ended, or closed the descriptor
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                file = os.open(f"/proc/{pid}/fd/{number}", flags)
                try:
                    status = os.fstat(file)
                    identity = status.st_dev, status.st_ino, status.st_uid
                    if identity != (*self.file, self.owner) or not stat.S_ISREG(status.st_mode):
                        continue
                    fcntl.fcntl(file, fcntl.F_GET_SEALS)  # raises unless the file is memory
                    of_rank = GateMemory.nbytes(1) - GateMemory.nbytes(0)
                    n_ranks = (status.st_size - GateMemory.nbytes(0)) // of_rank
                    is_right = 1 <= n_ranks <= MOST_RANKS
                    if not is_right or status.st_size != GateMemory.nbytes(n_ranks):
                        self.is_wrong = status.st_size > 0  # it is empty when it is made
                        continue
                    # Read and not mapped: its owner may truncate it now.
                    nbytes = 8 * LINE * (n_ranks + 1) + LABEL * n_ranks
                    data = os.pread(file, nbytes, 0)
                    if len(data) == nbytes:
                        return data
                finally:
                    os.close(file)
        return None


def _are_labels(labels):
    """Return whether ranks can have written these, by the `label` of their meetings."""
    for label in labels:
        if not isinstance(label, dict):
            return False
        numbers = [label.get(name) for name in ("rank", "of", "pid")]
        texts = label.get("device"), label.get("role", ""), label.get("session", "")
        if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
            return False
        rank, n_ranks, pid = numbers
        if not (0 <= rank < n_ranks <= _MOST_RANKS_ANYWHERE and 0 < pid <= _MOST_PID):
            return False
    return len({label["pid"] for label in labels}) == len(labels)


def find(pids: Iterable[int] | None = None) -> list[ObservedGate]:
    """Return the gates of processes, of all of this user by default; a gate belongs to their user.

    A set-uid program keeps descriptors that another user has opened.
    """
    holders_of: dict[tuple[int, int, int], dict[int, int]] = {}  # by device, inode and owner
    for pid in _own_processes() if pids is None else pids:
        with contextlib.suppress(OSError):  # it has ended, or is closed to others
            user, n_gates = os.stat(f"/proc/{pid}").st_uid, 0
            for number in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    if n_gates < MOST_GATES and os.readlink(path) == _LINK:
                        file = os.stat(path)
                        if file.st_uid == user:
                            n_gates += 1
                            key = file.st_dev, file.st_ino, user
                            holders_of.setdefault(key, {})[pid] = int(number)
    return [ObservedGate(key[:2], holders, key[2]) for key, holders in holders_of.items()]


def _own_processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name)


class Sampler:
    """Watches all sessions of this user, or that of one process."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._cpu: dict[int, tuple[float, float | None]] = {}  # of `_cpu`, at the last sample

    def sample(self, seconds: float, pause: Callable[[float], Any] = time.sleep) -> dict[str, Any]:
        """Watch for some seconds, and return what was seen, as ``--json`` prints it."""
        looks: list[tuple[ObservedGate, list[Seen]]] = [
            (gate, []) for gate in find(None if self._pid is None else [self._pid])
        ]
        begin = time.monotonic()
        for gate, _ in looks:
            gate.look(with_labels=True)
            for label in gate.labels:
                self._cpu.setdefault(label["pid"], _cpu(label["pid"]))
        while True:
            for gate, seen in looks:
                if look := gate.look():
                    seen.append(look)
            left = begin + seconds - time.monotonic()
            if left <= 0:
                break
            pause(min(left, LOOK_SECONDS))
        took = time.monotonic() - begin
        sessions = [
            self._session(gate, seen, took)
            for gate, seen in looks
            if seen and gate.look(with_labels=True) and gate.labels
        ]
        pids = {rank["pid"] for session in sessions for rank in session["ranks"]}
        self._cpu = {pid: _cpu(pid) for pid in pids}
        answer = {"host": socket.gethostname(), "seconds": round(took, 3), "sessions": sessions}
        wrong = {min(gate.holders) for gate, _ in looks if gate.is_wrong}
        if wrong:
            said = "The table of process {} can't be read: no Synkhronos of this version made it."
            answer["problems"] = {f"process {pid}": said.format(pid) for pid in sorted(wrong)}
        return answer

    def _session(self, gate, looks, seconds):
        labels = gate.labels
        is_session = "role" in labels[0]
        counted = [Counter(each) for each in zip(*(look.does for look in looks))]
        meetings = looks[-1].meeting - looks[0].meeting
        segments: dict[int, int] = {}
        ranks = []
        for label, does in zip(labels, counted):
            pid = label["pid"]
            life, resident = life_and_memory_of(pid)
            mapped = mapped_by(pid) or {}
            segments.update(mapped)
            rank = {
                "rank": label["rank"],
                "device": label["device"],
                "pid": pid,
                "is_master": label.get("role") == "master",
                "process": life,
                "cpu": self._cores(pid),
                "resident": resident,
                "shared": sum(mapped.values()),
            }
            # The cells don't show waits of ranks that only exchange messages.
            is_told = is_session or meetings
            for state in (COMPUTES, WAITS, NO_CALL):
                rank[state] = round(does[state] / len(looks), 4) if is_told else None
            ranks.append(rank)
        first = next((rank for rank in ranks if rank["is_master"]), ranks[0])
        calls = looks[-1].call - looks[0].call if is_session else meetings
        return {
            "id": labels[0].get("session") or f"{socket.gethostname()}:{gate.file[1]}",
            "kind": "session" if is_session else "group",
            "pid": first["pid"],
            "script": script_of(first["pid"]),
            "n_ranks": labels[0]["of"],
            "calls": looks[-1].call if is_session else looks[-1].meeting,
            "calls_per_second": round(calls / seconds, 2),
            "shared": sum(segments.values()),
            "ranks": ranks,
        }

    def _cores(self, pid):
        """Return how many cores a process has used since the last sample; None if not told."""
        (begin, before), (end, used) = self._cpu.get(pid, (0, None)), _cpu(pid)
        if before is None or used is None:
            return None
        return round((used - before) / (end - begin), 3)


def _cpu(pid):
    return time.monotonic(), cpu_seconds_of(pid)


def _strings(pid, name):
    """Return the strings in a file of a process, whose owner chooses its length."""
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace").split("\0")


def script_of(pid: int) -> str:
    """Return the command of a process, in short: its script and arguments, or its notebook."""
    for _ in range(_MOST_BEGUN):
        try:
            words, given = _strings(pid, "cmdline"), _strings(pid, "environ")
        except OSError:  # it has just ended
            break
        fields = _BEGUN.intersection(words[:4]) and stat_of(pid)
        if fields:
            pid = int(fields[2])  # its parent
            continue
        if "ipykernel_launcher" in words:  # Jupyter tells a kernel its notebook
            name = dict(each.partition("=")[::2] for each in given).get("JPY_SESSION_NAME")
            return os.path.basename(name or "a notebook")
        return shown(words[:-1])
    return f"process {pid}"


def shown(words: list[str]) -> str:
    """Return a command without the interpreter and its options.

    >>> shown(["/usr/bin/python3", "-u", "/home/me/train.py", "--epochs", "3"])
    'train.py --epochs 3'
    >>> shown(["python", "-m", "unittest", "-v"])
    'unittest -v'
    >>> shown(["python", "/usr/bin/synkhronos", "rule", "BSP"]), shown(["python"])
    ('synkhronos rule BSP', 'python')
    """
    rest = [word for word in words[1:] if not word.startswith("{")]  # facts from a launcher
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[1:]
    if rest and rest[0] in ("-m", "-c"):
        rest = rest[1:] if rest[0] == "-m" else rest[2:]
    return " ".join([os.path.basename(rest[0]), *rest[1:]]) if rest else "python"
