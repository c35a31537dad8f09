"""The status of sessions that are none, stopped, broken or interrupted; and what is logged."""

import logging
import os
import resource
import signal

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, until
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import WorkerDied


def test_without_a_session(no_session):
    now = synk.status()
    assert now.state == repr(now).split(": ")[1] == "no session"
    assert now.ranks == now.functions == now.data == now.shared_variables == ()
    assert now.master_rank is None and now.shared == now.commands == 0
    assert "no session" in now._repr_html_()


def test_a_stopped_worker_is_seen_and_not_waited_for(no_session):
    synk.fork(3)
    pid = synk.status().ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: synk.status().ranks[1].process == "stopped")
        assert synk.status().state == "open"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: synk.status().ranks[1].process != "stopped")


@pytest.mark.faults
def test_a_dead_worker_is_gone_and_the_session_broken(no_session):
    synk.fork(3)
    pids = [rank.pid for rank in synk.status().ranks]
    os.kill(pids[2], signal.SIGKILL)
    wait_until(lambda: synk.status().ranks[2].process == "ended")
    assert synk.status().ranks[2].resident == synk.status().ranks[2].shared == 0
    assert synk.status().state == "open"  # nobody has noticed yet
    with pytest.raises(WorkerDied):
        synk.all_reduce(theano.shared(np.ones(3)))
    now = synk.status()
    assert now.state == "broken"
    assert [rank.process for rank in now.ranks][1:] == ["gone", "gone"]
    assert now.ranks[0].process == "running"
    assert "broken" in repr(now)
    synk.close()
    assert synk.status().state == "no session"


@pytest.mark.faults
def test_what_the_system_does_not_tell_is_unknown(no_session):
    synk.fork(2)
    known = synk.status()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        now = synk.status()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert now.state == "open"
    assert [rank.process for rank in now.ranks] == ["unknown", "unknown"]
    assert [rank.resident for rank in now.ranks] == [rank.shared for rank in now.ranks]
    assert now.ranks[0].shared is now.shared is None
    assert [rank.pid for rank in now.ranks] == [rank.pid for rank in known.ranks]
    assert "shared memory: unknown" in repr(now)
    [line] = [line for line in repr(now).splitlines() if f"  {now.ranks[1].pid}  " in line]
    assert line.split()[-3:] == ["unknown"] * 3
    assert synk.status().ranks[1].process in ("running", "sleeping")


@pytest.mark.faults
def test_an_interrupted_call_is_not_waited_for(no_session, tmp_path):
    synk.fork(2)
    gate = tmp_path / "go on"

    wait = until(gate)

    def hold(x):
        if x[0] == 0:
            raise KeyboardInterrupt
        return wait(x)

    gate.touch()
    x = T.dvector("x")
    f = function([x], (Call(hold)(x).sum(), "sum"), name="held")
    f(np.ones(4))
    gate.unlink()
    with pytest.raises(KeyboardInterrupt):
        f(np.arange(4.0))
    assert synk.status().state == "interrupted"
    gate.touch()
    assert f(np.ones(4)) == 4
    assert synk.status().state == "open"


# What is logged.


LOGGED = """
import json, logging, sys
import numpy as np, theano.tensor as T
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(levelname)s|%(message)s")
import synkhronos as synk
synk.fork(3, master_rank=1)
x = T.dvector("x")
f = synk.function([x], x.sum(), name="f", mode="FAST_COMPILE")
synk.distribute()
f(np.ones(4))
synk.close()
synk.close()
"""


def test_messages_name_their_rank(script):
    lines = script(LOGGED).stdout.splitlines()
    lines = [line.split("|") for line in lines if "|" in line]
    texts = [text for _, text in lines]
    for rank in range(3):
        [text] = [text for text in texts if text.startswith(f"rank {rank}: process ")]
        assert " on cpu, with " in text
    assert [level for level, text in lines if "distributed f" in text] == ["INFO"]
    assert all(text.startswith("rank 1: ") for text in texts if "distributed f" in text)
    assert "rank 1: ranks on cpu, cpu, cpu; the master is rank 1" in texts
    assert texts[-2:] == ["the session is closed", "close() has no effect: there is no session."]
    assert [level for level, _ in lines[-2:]] == ["INFO", "WARNING"]


def test_records_have_the_rank_for_formats(no_session, caplog):
    with caplog.at_level(logging.INFO, "synkhronos"):
        synk.close()
        synk.fork(2, master_rank=1)
        synk.close()
    assert caplog.records[0].rank is None
    assert {record.rank for record in caplog.records} == {None, 1}
