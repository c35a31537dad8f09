"""Ctrl-C at every line of a profile: the session goes on, and nothing of the profile stays."""

import os
import signal
import threading
import weakref

import numpy as np
import pytest
import theano
from support import interrupts
from support.faults import BOUND, bounded, pids_by_rank
from support.interrupts import SOME_AND_EVERY_LINE, interrupt_at_line
from support.leaks import nothing_left
from support.profiles import nothing_records, of, recorders, the_session, total
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import SessionError, functions, profiling
from synkhronos._machine import processes
from synkhronos._session import current, rank, replica
from synkhronos._session import session as session_module
from synkhronos.comm.shared import gate
from synkhronos.profiling import recording, span_recorder

pytestmark = pytest.mark.faults

STEP = 5  # of the lines after which the session is closed, which takes long


def is_in_finalizer(frame):
    """Whether Python drops what is raised in this frame, Ctrl-C too."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


PROFILES = (profiling, recording, span_recorder, rank, processes)
RECORDED = (functions, current, session_module, gate, replica)  # some of what takes time


@pytest.fixture
def lines_of_profiles(monkeypatch):
    monkeypatch.setattr(interrupts, "FILES", {module.__file__ for module in PROFILES})
    monkeypatch.setattr(interrupts, "is_in_finalizer", is_in_finalizer)


@pytest.fixture
def lines_of_recorded_calls(lines_of_profiles, monkeypatch):
    files = {module.__file__ for module in (*PROFILES, *RECORDED)}
    monkeypatch.setattr(interrupts, "FILES", files)


def works():
    """Return what makes calls of both kinds, and looks at their results."""
    f, shared = total(), theano.shared(np.ones(3))

    def call():
        assert f(np.ones((8, 3)))[0] == 24
        synk.all_reduce(shared, "max")
        assert shared.get_value().tolist() == [1, 1, 1]

    return call


def profiled(call):
    with synk.profile(room=1000) as recorded:
        call()
    assert len(of(recorded, "total")) == len(of(recorded, "all_reduce()")) == 2


@SOME_AND_EVERY_LINE
def test_ctrl_c_at_lines_of_a_profile(no_session, other_thread, lines_of_recorded_calls, stride):
    synk.fork(2)
    call = works()
    call()
    session, pids, line = the_session(), pids_by_rank(), 0
    while interrupt_at_line(line, lambda: profiled(call)):
        assert recorders(session.worker) == [None, None], line
        call()
        profiled(call)
        assert nothing_records(session), line
        line += stride
    assert line > 200
    assert pids_by_rank() == pids


@SOME_AND_EVERY_LINE
@pytest.mark.parametrize("saves", [False, True])
def test_ctrl_c_at_lines_before_a_close_and_in_one_that_saves(
    no_session, other_thread, lines_of_profiles, monkeypatch, tmp_path, stride, saves
):
    if saves:
        monkeypatch.setenv("SYNKHRONOS_PROFILE", str(tmp_path / "summary.txt"))
    came_to_it, line = True, 0
    while came_to_it:
        with nothing_left():
            synk.fork(2)
            session, call = the_session(), works()
            call()
            do = synk.close if saves else lambda call=call: profiled(call)
            came_to_it = interrupt_at_line(line, do)
            if synk.status().state != "no session":
                synk.close()
            assert nothing_records(session), line
            if saves:
                assert "all_reduce()" in (tmp_path / "summary.txt").read_text()
                (tmp_path / "summary.txt").unlink()
            del session, call, do
        line += STEP * stride
    assert line > (20 if saves else 70)


@pytest.mark.parametrize("when", ["begin", "end"])
def test_ctrl_c_ends_the_wait_for_a_stopped_worker(no_session, when):
    """And the profile: what is left of it makes room for the next one."""
    synk.fork(2)
    call = works()
    call()
    session, pid = the_session(), pids_by_rank()[1]

    def stop():
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    with bounded(), pytest.raises(KeyboardInterrupt):
        if when == "begin":
            stop()
        with synk.profile():
            call()
            stop()
    assert recorders(session.worker) == [None, None]
    os.kill(pid, signal.SIGCONT)
    call()
    profiled(call)
    assert nothing_records(session)


def test_a_profile_that_is_let_go_ends(no_session):
    synk.fork(2)
    call = works()
    call()
    block = synk.profile()
    recorded = block.__enter__()
    call()
    with pytest.raises(SessionError, match="recorded already"), synk.profile():
        raise AssertionError("not reached")
    del block
    wait_until(lambda: "ended" in repr(recorded), BOUND)
    profiled(call)
