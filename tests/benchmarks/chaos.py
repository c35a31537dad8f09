"""A training on test hosts with faults at random, those of `_FAULTS`; it needs root.

A script trains on two ranks of each host, with `synk.resume`, and `synkhronos launch --restarts`
starts it again. All the while another host has a fault, which ends some time later. Each fault
comes once before one comes again. Then the script runs without faults, with as many hosts at each
step as it had in the chaos: the parameters must have the same bits. Lost is the time from the tick
that an attempt goes on from to the last one before the fault.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from support import hosts, launching

from synkhronos.tools.bench import frame, options

LOAD_MATTERS = False  # its script sleeps most of the time
_SCRIPT = Path(__file__).with_name("programs") / "survivor.py"
_AWAY_SECONDS = 25.0
_LEAST = 3  # hosts that no fault hits at once
_RANKS = 2  # of a host: the first process, and a worker
_WAIT_START = 40.0


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--hosts", options.count, 8, "test hosts")
    options.add(parser, "--seconds", options.positive, 180.0, "that the steps take, all together")
    options.add(parser, "--pause", options.positive, 30.0, "seconds between two faults")
    options.add(parser, "--every", options.positive, 10.0, "seconds between two files of the run")
    options.add(parser, "--seed", options.whole, 1, "of the faults")


def measure(args, report):
    """Let the script survive, replay it, and show what was lost."""
    if hosts.missing():
        raise frame.Refused(f"needs {hosts.missing()}")
    with tempfile.TemporaryDirectory() as folder, hosts.up(args.hosts) as these:
        chaos, replay = Path(folder, "chaos"), Path(folder, "replay")
        for each in (chaos, replay):
            each.mkdir()
        pause = 0.05
        steps = int(args.seconds / pause / 2)
        given = {"STEPS": steps, "EVERY": args.every, "PAUSE": pause, "RANKS": _RANKS}
        report.results.update(_survive(these, chaos, args, given, report))
        for begin, n, end in _segments(chaos, steps):
            report.show(f"replayed: steps {begin} to {end} on {n // _RANKS} hosts")
            line = these.launch(_SCRIPT, replay, hosts=",".join(these.addresses[: n // _RANKS]))
            own = _environment(these, {**given, "STEPS": end, "PAUSE": 0})
            subprocess.run(line, env=own, check=True)
        with np.load(chaos / "end.npz") as one, np.load(replay / "end.npz") as other:
            same = all(one[name].tobytes() == other[name].tobytes() for name in one.files)
    report.results["same"] = same
    report.show(f"the parameters have {'the same bits' if same else 'OTHER bits'}")
    if not same:
        raise frame.Failed("the chaos changed the parameters.")


def _survive(these, folder, args, given, report):
    """Run the script in the chaos; return the faults, the attempts and what was lost."""
    limits = "--min-hosts", 2, "--lost-after", 4, "--wait-start", _WAIT_START
    line = these.launch("--restarts", 100, *limits, _SCRIPT, folder)
    environment = _environment(these, given)
    faults, is_over = [], threading.Event()
    begun = time.monotonic()
    with subprocess.Popen(line, env=environment) as script:
        chaos = _Chaos(these, args, faults, is_over, report, script.pid)
        chaos = threading.Thread(target=chaos.run)
        chaos.start()
        try:
            status = script.wait(600 + 10 * args.seconds)
        finally:
            script.kill()  # it hangs, if it has not ended
            is_over.set()
            chaos.join()
    if status:
        raise frame.Failed(f"the training ended with status {status}.")
    lost = _lost(folder)
    report.show(
        f"{len(faults)} faults, {1 + len(lost)} attempts that began, {time.monotonic() - begun:.0f}"
        f" s; lost at most {max(lost, default=0):.1f} s of steps at once, {sum(lost):.1f} s in all"
    )
    return {"faults": faults, "lost": lost}


class _Chaos:
    """Hits hosts at random, and ends the faults later."""

    def __init__(self, these, args, faults, is_over, report, launcher):
        self.these, self._args, self._faults = these, args, faults
        self._is_over, self._report, self.launcher = is_over, report, launcher
        self.random, self._away = random.Random(args.seed), {}

    def run(self):
        """Hit one host after the other, until it is over."""
        begun, names = time.monotonic(), self._names()
        fault = next(names)
        while not self._is_over.wait(self._args.pause * self.random.uniform(0.5, 1.5)):
            for host, (until, back) in list(self._away.items()):
                if time.monotonic() > until:
                    back()
                    del self._away[host]
            if len(self.there()) > _LEAST and self._hit(time.monotonic() - begun, fault):
                fault = next(names)
        for _, back in self._away.values():
            back()

    def _hit(self, seconds, fault):
        """Let one of the hosts have a fault; return whether one has the process for it."""
        for host in self.random.sample(self.there(), len(self.there())):
            with contextlib.suppress(LookupError, psutil.Error, ProcessLookupError):
                back = _FAULTS[fault](self, host)
                self._away[host] = time.monotonic() + _AWAY_SECONDS, back
                self._faults.append([seconds, host, fault])
                self._report.show(f"{seconds:.0f} s: host {host}: {fault}")
                return True
        return False

    def there(self):
        """Return the hosts without a fault."""
        return [h for h in range(1, self.these.n_hosts + 1) if h not in self._away]

    def _names(self):
        while True:
            yield from self.random.sample(list(_FAULTS), len(_FAULTS))


def _cut(chaos, host):
    chaos.these.cut(host)
    return functools.partial(chaos.these.mend, host)


def _part(chaos, host):
    pair = host, chaos.random.choice([each for each in chaos.there() if each != host])
    chaos.these.part(*pair)
    return functools.partial(chaos.these.join, *pair)


def _spoil_daemon(does, chaos, host):
    """Let the next starts of mpirun's daemon fail; there is one after all processes are killed."""
    daemon = chaos.these.in_place_of_daemon(host)
    daemon.write_text(does)
    _signal_all(signal.SIGKILL, chaos, host)
    return daemon.unlink


def _signal_all(number, chaos, host):
    return _signal(chaos.these.pids(host), number)


def _signal_one(kind, number, chaos, host):
    return _signal([_process(kind, chaos, host).pid], number)


def _signal(pids, number):
    """Send a signal to processes; return a function that lets them go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return functools.partial(_signal, pids, signal.SIGCONT)


def _process(kind, chaos, host):
    """Return a process of a host, or launch's mpirun; raise LookupError if it is not there now."""
    if kind == "mpirun":
        return psutil.Process(chaos.launcher).children()[0]
    daemon = launching.daemon_on(chaos.these, host)
    if kind == "daemon":
        return daemon
    guard = daemon.children()[0]
    if kind == "guard":
        return guard
    leader = guard.children()[-1]  # after the watcher of the guard
    if kind == "leader":
        return leader
    children = {"comm.mpi.carrier" in " ".join(e.cmdline()): e for e in leader.children()}
    return children[kind == "carrier"]


_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_KINDS = "worker", "leader", "carrier", "guard", "daemon", "mpirun"
_FAULTS = {  # name -> function of the chaos and a host, which returns what ends the fault
    "cut off": _cut,
    "cut off from one other": _part,
    "its daemon fails": functools.partial(_spoil_daemon, "exit 1"),
    "its daemon hangs": functools.partial(_spoil_daemon, "sleep 600"),
    **{f"all {how}": functools.partial(_signal_all, of) for how, of in _SIGNALS.items()},
    **{
        f"{kind} {how}": functools.partial(_signal_one, kind, of)
        for kind in _KINDS
        for how, of in _SIGNALS.items()
    },
}


def _lost(folder):
    """Return the seconds between the step that each attempt went on from, and the last before."""
    lost, ticks = [], {}
    for line in (folder / "ticks.txt").read_text().splitlines():
        attempt, what, step, at = line.split()
        if what == "begun" and int(attempt):
            last = ticks[max(ticks)] if ticks else float(at)
            lost.append(last - ticks.get(int(step), last))
            ticks = {each: when for each, when in ticks.items() if each <= int(step)}
        elif what == "tick":
            ticks[int(step)] = float(at)
    return lost


def _segments(folder, steps):
    """Yield the first step, the number of ranks and the end of each part of the run."""
    ranks = ast.literal_eval((folder / "ranks.txt").read_text())
    ends = [begin for begin, _ in ranks[1:]] + [steps]
    for (begin, n), end in zip(ranks, ends):
        if end > begin:
            yield begin, n, end


def _environment(these, given):
    return these.environment(**{name: str(value) for name, value in given.items()})
