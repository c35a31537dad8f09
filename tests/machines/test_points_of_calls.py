"""Processes of several machines that are killed, stopped or cut off at several points of a call."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from support import hosts
from support.machine_scripts import end_cut_off, finish, start, wait_for_line
from support.waiting import wait_until

from synkhronos._machine import processes
from synkhronos._machine.processes import StopWatch

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")

POINTS = """
rows = T.dmatrix("rows")
summing = synk.function([rows], (rows.sum(), "sum"))
large = np.ones((n, 2 << 20))
big = theano.shared(np.zeros(8 << 20), "big")  # 64 MiB

def close_and_fork():
    global w
    synk.close()
    synk.fork(int(os.environ["RANKS"]))
    w = theano.shared(np.zeros(3))

points = {
    "idle": lambda: time.sleep(0.05),
    "computing": lambda: plain(on(n - 1, SLEEP)),
    "all_reduce": lambda: synk.all_reduce(big),
    "fetching": lambda: summing(large),
    "close": close_and_fork,
}

def stay_at(point, seconds):
    print("at", point, flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        points[point]()
        synk.all_reduce(w)
"""
ENDLESS = """
try:
    stay_at({!r}, 600)
except BaseException as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    os._exit(3)
"""


def process_of(these, host, kind):
    """Return a process of a host: its carrier, its first process, or a worker."""
    programs = these.programs(host)
    carriers = [pid for pid in programs if "comm.mpi.carrier" in programs[pid]]
    ranks = [pid for pid in programs if pid not in carriers]
    ranks.sort(key=lambda pid: psutil.Process(pid).create_time())  # numbers of processes begin anew
    return {"carrier": carriers[0], "leader": ranks[0], "worker": ranks[-1]}[kind]


@contextlib.contextmanager
def stopped(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stop_one(stack, these, host, kind):
    """Stop a process of a host: the one that was found may be over, while sessions end."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return stack.enter_context(stopped([process_of(these, host, kind)]))
        except (ProcessLookupError, psutil.NoSuchProcess, IndexError):
            if time.monotonic() > deadline:
                raise


@pytest.mark.slow("stops processes for 1.5 s twice, at each point")
def test_processes_that_are_stopped_for_a_moment_make_calls_slower(two_hosts, tmp_path):
    """Each time they miss at least one heartbeat."""
    script = """
    for point in points:
        for _ in range(2):
            stay_at(point, 1)
    f = synk.function([x], (x.sum(), "sum"))
    print("ended with", f(np.ones(n)))
    """
    process = start(two_hosts, POINTS + textwrap.dedent(script), tmp_path, ranks=2)
    for point in ("idle", "computing", "all_reduce", "fetching", "close"):
        for kinds in ((2, "leader"), (1, "carrier")), ((2, "worker"), (2, "carrier")):
            assert wait_for_line(process, "at") == f"at {point}\n"
            time.sleep(0.3)
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stop_one(stack, two_hosts, *kind)
                time.sleep(1.5)
    assert finish(process).splitlines()[-1] == "ended with 4.0"
    assert process.returncode == 0
    assert two_hosts.is_empty()


def end_at(these, tmp_path, point, ranks, fault, impatient=False):
    """Start a script, and a fault at one point; return its output after that, and its end."""
    process = start(these, POINTS + ENDLESS.format(point), tmp_path, ranks, impatient)
    wait_for_line(process, "at")
    time.sleep(0.5)
    fault()
    output = finish(process)
    assert process.returncode != 0
    return output


@pytest.mark.slow("starts and ends jobs of MPI")
@pytest.mark.parametrize(
    "fault, host, kind, point",
    [
        ("killed", 1, "leader", "all_reduce"),  # the script
        ("killed", 2, "leader", "idle"),
        ("killed", 2, "leader", "computing"),
        ("killed", 2, "leader", "all_reduce"),
        ("killed", 2, "leader", "fetching"),
        ("killed", 2, "leader", "close"),
        ("killed", 2, "carrier", "all_reduce"),
        ("killed", 1, "carrier", "fetching"),
        ("killed", 2, "worker", "all_reduce"),
        ("killed", 2, "worker", "close"),
        ("stopped", 2, "leader", "all_reduce"),
        ("stopped", 2, "carrier", "fetching"),
        ("stopped", 1, "carrier", "all_reduce"),
        ("stopped", 2, "worker", "computing"),
        ("stopped", 2, "worker", "all_reduce"),
    ],
)
def test_a_process_that_is_killed_or_stays_stopped_ends_the_job(
    two_hosts, tmp_path, fault, host, kind, point
):
    """One that is stopped is given up after a while."""
    is_killed = fault == "killed"
    with contextlib.ExitStack() as stack:

        def hit():
            pid = process_of(two_hosts, host, kind)
            if is_killed:
                os.kill(pid, signal.SIGKILL)
            else:
                stack.enter_context(stopped([pid]))

        ranks = 2 if kind == "worker" else 1
        output = end_at(two_hosts, tmp_path, point, ranks, hit, impatient=not is_killed)
    # The other machine may give up a stopped carrier of the script before its leader does. Then
    # mpirun ends the job, and before that continues the carrier, which sees the other's end.
    is_own = (fault, host, kind) == ("stopped", 1, "carrier")
    ended = f"synk{two_hosts.net}-2 is lost: It has ended its connection"
    assert f"synk{two_hosts.net}-{host}" in output or (is_own and ended in output)
    if kind == "worker" and point != "close":
        assert "WorkerDied: Worker rank 3 on" in output
        assert is_killed or "was stopped for 4 s" in output
    assert two_hosts.is_empty(20)


@pytest.mark.slow("waits until a silent machine is given up")
@pytest.mark.parametrize("point", ["fetching", "close"])
def test_a_machine_that_is_cut_off_is_lost(two_hosts, tmp_path, point):
    process = start(two_hosts, POINTS + ENDLESS.format(point), tmp_path, impatient=True)
    try:
        wait_for_line(process, "at")
        time.sleep(0.5)
        two_hosts.cut(2)
        line = wait_for_line(process, ("WorkerDied", "SessionError"))
        assert f"Machine synk{two_hosts.net}-2 is lost" in line or "SessionError" in line
        assert f"synk{two_hosts.net}-2" in line
        wait_until(lambda: not any(two_hosts.programs(host) for host in (1, 2)))
    finally:
        end_cut_off(two_hosts, process)


def test_how_long_a_process_has_been_stopped(monkeypatch):
    now = 100.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    watch = StopWatch()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert watch.seconds(process.pid) == 0
        with stopped([process.pid]):
            while processes.life_of(process.pid) != "stopped":
                pass
            found = []
            for pause in (0, 1, 1, 10, 1):  # in the pause of 10 s this process was stopped itself
                now += pause
                found.append(watch.seconds(process.pid))
            assert found == [0, 1, 2, 0, 1]
            known = psutil.Process(process.pid)
            turns = known.num_ctx_switches()
            os.kill(process.pid, signal.SIGCONT)
            wait_until(lambda: known.num_ctx_switches() != turns)
            os.kill(process.pid, signal.SIGSTOP)
            while processes.life_of(process.pid) != "stopped":
                pass
            assert watch.seconds(process.pid) == 0
        while processes.life_of(process.pid) == "stopped":
            pass
        assert watch.seconds(process.pid) == 0
    finally:
        process.communicate()
