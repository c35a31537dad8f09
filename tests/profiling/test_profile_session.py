"""A profile in all that can happen to a session: close, death, Ctrl-C, a child, a whole script."""

import contextlib
import json
import os
import re
import signal
import time

import numpy as np
import pytest
import theano.tensor as T
from support.helpers import Call, function, until
from support.profiles import nothing_records, of, the_session, total
from support.threads import in_thread
from support.waiting import wait_until
from support.watched import WATCHED

import synkhronos as synk
from synkhronos import SessionError, WorkerDied
from synkhronos import session as _session
from synkhronos._session import session as session_module
from synkhronos.profiling import Profile
from synkhronos.profiling.timeline import NAMES


def test_without_a_session_there_is_no_profile(no_session):
    with pytest.raises(SessionError, match=r"profile\(\) needs workers"), synk.profile():
        raise AssertionError("not reached")


@pytest.mark.parametrize("n, master", [(1, 0), (3, 1)])
def test_close_inside_keeps_what_was_recorded(no_session, n, master, tmp_path):
    synk.fork(n, master_rank=master)
    session, f = the_session(), total()
    with synk.profile() as recorded:
        f(np.ones((8, 3)))
        synk.close()
        assert nothing_records(session)
        assert len(of(recorded, "total")) == n
    assert len(of(recorded, "total")) == n
    assert of(recorded, "total")["compute"].all()
    recorded.save(tmp_path / "trace.json")
    synk.fork(2)
    with synk.profile() as second:
        total("after")(np.ones((8, 3)))
    synk.close()
    assert len(of(second, "after")) == 2


def test_a_closed_session_that_a_call_is_still_in_records_no_more(
    no_session, monkeypatch, tmp_path
):
    monkeypatch.setattr(session_module, "QUIT_SECONDS", 0.1)
    come, go_on = tmp_path / "come", tmp_path / "go on"
    hold = until(go_on)

    def wait(x):
        if x[0] == 0:  # on the master
            come.touch()
            hold(x)
        return x

    synk.fork(2)
    first, x = the_session(), T.dvector("x")
    f = function([x], (Call(wait)(x), "gather"), name="long")
    f(np.ones(8))

    def call():
        with contextlib.suppress(SessionError):  # where a worker was not done
            f(np.arange(8.0))

    with synk.profile() as recorded:
        f(np.ones(8))
        calling = in_thread(call)
        wait_until(come.exists)
        synk.close()
        assert nothing_records(first)
    assert len(of(recorded, "long")) == 2
    synk.fork(2)
    with synk.profile() as second:
        total("after")(np.ones((8, 3)))
        go_on.touch()
        calling.result(60)
        total("at last")(np.ones((8, 3)))
    assert nothing_records(first) and nothing_records(the_session())
    assert len(of(second, "after")) == len(of(second, "at last")) == 2


@pytest.mark.faults
def test_what_a_killed_worker_recorded_is_kept(no_session):
    synk.fork(3)
    f = total()
    with synk.profile() as recorded:
        for _ in range(4):
            f(np.ones((9, 3)))
        os.kill(synk.session.current("test").worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            for _ in range(10_000):
                f(np.ones((9, 3)))
    calls = of(recorded, "total")
    for rank in range(3):
        assert (calls["rank"] == rank).sum() >= 4
    assert calls["raised"].any()
    synk.close()
    assert len(of(recorded, "total")) == len(calls)


@pytest.mark.faults
def test_a_worker_that_dies_before_the_end_does_not_make_the_end_raise(no_session):
    synk.fork(2)
    f = total()
    with synk.profile() as recorded:
        f(np.ones((8, 3)))
        os.kill(synk.session.current("test").worker_pids[0], signal.SIGKILL)
    assert len(of(recorded, "total")) == 2
    with pytest.raises(WorkerDied):
        f(np.ones((8, 3)))


@pytest.mark.faults
def test_an_interrupted_call_is_part_of_the_profile(no_session):
    synk.fork(2)
    x = T.dvector("x")

    def interrupt(x):
        if x[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
        return x

    f = function([x], (Call(interrupt)(x), "gather"), name="interrupted")
    f(np.arange(1.0, 9.0))
    with synk.profile() as recorded:
        with pytest.raises(KeyboardInterrupt):
            f(np.arange(8.0))
        assert f(np.arange(1.0, 9.0)).tolist() == list(range(1, 9))
    calls = of(recorded, "interrupted")
    assert calls["raised"][calls["rank"] == 0].tolist() == [True, False]
    parts = np.array([calls[name] for name in NAMES])
    assert (parts >= 0).all()


@pytest.mark.faults
def test_after_an_interrupted_end_the_next_profile_begins(no_session, monkeypatch):
    synk.fork(2)
    f = total()
    f(np.ones((8, 3)))
    session = the_session()

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), synk.profile() as recorded:
        f(np.ones((8, 3)))
        monkeypatch.setattr(session, "drain", interrupted)
    f(np.ones((8, 3)))  # workers still record, into memory that is still theirs
    assert len(of(recorded, "total")) == 2
    with synk.profile() as second:
        f(np.ones((8, 3)))
    assert nothing_records(session)
    assert len(second.calls) == 2
    assert len(of(recorded, "total")) == 2


def test_a_child_of_the_script_does_not_record(no_session):
    synk.fork(2)
    f = total()
    f(np.ones((8, 3)))
    with synk.profile() as recorded:
        f(np.ones((8, 3)))
        child = os.fork()
        if child == 0:
            try:
                synk.fork(2)
                g = total("child")
                with synk.profile() as own:
                    g(np.ones((8, 3)))
                synk.close()
                os._exit(len(of(own, "child")))
            except BaseException:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        f(np.ones((8, 3)))
    assert recorded.calls["name"].tolist() == ["total"] * 4


# From the environment.


SCRIPT = """
import os
import numpy as np, theano.tensor as T
import synkhronos as synk
synk.fork(2)
x = T.dvector("x")
f = synk.function([x], x.sum(), name="f", mode="FAST_COMPILE")
f(np.ones(4))
os.chdir("/")
END
"""


@pytest.mark.parametrize("end", ["synk.close()", "pass", "raise ValueError"])
@pytest.mark.sample(1)
def test_the_environment_asks_for_a_profile_of_a_whole_script(script, tmp_path, end):
    env = {"SYNKHRONOS_PROFILE": "trace.json"}
    done = script(SCRIPT.replace("END", end), env=env, check=False)
    assert (done.returncode == 0) == ("raise" not in end)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = [(e["name"], e["tid"]) for e in events if e.get("cat") == "call"]
    assert sorted(calls) == [("distribute()", 1), ("distribute()", 2), ("f", 1), ("f", 2)]


@pytest.mark.slow("starts an interpreter")
def test_the_environment_can_ask_for_the_summary(script, tmp_path):
    script(SCRIPT.replace("END", ""), env={"SYNKHRONOS_PROFILE": str(tmp_path / "f.txt")})
    assert "\nf  " in (tmp_path / "f.txt").read_text()


@pytest.mark.slow("starts an interpreter")
def test_no_other_file_is_written(script, tmp_path):
    env = {"FALLBACK": "", "SYNKHRONOS_PROFILE": "trace.json"}
    script(WATCHED, env=env)
    *events, _ = (tmp_path / "events").read_text().splitlines()
    others = [e for e in events if not re.match(r"open /(proc/(self|\d+)/fd/\d+|dev/shm) ", e)]
    # The profile has no name until it is complete: it is opened by the descriptor of its folder.
    assert not others
    assert (tmp_path / "trace.json").exists()


def test_what_can_not_be_written_is_refused_before_anything_is_started(
    no_session, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "kept.json").write_text("kept")
    kinds = r"end in \.json \(a trace\) or \.txt \(the summary\), got"
    for file, words in {
        "profile.csv": f"{kinds} 'profile.csv'",
        "profile": f"{kinds} 'profile'",
        "folder.json": "got 'folder.json': it is a folder",
        "missing/trace.json": "there is no folder 'missing'",
        "kept.json/trace.json": "there is no folder 'kept.json'",
    }.items():
        monkeypatch.setenv("SYNKHRONOS_PROFILE", file)
        with pytest.raises(ValueError, match=rf"^SYNKHRONOS_PROFILE must .*{words}.*\.$"):
            synk.fork(2)
        assert _session._Current.session is None
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in (".", "kept.json"))
    for file in ("new.json", "kept.json"):
        monkeypatch.setenv("SYNKHRONOS_PROFILE", file)
        with pytest.raises(ValueError, match="you may not write there"):
            synk.fork(2)
    assert (tmp_path / "kept.json").read_text() == "kept"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_can_not_be_written_is_told_of_and_the_session_closed(
    no_session, monkeypatch, tmp_path, caplog, is_gone
):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setenv("SYNKHRONOS_PROFILE", str(folder / "trace.json"))
    synk.fork(2)
    with pytest.raises(SessionError, match="SYNKHRONOS_PROFILE"), synk.profile():
        raise AssertionError("not reached")
    if is_gone:
        folder.rmdir()
    else:  # whatever goes wrong
        monkeypatch.setattr(Profile, "save", lambda *_: "\ud800".encode())
    synk.close()
    assert synk.status().state == "no session"
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "was not saved: " in record.getMessage()
    assert ("gone" if is_gone else "'utf-8' codec can't encode") in record.getMessage()
