"""What each rank has and does with 2 to 32 ranks: descriptors, memory, wake-ups, system calls.

A cell has the number of the master, and the median of the workers. Exact are descriptors, maps (of
/proc/PID/maps), threads, shared memory (of all segments, divided by the ranks) and commands: the
same with every run. The others depend on timing: own memory (it counts pages that a rank has to
itself), wake-ups (what it has written: a byte for each sleeping rank), switches (from one process
to another, both kinds of /proc/PID/status) and the CPU time. Waiting ranks leave the core to others
in `sched_yield`, which the system calls do without; strace counts them, in a session of its own,
where it is installed.
"""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from synkhronos._machine import shared_memory
from synkhronos.comm.shared.gate_memory import GateMemory
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

_SETTLE_SECONDS = 0.03  # in which ranks without work go to sleep
_AT_REST = ("descriptors", "maps", "threads", "own memory, MB")
_IN_A_CALL = ("wake-ups", "switches", "CPU time, us")
_CALLS = "system calls"


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--ranks", options.counts, [2, 4, 8, 16, 32], "ranks of each session")
    options.add(parser, "--calls", options.count, 100, "calls of each kind")


def measure(args, report):
    """Count in a session of each size, and show the tables."""
    report.results.update(cores=os.cpu_count(), sessions=[])
    for n_ranks in turns.progress("sessions", args.ranks):
        session = _Session(n_ranks, args.calls, _from_proc)
        missing = "is not installed"
        if shutil.which("strace"):
            missing = _add_traced(session, n_ranks, max(1, args.calls // 10))
        report.results["sessions"].append(session.found)
    report.show(_text(report.results["sessions"]))
    if missing:
        report.show(f"no {_CALLS}: strace {missing}")


class _Session:
    """The counts of one session, in `found`: at rest, and of a call of each kind.

    Parameters
    ----------
    n_ranks, n_calls : int
    look : callable
        Returns the counters of a process that only grow, by their names.
    """

    def __init__(self, n_ranks, n_calls, look):
        self._look, self.pids = look, [os.getpid()]
        self.times = {}  # phase -> its begin and end by the clock, its calls
        self.found = {"ranks": n_ranks, "rest": {}, "phases": {}}
        import synkhronos as synk
        from synkhronos._host import library
        from synkhronos._host import tensor as T
        from synkhronos._session.current import current

        self._begin()
        synk.fork(n_ranks)
        try:
            self._session = current("the benchmark")
            self.pids += self._session.worker_pids
            self._end("fork()", 1)
            self._rest("after fork()")
            x = T.matrix("x", "float32")
            f = synk.function([x], x.sum())
            data = synk.data(np.ones((2 * n_ranks, 4), "float32"))
            little, much, part = (library.shared(np.zeros(n, "float32")) for n in (256, 1 << 18, 1))
            reduced = synk.function([x], synk.ops.all_reduce(x.sum(axis=0), op="sum"))
            column = synk.data(np.ones(4 * n_ranks, "float32"))
            self._take("first distribute()", synk.distribute, 1)
            for name, call in {
                "a tiny function": lambda: f(data),
                "the same, all_reduce in it": lambda: reduced(data),
                "all_reduce, 1 KiB": lambda: synk.all_reduce(little),
                "all_reduce, 1 MiB": lambda: synk.all_reduce(much),
                "broadcast, 1 MiB": lambda: synk.broadcast(much),
                "gather, 1 KiB": lambda: synk.gather(little),
                "scatter of a Data": lambda: synk.scatter(part, column),
                "scatter and all_gather": lambda: (
                    synk.scatter(part, column),
                    synk.all_gather(part),
                ),
            }.items():
                for _ in range(3):  # so often all_gather takes new memory
                    call()
                self._take(name, call, n_calls)
            self._rest("at the end")
            self._share()
            # What a process has written counts as its parent's, too, when it has ended.
            self._look = lambda pid: {}
            self._begin()
        finally:
            synk.close()
        self._end("close()", 1)

    def _take(self, name, call, n_calls):
        self._begin()
        sequence = self._session.gate.sequence
        for _ in range(n_calls):
            call()
        commands = (self._session.gate.sequence - sequence) / n_calls
        self._end(name, n_calls)["commands"] = commands

    def _begin(self):
        time.sleep(_SETTLE_SECONDS)
        self._before = [self._look(pid) for pid in self.pids]
        self._begun = time.time()

    def _end(self, name, n_calls):
        """Note how the counters of the ranks have grown in a phase, for one of so many calls."""
        time.sleep(_SETTLE_SECONDS)
        self.times[name] = self._begun, time.time(), n_calls
        after = [self._look(pid) for pid in self.pids]
        before = [*self._before, *[{} for _ in after[len(self._before) :]]]
        grown = [
            {each: (now - then.get(each, 0)) / n_calls for each, now in new.items()}
            for new, then in zip(after, before)
        ]
        noted = {each: _both([one.get(each) for one in grown]) for each in grown[0]}
        self.found["phases"][name] = noted
        return noted

    def _rest(self, when):
        found = [_at_rest(pid) for pid in self.pids]
        self.found["rest"][when] = {each: _both([one[each] for one in found]) for each in _AT_REST}

    def _share(self):
        segments = {}
        for pid in self.pids:
            segments.update(shared_memory.mapped_by(pid))
        self.found["segment_bytes"] = sum(segments.values())
        self.found["gate_bytes"] = GateMemory.nbytes(len(self.pids))


def _both(numbers):
    """Return the number of the master, and the median of the workers, None if there is none."""
    of_workers = [each for each in numbers[1:] if each is not None]
    return numbers[0], statistics.median(of_workers) if of_workers else None


def _fields(pid, file):
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return {
        name: rest.split()[0]
        for name, _, rest in (line.partition(":") for line in lines)
        if rest.strip()
    }


def _at_rest(pid):
    """Return what a process has."""
    own = _fields(pid, "smaps_rollup")
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "maps": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": int(_fields(pid, "status")["Threads"]),
        "own memory, MB": (int(own["Private_Dirty"]) + int(own["Private_Clean"])) / 1024,
    }


def _from_proc(pid):
    """Return the counters that the system keeps of a process."""
    status, written = _fields(pid, "status"), int(_fields(pid, "io")["syscw"])
    cpu = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    switches = sum(int(status[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary"))
    return dict(zip(_IN_A_CALL, (written, switches, int(cpu) / 1000)))


def _add_traced(session, n_ranks, n_calls):
    """Add the system calls in a call, of another session like this one; or say why it can't."""
    with tempfile.TemporaryDirectory() as folder:
        line = ["strace", "-f", "-ff", "-ttt", "-qq", "-o", f"{folder}/of"]
        strace = subprocess.Popen([*line, "-p", str(os.getpid())])
        try:
            while _fields(os.getpid(), "status")["TracerPid"] == "0":
                if strace.poll() is not None:
                    return "may not trace this process"
                time.sleep(0.01)
            # Counted afterwards: what this process reads now would be in its own file.
            traced = _Session(n_ranks, n_calls, lambda pid: {})
        finally:
            strace.send_signal(signal.SIGINT)
            strace.wait()
        times = [_times_of_calls(Path(folder, f"of.{pid}")) for pid in traced.pids]
    for name, (begin, end, n_turns) in traced.times.items():
        counts = [sum(begin <= at < end for at in each) / n_turns for each in times]
        session.found["phases"][name][_CALLS] = _both(counts)
    return None


def _times_of_calls(file):
    """Return when the first thread of a process has made its system calls."""
    lines = [line.split(" ", 1) for line in file.read_text(errors="replace").splitlines()]
    # Lines of signals begin otherwise.
    called = [at for at, call in lines if call[0].isalpha() and not call.startswith("sched_yield(")]
    return [float(at) for at in called]


def _text(sessions):
    table = frame.Table("", *[str(each["ranks"]) for each in sessions], first=38, least=16)
    lines = [
        table.line("master / median of the workers", *[f"{e['ranks']} ranks" for e in sessions])
    ]
    for when in sessions[0]["rest"]:
        lines.append(f"{when}:")
        for name in _AT_REST:
            cells = [_cell(each["rest"][when][name], "MB" in name) for each in sessions]
            lines.append(table.line(f"  {name}", *cells))
    for name, key in (("segments", "segment_bytes"), ("cells, mailbox, boards", "gate_bytes")):
        cells = [f"{each[key] / each['ranks'] / 1e6:.2f}" for each in sessions]
        lines.append(table.line(f"  {name}, MB a rank", *cells))
    for counter in (*_IN_A_CALL, _CALLS, "commands"):
        phases = {name: each for name, each in sessions[0]["phases"].items() if counter in each}
        lines += [f"{counter} in:"] * bool(phases)
        for phase in phases:
            cells = [_cell(each["phases"][phase][counter], True) for each in sessions]
            lines.append(table.line(f"  {phase}", *cells))
    return "\n".join(lines)


def _cell(both, is_broken):
    """Return the numbers of the master and the workers, or one of both, as text."""
    each = both if isinstance(both, (tuple, list)) else [both]
    shown = [
        f"{one:.1f}" if is_broken and one < 100 else f"{one:.0f}" for one in each if one is not None
    ]
    return " / ".join(shown)
