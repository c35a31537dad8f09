"""Scripts on test hosts: what they begin with, their start, and their output."""

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import textwrap
import threading
import time
from pathlib import Path

from support import hosts
from support.running import IN_PYTHON, python_path

BEGIN = """
import os, signal, sys, threading, time
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from support.machine_operations import KILL, NARROW, RAISE, SECONDS, SLEEP, STOP, attempt, trouble

theano.config.mode = "FAST_COMPILE"
n = synk.fork(int(os.environ["RANKS"]))
x, w = T.dvector("x"), theano.shared(np.zeros(3), "w")
total = synk.ops.all_reduce(trouble(x).sum(), "sum")
plain = synk.function([x], (trouble(x).sum(), "sum"))
reducing = synk.function([x], [(x.sum(), "sum")], updates=[(w, w + total)])
quiet = np.zeros(n)

def on(rank, what):
    rows = np.zeros(n)
    rows[rank] = what
    return rows

print("begun", plain(quiet), *reducing(quiet), flush=True)
"""


def start(these, script, tmp_path, ranks=1, impatient=False, **variables):
    """Start a script on the hosts, with a session of some ranks on each.

    Impatient processes take others for lost after 4 s in place of 8 s.
    """
    file = tmp_path / "script.py"
    file.write_text(BEGIN + textwrap.dedent(script))
    environment = these.environment(RANKS=str(ranks), PYTHONPATH=python_path(hosts.ROOT / "tests"))
    if impatient:
        environment.update(hosts.IMPATIENT)
    return subprocess.Popen(
        these.script("-n", str(ranks), file),
        env={**environment, **IN_PYTHON, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, seconds=300):
    """Return the output of a script; end what is left of mpirun."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError("the script did not end") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_line(process, beginning):
    """Read the output up to a line; return it."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    process.communicate()  # it has ended
    raise AssertionError(f"no line {beginning!r}")


def end_cut_off(these, process):
    """End a script whose second host was cut off, and what is left on both; mend the cable."""
    # mpirun itself waits for its daemon on the other machine; `synkhronos launch` ends it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    these.mend(2)
    for pid in (*these.pids(1), *these.pids(2)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


SERVER = """
import os, signal, sys, time, traceback
import synkhronos

folder, number = sys.argv[1], 0
while True:
    number += 1
    path = os.path.join(folder, f"{number}.py")
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        text = file.read()
    if text == "end":
        break
    try:
        exec(compile(text, path, "exec"), {"__file__": path})
    except BaseException:
        traceback.print_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    synkhronos.close()
    print("end of", number, flush=True)
"""


class Job:
    """A job on hosts that runs scripts one after another, each in a session of its own.

    To start a job takes longer than most scripts. A job that has ended, or that hangs, is started
    again for the next script.

    Attributes
    ----------
    hosts : Hosts
    folder : Path
        Where the scripts are.

    Parameters
    ----------
    these : Hosts
        No other job may run on them meanwhile.
    folder : Path
    begin : str
        What each script begins with.
    """

    def __init__(self, these, folder, begin=BEGIN):
        self.folder, self.hosts, self._begin = folder, these, begin
        self._process, self._lines, self._number = None, None, 0

    def run(self, script, ranks=1, **variables):
        """Run a script with some ranks on each host; return the lines that it prints."""
        self.begin(script, ranks, **variables)
        return self.rest()

    def begin(self, script, ranks=1, **variables):
        """Begin a script, with some environment variables."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._number += 1
        settings = {"RANKS": str(ranks), **variables}
        text = f"import os; os.environ.update({settings!r})\n{self._begin}{textwrap.dedent(script)}"
        self._give(text)

    def rest(self):
        """Return the other lines of the script."""
        return self.lines_before(f"end of {self._number}")

    def lines_before(self, last, seconds=300):
        """Return the lines before one."""
        found, end = [], time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                line = None
            if line is None:
                self._end()
                raise AssertionError(f"the job hangs or has ended after {found}")
            if line == last:
                return found
            found.append(line)

    def close(self):
        """Tell the job to end, and wait for it; check that nothing is left."""
        if self._process is not None and self._process.poll() is None:
            self._number += 1
            self._give("end")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(300)
            status = self._process.poll()
            self._end()
            assert status == 0
            assert self.hosts.is_empty()

    def _start(self):
        self._number = 0
        self.folder = Path(tempfile.mkdtemp(dir=self.folder))
        (self.folder / "server.py").write_text(SERVER)
        environment = self.hosts.environment(PYTHONPATH=python_path(hosts.ROOT / "tests"))
        self._process = subprocess.Popen(
            self.hosts.script(self.folder / "server.py", self.folder),
            env={**environment, **IN_PYTHON, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()

    def _give(self, text):
        path = self.folder / f"{self._number}.py"
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)

    def _end(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _read(process, lines):
    with process.stdout:
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
    lines.put(None)


@contextlib.contextmanager
def job(folder, begin=BEGIN):
    """Yield a `Job` on two hosts of its own; at the end it ends by itself, and nothing is left."""
    with hosts.up(2) as these:
        one = Job(these, folder, begin)
        try:
            yield one
        finally:
            one.close()
