"""`synkhronos launch --restarts` on hosts that are killed, cut off and mended."""

import contextlib
import os
import re
import signal
import subprocess

import psutil
import pytest
from support import hosts
from support.running import IN_PYTHON

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")

# The last attempt ends by itself; the others end with a machine.
SCRIPT = """
import socket, sys, numpy as np, theano, synkhronos as synk
n, count = synk.fork(1), synk.restart_count()
s = theano.shared(np.ones(3))
synk.broadcast(s)
print("begun", count, n, socket.gethostname()[-1], flush=True)
while count < int(sys.argv[1]):
    synk.all_reduce(s, "avg")
print("done", flush=True)
"""


class Attempts:
    """A launch with attempts on test hosts."""

    def __init__(self, these, folder, script, *arguments, **variables):
        (folder / "script.py").write_text(script)
        self.hosts = these
        self.process = subprocess.Popen(
            these.launch(*arguments),
            cwd=folder,
            env=these.environment(
                **{"PYTHONUNBUFFERED": "1", **IN_PYTHON, **hosts.IMPATIENT, **variables}
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self, number):
        for pid in self.hosts.pids(number):
            with contextlib.suppress(ProcessLookupError):  # its parent was the one before
                os.kill(pid, signal.SIGKILL)

    def line(self):
        return self.process.stdout.readline().split()

    def wait(self):
        """Return the exit status, the rest of the output, and lines of errors."""
        try:
            out, err = self.process.communicate(timeout=300)
        finally:
            self.process.kill()
            self.process.wait()
        assert self.hosts.is_empty()
        return self.process.returncode, out, err.splitlines()


@pytest.mark.slow("starts mpirun on hosts four times, and waits until machines are lost")
def test_hosts_are_left_out_and_taken_in_again(three_hosts, tmp_path):
    """First the script's own host is cut off, then another one is killed, then one is stopped."""
    one, two, three = three_hosts.addresses
    run = Attempts(three_hosts, tmp_path, SCRIPT, "--restarts", "3", "script.py", "3")
    try:
        assert run.line() == ["begun", "0", "3", "1"]
        three_hosts.cut(1)
        assert run.line() == ["begun", "1", "2", "2"]
        three_hosts.mend(1)
        run.kill(3)
        assert run.line() == ["begun", "2", "3", "1"]
        for pid in three_hosts.pids(2):
            os.kill(pid, signal.SIGSTOP)
        assert run.line() == ["begun", "3", "3", "1"]
        assert run.line() == ["done"]
    finally:
        three_hosts.mend(1)
        status, out, err = run.wait()
    assert (status, out) == (0, ""), err
    # mpirun, which is killed, may leave the beginning of a line before one of them.
    told = [line for line in err if "synkhronos launch: attempt" in line]
    assert told[0] == f"synkhronos launch: attempt 1 of 4 on {one}, {two}, {three}."
    assert f"attempt 2 of 4 on {two}, {three}, without {one} (ssh: " in told[1]
    name = f"synk{three_hosts.net}"
    silent, ended = "It has not been heard of for 4 s", "It has ended its connection"
    for line, machine, why in (told[1], 1, silent), (told[2], 3, ended), (told[3], 2, silent):
        words = rf"({name}-{machine} is lost: {why}|mpirun has lost {name}-{machine})\.$"
        assert re.search(words, line), err  # the carriers tell it, or mpirun
    assert "Traceback" not in "\n".join(err), err


@pytest.mark.slow("waits until machines are lost, and mpirun's daemons")
@pytest.mark.parametrize(
    ("cut", "blocked", "left"), [([2], [], "1"), ([1], [], "2"), ([2, 3], [], "1"), ([], [2], "1")]
)
def test_hosts_that_only_the_login_reaches_are_left_out(three_hosts, tmp_path, cut, blocked, left):
    """They answered the question, mpirun's daemon did not report, and that ended the run."""
    given = "--restarts", "1", "--wait-start", "15", "--grace", "2", "script.py", "1"
    run = Attempts(three_hosts, tmp_path, SCRIPT, *given, LOGIN_HAS_A_NETWORK="1")
    try:
        assert run.line() == ["begun", "0", "3", "1"]
        for number in cut:
            three_hosts.cut(number)
        for number in blocked:
            three_hosts.block(number)
            run.kill(3)
        assert run.line() == ["begun", "1", f"{3 - len(cut + blocked)}", left]
        assert run.line() == ["done"]
    finally:
        for number in cut:
            three_hosts.mend(number)
        for number in blocked:
            three_hosts.block(number, is_blocked=False)
        status, out, err = run.wait()
    assert (status, out) == (0, ""), err
    named = [three_hosts.addresses[number - 1] for number in cut + blocked]
    [told] = [line for line in err if "attempt 2 of 2" in line]
    for name in named:
        assert f"{name} (mpirun's daemon does not answer" in told


LONG = """
import time, numpy as np, theano, synkhronos as synk
synk.fork(1)
s = theano.shared(np.ones(1 << 16))
synk.broadcast(s)
print("begun", flush=True)
try:
    while True:
        synk.all_reduce(s, "avg")
except synk.WorkerDied as error:
    time.sleep(8)  # the ranks of the third host had ended after 5, and MPI ended the script
    print("saved", error.rank, flush=True)
    raise
"""


@pytest.mark.slow("waits until a machine is taken for lost")
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("cut", "Machine NAME-2 is lost: It has not been heard of for 4 s"),
        ("part", "Machine NAME-[23] is lost"),  # it does not reach the third one
        ("carrier", "Machine NAME-2 is lost: It has ended its connection"),
        ("trusted carrier", "Machine NAME-2 is lost: It has ended its connection"),
        ("leader", "The first process on NAME-2 has ended"),
    ],
)
def test_a_script_has_time_after_a_loss_whatever_other_hosts_do(three_hosts, tmp_path, how, what):
    """All that the user sees is a sentence: hosts, MPI and mpirun had told of it, too."""
    # On a trusted network MPI reduces arrays itself, and would end the script.
    network = three_hosts.reached_by[-1]
    trusting = "--trust-network", "--mpirun-args", f"{network} --with-ft ulfm"
    given = *(trusting if how == "trusted carrier" else ()), "--grace", "5", "script.py"
    run = Attempts(three_hosts, tmp_path, LONG, *given)
    program = "runpy" if how == "leader" else "mpi.carrier"
    try:
        assert run.line() == ["begun"]
        if how == "cut":
            three_hosts.cut(2)
        elif how == "part":
            three_hosts.part(2, 3)
        else:
            lines = three_hosts.programs(2).items()
            found = [pid for pid, line in lines if program in line]
            if how == "leader":
                found = [pid for pid in found if psutil.Process(pid).ppid() in found]
            [killed] = found
            os.kill(killed, signal.SIGKILL)
        assert run.line() in [["saved", "1"], *([["saved", "2"]] if how == "part" else [])]
        status, out, err = run.wait()
    finally:
        three_hosts.mend(2)
        if how == "part":
            three_hosts.join(2, 3)
    assert (status, out) == (1, "") and len(err) == 1, err
    said = what.replace("NAME", f"synk{three_hosts.net}")
    assert re.match(f"script.py, line 9: WorkerDied: {said}", err[0]), err


@pytest.mark.slow("waits until a machine is taken for lost")
def test_with_too_few_hosts_it_waits_and_ends(two_hosts, tmp_path):
    given = "--restarts", "3", "--min-hosts", "2", "--wait-hosts", "1", "script.py", "1"
    run = Attempts(two_hosts, tmp_path, SCRIPT, *given)
    try:
        assert run.line() == ["begun", "0", "2", "1"]
        two_hosts.cut(2)
        status, out, err = run.wait()
    finally:
        two_hosts.mend(2)
    assert (status, out) == (1, "")
    assert err[-1].startswith("synkhronos launch: 1 of at least 2 hosts answer, without ")
    assert err[-1].endswith("waited 1 s for more, and gave up.")


FAILS = """
import os, sys, numpy as np, theano, synkhronos as synk
synk.fork(2)
s = theano.shared(np.ones(3))
synk.broadcast(s)
try:
    while True:
        os.kill(synk.status().ranks[1].pid, 9)
        synk.all_reduce(s)
except synk.WorkerDied:
    if sys.argv[1] == "loses":
        raise
raise ValueError("a reason")
"""


@pytest.mark.slow("starts mpirun on hosts")
def test_a_script_that_fails_by_itself_is_not_started_again(two_hosts, tmp_path):
    """Also if it has caught a WorkerDied before."""
    discover = tmp_path / "hosts"
    discover.write_text("".join(f"{address}\n" for address in two_hosts.addresses))
    for does, last in (("catches", "ValueError: a reason"), ("loses", "gave up after 2 attempts")):
        given = "--restarts", "1", "--discover", f"cat {discover}", "script.py", does
        status, out, err = Attempts(two_hosts, tmp_path, FAILS, *given).wait()
        assert (status, out) == (1, "") and last in err[-1], err
        n_said = 1 if does == "catches" else 3
        assert sum(line.startswith("synkhronos launch: ") for line in err) == n_said, err


# Each host has a folder of its own at this place; only the first one's has room.
FULL = """#!/bin/sh
host=$1; shift
case $host in *.0.1) size=100m;; *) size=64k;; esac
exec {agent} $host "mount -t tmpfs -o size=$size tmpfs {folder}; $*"
"""


@pytest.mark.slow("starts mpirun on hosts, and compiles")
def test_a_full_folder_of_compiled_functions_ends_the_run(two_hosts, tmp_path):
    """The host was not lost, and the next attempt would fail there, too."""
    folder, agent = tmp_path / "compiled", tmp_path / "agent"
    folder.mkdir()
    agent.write_text(FULL.format(agent=two_hosts.reached_by[1], folder=folder))
    agent.chmod(0o755)
    flags = {f"{host}_FLAGS": f"base_compiledir={folder}" for host in ("THEANO", "PYTENSOR")}
    given = "--agent", agent, "-n", "1", "--restarts", "1", "script.py"
    status, _, err = Attempts(two_hosts, tmp_path, "print(1)", *given, **flags).wait()
    assert status == 2 and sum("attempt " in line for line in err) == 1, err
    assert f"can't start ranks on synk{two_hosts.net}-2: " in err[-1], err
    assert "No space left on device" in err[-1], err


RESUMING = """
import numpy as np, theano, theano.tensor as T, synkhronos as synk
n, x, w = synk.fork(1), T.dvector("x"), theano.shared(np.zeros(100_000), "w")
own = theano.shared(np.zeros(2), "own")
step = synk.function([x], updates=[(w, w + synk.ops.all_reduce(x.mean()))])
synk.broadcast(own)
with synk.resume("run.npz", [step, own], every=0, unequal="average") as state:
    print("begun", state.step, n, synk.gather(own).mean(), flush=True)
    synk.set_value(n - 1, own, np.full(2, 6.0))
    for number in range(state.step, 40):
        step(np.full(6, 1.0))
        state.tick()
        print(state.step, flush=True)
        while n == 3 and state.step == 5:
            step(np.full(6, 1.0))  # until a machine is lost: none of these is to be saved
print("done", *{float(each) for each in synk.gather(w).ravel()}, flush=True)
"""


@pytest.mark.slow("starts mpirun on hosts twice")
def test_a_run_goes_on_with_fewer_machines(three_hosts, tmp_path):
    run = Attempts(three_hosts, tmp_path, RESUMING, "--restarts", "1", "script.py")
    try:
        assert run.line() == ["begun", "0", "3", "0.0"]
        assert [run.line() for _ in range(5)] == [[f"{step}"] for step in range(1, 6)]
        three_hosts.cut(3)
        assert run.line() == ["begun", "5", "2", "2.0"]
        status, out, err = run.wait()
    finally:
        three_hosts.mend(3)
    assert status == 0, err
    assert out.split("\n") == [*map(str, range(6, 41)), "done 40.0", ""]
