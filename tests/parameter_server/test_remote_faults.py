"""Workers and servers that die or leave: named in all others, and no process is left."""

import os
import signal
import time

import pytest
from support import nodes, rules
from support.running import python_path
from support.waiting import LONG, wait_until

from synkhronos._machine import processes

pytestmark = pytest.mark.slow("starts several processes")


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        ("is killed", "was killed by SIGKILL (signal 9)", 137),
        ("exits", "has ended with exit status 3", 3),
        ("leaves", "has left", 7),
    ],
)
def test_dist_sync_names_the_worker_that_is_missing(tmp_path, end, how, status):
    run = nodes.run(tmp_path, nodes.ROUNDS, "dist_sync", end, workers=3, status=status)
    host = os.uname().nodename
    error = f"WorkerLost 1 {host} worker 1 on {host} {how}: round 4 of key 'w' can't be closed."
    assert run.said("told ") == [f"told 0 {error}", f"told 2 {error}"]
    first = f"worker 1 on {host} {how}, as the first that has failed."
    assert (first in run.output) == (end != "leaves")


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        ("is killed", "was killed by SIGKILL (signal 9)", 137),
        ("exits", "has ended with exit status 3", 3),
        ("leaves", "", 0),
    ],
)
def test_dist_async_goes_on_and_warns(tmp_path, end, how, status):
    run = nodes.run(tmp_path, nodes.ROUNDS, "dist_async", end, workers=3, status=status)
    warning = f"log: worker 1 on {os.uname().nodename} {how}; the others go on without it"
    assert run.said("log: worker 1") == ([warning] * 2 if how else [])
    closed = ["closed 0", "closed 1", "closed 2"]
    assert run.said("closed ") == (closed if end == "leaves" else ["closed 0", "closed 2"])


def begun(launched, n=2):
    """Wait until all workers are in the midst of it; return their processes and their movers'."""
    wait_until(lambda: len(launched.said("begun ")) == n or launched.process.poll() is not None)
    return [tuple(map(int, line.split()[2:])) for line in launched.said("begun ")]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_killed_mover_takes_its_script_along_and_is_told(tmp_path, kind):
    launched = nodes.Launched(tmp_path, nodes.ROUNDS, kind, "goes on", workers=3)
    victim, mover = begun(launched, 3)[1]
    os.kill(mover, signal.SIGKILL)
    host, began = os.uname().nodename, time.monotonic()
    if kind == "dist_async":
        launched.wait_for(f"log: worker 1 on {host} has died with its mover; the others go on")
        wait_until(lambda: processes.life_of(victim) in ("gone", "ended"))
        launched.interrupt()
        assert launched.wait() == 130
    else:
        assert launched.wait() == 137
        assert f"WorkerLost 1 {host} worker 1 on {host} has died with its mover" in launched.output
    assert time.monotonic() - began < LONG and not launched.left_over()


@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
def test_a_killed_server_is_named_in_all_workers(tmp_path, kind):
    launched = nodes.Launched(tmp_path, nodes.ROUNDS, kind, "goes on", servers=2)
    begun(launched)
    began = time.monotonic()
    launched.send(0)
    assert launched.wait() == 137
    assert time.monotonic() - began < LONG
    host = os.uname().nodename
    text = f"ServerLost 0 {host} server 0 on {host} has died, and with it the weights that it kept."
    assert launched.said("told ") == [f"told 0 {text}", f"told 1 {text}"]
    assert f"server 0 on {host} was killed by SIGKILL (signal 9), as the first" in launched.output
    assert not launched.left_over()


def test_ctrl_c_reaches_the_scripts_and_nothing_is_left(tmp_path):
    launched = nodes.Launched(tmp_path, nodes.ROUNDS, "dist_sync", "goes on")
    begun(launched)
    launched.interrupt()
    began = time.monotonic()
    assert launched.wait() == 130
    assert time.monotonic() - began < LONG
    assert launched.output.count("\nKeyboardInterrupt") == 2
    assert "stopping; the workers have 10 s to end" in launched.output
    assert not launched.left_over()


def test_a_second_ctrl_c_ends_stubborn_scripts(tmp_path):
    script = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(600)
"""
    launched = nodes.Launched(tmp_path, script)
    wait_until(lambda: len(launched.said("begun")) == 2)
    launched.interrupt()
    launched.wait_for("stopping")
    launched.interrupt()
    assert launched.wait() == 130
    assert not launched.left_over()


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path):
    launched = nodes.Launched(tmp_path, nodes.ROUNDS, "dist_sync", "goes on")
    begun(launched)
    os.kill(launched.process.pid, signal.SIGKILL)
    assert launched.wait() not in (0, None)
    wait_until(lambda: not launched.left_over())


def test_a_script_that_raises_is_shown_with_its_last_lines(tmp_path):
    run = nodes.run(tmp_path, nodes.ROUNDS, "dist_sync", "raises", status=1)
    assert "Its last lines:" in run.output and "ValueError: a reason" in run.output


@pytest.mark.parametrize(
    ("end", "status"), [("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", 137), ("os._exit(3)", 3)]
)
def test_a_script_that_ends_as_soon_as_it_has_keys_ends_its_mover_as_it_should(
    tmp_path, end, status
):
    script = f"""
import os
import numpy as np
from synkhronos import parameter_server as ps
store = ps.create("dist_sync")
for key in range(20):
    store.init(key, np.zeros(3, np.float32))
{end}
"""
    run = nodes.run(tmp_path, script, workers=1, status=status)
    assert "Traceback" not in run.output
    assert ("was killed by SIGKILL" in run.output) == (status == 137)


# Runs in each Python at its start.
DIES_EARLY = """
import json, os
if json.loads(os.environ.get("SYNKHRONOS_GROUP", "{}")).get("rank") == 1:
    os.kill(os.getpid(), 11)
"""


@pytest.mark.parametrize("what", ["a worker", "a rank of a rule"])
def test_a_process_that_dies_before_it_is_in_the_group(tmp_path, monkeypatch, what):
    """The others do not wait for it."""
    (tmp_path / "sitecustomize.py").write_text(DIES_EARLY)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    if what == "a worker":
        launched = nodes.run(tmp_path, nodes.ROUNDS, "dist_sync", "goes on", status=139)
    else:
        launched = rules.run("EASGD", 3, tmp_path, status=139)
    assert "was killed by SIGSEGV" in launched.output
