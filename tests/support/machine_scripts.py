"""Scripts on test hosts: what they begin with, their start, and their output."""

import contextlib
import os
import signal
import subprocess
import textwrap

from support import hosts

BEGIN = """
import os, signal, sys, threading, time
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from support.machine_operations import KILL, NARROW, RAISE, SLEEP, STOP, trouble

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

def attempt(call, *args):
    begin = time.monotonic()
    try:
        result = call(*args)
    except BaseException as error:
        seconds = time.monotonic() - begin
        print(type(error).__name__, getattr(error, "rank", None), str(error).splitlines()[:1],
              "in time" if seconds < 1.5 else f"after {seconds} s", flush=True)
    else:
        print("went well", np.sum(result), flush=True)

print("begun", plain(quiet), *reducing(quiet), flush=True)
"""


def start(these, script, tmp_path, ranks=1, impatient=False, **variables):
    """Start a script on the hosts, with a session of some ranks on each.

    Impatient processes take others for lost after 4 s in place of 8 s.
    """
    file = tmp_path / "script.py"
    file.write_text(BEGIN + textwrap.dedent(script))
    path = hosts.ROOT / "tests"
    path = hosts.impatient(path) if impatient else str(path)
    environment = these.environment(RANKS=str(ranks), PYTHONPATH=path)
    return subprocess.Popen(
        these.script("-n", str(ranks), file),
        env={**environment, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, seconds=60):
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
