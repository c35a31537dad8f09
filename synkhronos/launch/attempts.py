"""Restart a run after a loss, on hosts that come and go.

    hosts, of options or a program ──▶ those that answer ──▶ attempt ──▶ status, what was lost
            ▲                                                                 │
            └──────── something was lost, and not all restarts are used ◀─────┘

The question whether a host answers also ends the processes that earlier attempts have left there.
After a loss or a failed start, mpirun's daemon must answer from it, too: a login may reach a host
that the network does not reach. A loss is a machine that is silent, a worker that died, or a
process that a signal has ended, or that was stopped. A script that fails by itself would fail
again, so the run ends with it.
"""

from __future__ import annotations

import functools
import os
import select
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.processes import end_with_parent
from synkhronos.launch import CannotLaunch, leftovers, mpirun
from synkhronos.launch.watch import Watch
from synkhronos.launch.where import Host

COUNT = "SYNKHRONOS_RESTART"  # tells a script how many attempts there were before
WAIT_SECONDS = 600.0  # for enough hosts
_LOOK_SECONDS = 5.0  # between two searches for hosts
_DISCOVER_SECONDS = 60.0  # for the program that prints hosts
_MOST_PRINTED = 1 << 20  # bytes that it may print


@dataclass(frozen=True)
class Limits:
    """The numbers of hosts of an attempt, of restarts, and of seconds to wait for hosts."""

    least: int = 1
    most: int | None = None
    restarts: int = 0
    wait_seconds: float = WAIT_SECONDS

    def __post_init__(self) -> None:
        for name, value, lowest in (
            ("--min-hosts", self.least, 1),
            ("--max-hosts", self.least if self.most is None else self.most, 1),
            ("--restarts", self.restarts, 0),
        ):
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}.")
        if self.most is not None and self.most < self.least:
            raise ValueError(f"--max-hosts {self.most} is less than --min-hosts {self.least}.")


@dataclass
class Attempts:
    """The attempts of one run."""

    limits: Limits
    find: Callable[[], Sequence[Host]]  # returns the hosts of now; raises ValueError if it can't
    begin: Callable[[Sequence[Host], Mapping[str, str]], Watch]  # (hosts, variables) -> an attempt
    say: Callable[[str], None]  # prints a sentence of this command
    options: Any = field(default_factory=mpirun.Options)  # how hosts are reached
    _name: str = field(default_factory=mpirun.new_token)  # of the run, inherited by its processes
    _away: dict[str, str] = field(default_factory=dict)  # hosts without an answer -> why
    _asks_daemons: bool = False  # after a loss or a failed start
    _silent: set[str] = field(default_factory=set)  # hosts of which mpirun's daemon is silent

    def run(self) -> tuple[int, Watch | None]:
        """Return the last attempt's status, and the attempt; 1 and None if too few hosts answer."""
        failed, loss, n_attempts = None, "", self.limits.restarts + 1
        for number in range(n_attempts):
            hosts = self._wait_for_hosts(failed)
            if hosts is None:
                break
            if not hosts:
                return 1, None
            names, lost = ", ".join(map(_name, hosts)), loss and f". Lost before: {loss}"
            self.say(f"attempt {number + 1} of {n_attempts} on {names}{self._without()}{lost}.")
            attempt = self.begin(hosts, {COUNT: str(number), leftovers.VARIABLE: self._name})
            status = attempt.run()
            loss = self._loss(attempt) if status else None
            if loss is None:
                break
            is_theirs = not attempt.has_started and not attempt.hit
            self._asks_daemons, failed = True, hosts if is_theirs else None
        else:
            if self.limits.restarts:
                tried = _wording.count(n_attempts, "attempt")
                self.say(f"gave up after {tried}: {loss}.")
        return status, attempt

    def _loss(self, attempt):
        """Return the loss that has ended an attempt; None if it would end another one, too."""
        if attempt.has_started or attempt.interrupted_by:
            return attempt.loss
        return attempt.hit or "nothing was started"

    def _wait_for_hosts(self, failed):
        """Return the hosts of the next attempt; an empty list if too few answer in time.

        Return None if the next attempt would start nothing either, after one on the `failed` hosts.
        """
        end = time.monotonic() + self.limits.wait_seconds
        said = ""
        while True:
            hosts, problem = self._hosts_that_answer()
            is_silent = not hosts and self._silent.issuperset(map(_name, failed or []))
            if failed and (hosts[: self.limits.most] == failed or is_silent):
                return None
            if len(hosts) >= self.limits.least:
                return hosts[: self.limits.most]
            left = end - time.monotonic()
            least = _wording.count(self.limits.least, "host")
            state = f"{len(hosts)} of at least {least} answer{problem or self._without()}"
            if left <= 0:
                self.say(f"{state}: waited {self.limits.wait_seconds:g} s for more, and gave up.")
                return []
            if state != said:
                said = state
                self.say(f"{state}: waiting up to {left:.0f} s for more.")
            time.sleep(min(left, _LOOK_SECONDS))

    def _hosts_that_answer(self):
        """Return the hosts that answer now, and, in words, why hosts could not be found."""
        try:
            hosts = self.find()
        except ValueError as error:
            return [], f" ({error})"
        away = self._away = mpirun.ask_all(hosts, self.options, mpirun.leave_nothing(self._name))
        if self._asks_daemons:
            there = [host for host in hosts if _name(host) not in away]
            run = {leftovers.VARIABLE: self._name}
            silent = mpirun.ask_daemons(there, self.options, run)
            self._silent = {*silent}
            away.update(silent)
        return [host for host in hosts if _name(host) not in away], ""

    def _without(self):
        return f", without {mpirun.listed(self._away)}" if self._away else ""


def _name(host):
    return host.name or "localhost"


def discover(command: str) -> str:
    """Return what a program prints about the hosts that there are now, or raise CannotLaunch."""
    try:
        words: Any = shlex.split(command)
    except ValueError as error:
        raise CannotLaunch(f"--discover {command!r} is no command: {error}") from error
    if not words:
        raise CannotLaunch(f"--discover must name a program, got {command!r}.")
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
        with process:
            try:
                text = _printed(process).decode()
            finally:
                process.kill()
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotLaunch(f"--discover {command!r} can't tell the hosts: {reason}") from error
    if process.returncode:
        raise CannotLaunch(f"--discover {command!r} has ended with status {process.returncode}.")
    return text


def _printed(process):
    """Return what a process prints until it ends; raise if it takes too long or prints too much."""
    end, parts, poll = time.monotonic() + _DISCOVER_SECONDS, [], select.poll()
    poll.register(process.stdout, select.POLLIN)
    while sum(map(len, parts)) <= _MOST_PRINTED:
        if not poll.poll(1000 * max(0.0, end - time.monotonic())):
            raise subprocess.TimeoutExpired(process.args, _DISCOVER_SECONDS)
        part = os.read(process.stdout.fileno(), _MOST_PRINTED)
        if not part:
            process.wait(max(0.0, end - time.monotonic()))
            return b"".join(parts)
        parts.append(part)
    raise ValueError(f"it has printed more than {_MOST_PRINTED} bytes")
