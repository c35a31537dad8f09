"""A training on test hosts that are killed, stopped and cut off at random; it needs root.

A script trains on one rank of each host, with `synk.resume`, and `synkhronos launch --restarts`
starts it again. All the while another host is killed, stopped or cut off, and is back some time
later. Then the script runs without faults, with as many hosts at each step as it had in the chaos:
the parameters must have the same bits. Lost is the time from the tick that an attempt goes on from
to the last one before the fault.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from support import hosts

from synkhronos.tools.bench import frame, options

LOAD_MATTERS = False  # its script sleeps most of the time
_SCRIPT = Path(__file__).with_name("programs") / "survivor.py"
_AWAY_SECONDS = 25.0
_FAULTS = ("killed", "stopped", "cut off")
_LEAST = 3  # hosts that no fault hits at once


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
        given = {"STEPS": steps, "EVERY": args.every, "PAUSE": pause, "RANKS": 1}
        report.results.update(_survive(these, chaos, args, given, report))
        for begin, n, end in _segments(chaos, steps):
            report.show(f"replayed: steps {begin} to {end} on {n} hosts")
            line = these.launch(_SCRIPT, replay, hosts=",".join(these.addresses[:n]))
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
    line = [*these.launch("--restarts", "50", "--min-hosts", "2", "--lost-after", "4")]
    line += [str(_SCRIPT), str(folder)]
    environment = _environment(these, given)
    faults, is_over = [], threading.Event()
    begun = time.monotonic()
    with subprocess.Popen(line, env=environment) as script:
        chaos = threading.Thread(target=_Chaos(these, args, faults, is_over, report).run)
        chaos.start()
        try:
            status = script.wait()
        finally:
            is_over.set()
            chaos.join()
    if status:
        raise frame.Failed(f"the training ended with status {status}.")
    lost = _lost(folder)
    report.show(
        f"{len(faults)} faults, {1 + len(lost)} attempts, {time.monotonic() - begun:.0f} s; "
        f"lost at most {max(lost, default=0):.1f} s of steps at once, {sum(lost):.1f} s in all"
    )
    return {"faults": faults, "lost": lost}


class _Chaos:
    """Hits hosts at random, and brings them back."""

    def __init__(self, these, args, faults, is_over, report):
        self._these, self._args, self._faults = these, args, faults
        self._is_over, self._report = is_over, report
        self._random, self._away = random.Random(args.seed), {}

    def run(self):
        """Hit one host after the other, until it is over."""
        begun = time.monotonic()
        while not self._is_over.wait(self._args.pause * self._random.uniform(0.5, 1.5)):
            for host, (until, back) in list(self._away.items()):
                if time.monotonic() > until:
                    back()
                    del self._away[host]
            there = [h for h in range(1, self._these.n_hosts + 1) if h not in self._away]
            if len(there) > _LEAST:
                host, fault = self._random.choice(there), self._random.choice(_FAULTS)
                back = getattr(self, f"_{fault.split()[0]}")(host)
                self._away[host] = time.monotonic() + _AWAY_SECONDS, back
                seconds = time.monotonic() - begun
                self._faults.append([seconds, host, fault])
                self._report.show(f"{seconds:.0f} s: host {host} is {fault}")
        for _, back in self._away.values():
            back()

    def _killed(self, host):
        _signal(self._these.pids(host), signal.SIGKILL)
        return lambda: None

    def _stopped(self, host):
        pids = self._these.pids(host)
        _signal(pids, signal.SIGSTOP)
        return lambda: _signal(pids, signal.SIGCONT)

    def _cut(self, host):
        self._these.cut(host)
        return lambda: self._these.mend(host)


def _signal(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
