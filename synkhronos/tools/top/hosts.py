"""``synkhronos top`` on several machines: mpirun starts one on each, which prints JSON lines.

Each machine has an mpirun of its own: if one can't be reached, the others can still be watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from typing import Any, Callable

from synkhronos._machine.devices import module_command
from synkhronos.comm.mpi import folders
from synkhronos.launch import mpirun, where

_FIRST_SECONDS = 60.0  # for all machines to answer at first
_END_SECONDS = 10.0


class Hosts:
    """Watches the sessions of all machines, until the end of `stack`."""

    def __init__(self, options: Any, stack: contextlib.ExitStack) -> None:
        self._options = options
        self._hosts = where.find_hosts(options.hosts, options.hostfile)
        mpirun.check()
        self._begun: dict[str, bytes] = {}  # by host: the line that is not complete yet
        self._said: dict[str, list[bytes]] = {}  # by host: what mpirun has printed by itself
        self._last: dict[str, dict[str, Any]] = {}  # by host: the last answer
        self.problems: dict[str, str] = {}
        environment = stack.enter_context(folders.of_mpirun(os.environ))
        self._selector = stack.enter_context(selectors.DefaultSelector())
        interval = str(options.interval or 1.0)
        command = module_command("synkhronos", "top", "--json", "--wait", "--interval", interval)
        for host in self._hosts:
            child = subprocess.Popen(
                mpirun.line([host], options, command, {}),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for this process
            )
            stack.callback(_end, child)
            self._begun[host.name], self._said[host.name] = b"", []
            self._selector.register(child.stdout, selectors.EVENT_READ, host)
        self._first_end = time.monotonic() + _FIRST_SECONDS

    def sample(self, seconds: float, pause: Callable[[float], Any] = time.sleep) -> dict[str, Any]:
        """Wait for some seconds, and return the last answers of all machines."""
        end = time.monotonic() + seconds
        while True:
            pause(0.02)
            for key, _ in self._selector.select(0):
                self._take(key)
            have_answered = len(self._last) + len(self.problems) == len(self._hosts)
            if time.monotonic() >= (end if have_answered else max(end, self._first_end)):
                break
        sessions, problems = [], dict(self.problems)
        for name, answer in self._last.items():
            for what, problem in answer.get("problems", {}).items():
                problems[f"{name}, {what}"] = f"{name}: {problem}"
            for session in answer["sessions"]:
                ranks = [{**rank, "host": name} for rank in session["ranks"]]
                sessions.append({**session, "ranks": ranks})
        return {"seconds": seconds, "sessions": sessions, "problems": problems}

    def _take(self, key):
        host, data = key.data, os.read(key.fd, 1 << 16)
        *lines, rest = (self._begun[host.name] + data).split(b"\n")
        if not data:
            self._selector.unregister(key.fileobj)
            self._last.pop(host.name, None)
            text = b"\n".join([*self._said[host.name], rest]).decode(errors="replace")
            self.problems[host.name] = mpirun.why_not_started(text, [host], self._options.agent)
            return
        for line in lines:
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            has_sessions = isinstance(answer, dict) and isinstance(answer.get("sessions"), list)
            if has_sessions and isinstance(answer.get("problems", {}), dict):
                self._last[host.name] = answer
            else:
                self._said[host.name].append(line)
        self._begun[host.name] = rest


def _end(child):
    child.terminate()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
