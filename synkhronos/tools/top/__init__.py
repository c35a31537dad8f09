"""Watch sessions that run: ranks, memory, calls a second, and who waits for whom.

    synkhronos top                            all sessions of this user, each second
    synkhronos top --wait                     also those that begin later
    synkhronos top --pid 4711 --interval 5    the session of that process
    synkhronos top --once                     one table
    synkhronos top --json --interval 1        an object in each line
    synkhronos top --hosts node0,node1        on several machines

q or Ctrl-C ends it; arrows, j, k, PgUp and PgDn scroll if there are more lines than the terminal
has. It reads what is in shared memory: the ranks do nothing for it. The exit status is 1 if there
is no session.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import select
import selectors
import signal
import sys
import time
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any, Callable, Iterator

from synkhronos._machine.devices import module_command
from synkhronos._machine.processes import wait_or_kill
from synkhronos._wording import printable
from synkhronos.comm.mpi import folders
from synkhronos.launch import mpirun, where
from synkhronos.profiling import live
from synkhronos.tools import launch
from synkhronos.tools.top.sampling import Sampler

_NONE = "There is no running session of {} with several ranks; --wait waits for one."
_FIRST_SECONDS = 60.0  # for all machines to answer at first
_END_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to a parser."""
    launch.add_hosts_arguments(parser, "watch on each of these machines, such as node0,node1")
    launch.add_mpirun_arguments(parser)
    parser.add_argument("--pid", type=int, help="watch the session of this process alone")
    parser.add_argument(
        "--interval", metavar="SECONDS",
        type=functools.partial(launch.seconds, least=0.1, most=3600, limits="0.1 to 3600"),
        help="time between two tables (default: 1); where no terminal is, it prints one after the "
        "other, and without it only one",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument(
        "--wait", action="store_true", help="wait for a session, at first and after its end"
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one in a line")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Watch until the sessions end, or the user ends it; return the exit status."""
    is_terminal = sys.stdout.isatty() and not options.json and not options.once
    is_once = options.once or (options.interval is None and not is_terminal)
    try:
        with contextlib.ExitStack() as stack:
            if options.hosts is None and options.hostfile is None:
                sampler: Any = Sampler(options.pid)
            else:
                sampler = _Hosts(options, stack)
            show, pause = functools.partial(_print, options.json), time.sleep
            if is_terminal:
                show, move = stack.enter_context(_on_screen())
                pause = stack.enter_context(_keys(move))
            status, said = _watch(sampler, options, is_once, show, pause)
        for sentence in said:  # when the terminal is as it was
            print(printable(sentence), file=sys.stderr)
        return status
    except KeyboardInterrupt:
        return 0
    except (ImportError, ValueError) as error:
        print(printable(f"synkhronos top: {error}"), file=sys.stderr)
        return 2


def _watch(sampler, options, is_once, show, pause):
    has_seen = False
    while True:
        sample = sampler.sample(options.interval or 1.0, pause)
        if sample["sessions"] or (options.wait and not is_once):
            show(sample)
        if sample["sessions"]:
            has_seen = True
            if is_once:
                return int(bool(_problems(sample))), []
        elif not options.wait:
            break
    none = _NONE.format("this user" if options.pid is None else f"process {options.pid}")
    return int(not has_seen), ["The session has ended." if has_seen else none, *_problems(sample)]


def _problems(sample):
    return list(sample.get("problems", {}).values())


def _watched(sample):
    return live.Watched(live.merged([sample]), _problems(sample))


def _print(as_json, sample):
    print(json.dumps(sample) if as_json else f"{_watched(sample)}\n", flush=True)


@contextlib.contextmanager
def _on_screen() -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[bytes], None]]]:
    """Yield what shows a table in place of the last, and what scrolls it; restore the terminal."""
    screen = live.screen(alternate=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with screen:
        window = live.Window(screen, sys.stdin.isatty())
        yield lambda found: window.show(_watched(found)), window.move


@contextlib.contextmanager
def _keys(move: Callable[[bytes], None]) -> Iterator[Callable[[float], None]]:
    """Yield a function that sleeps, moves by keys, and raises KeyboardInterrupt for q."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def sleep(seconds):
        if select.select([terminal], [], [], seconds)[0]:
            pressed = os.read(terminal, 64)
            if not pressed or b"q" in pressed.lower():
                raise KeyboardInterrupt
            move(pressed)

    try:
        tty.setcbreak(terminal)
        yield sleep
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class _Hosts:
    """Watches the sessions of several machines, until the end of `stack`.

    Each has an mpirun of its own, which starts `synkhronos top` there and prints JSON lines: if one
    machine can't be reached, the others can still be watched.
    """

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
            line = mpirun.line([host], options, command, {})
            child = Popen(
                line, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
                start_new_session=True,  # a Ctrl-C is for this process
            )  # fmt: skip
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
            self.problems[host.name] = mpirun.why_not_started(text, [host], self._options)
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
    wait_or_kill(child, _END_SECONDS)
    child.stdout.close()
