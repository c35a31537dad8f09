"""Begin and end of a session: fork, close, fork again, and all that is refused."""

import _thread
import errno
import gc
import io
import logging
import os
import signal
import sys
import threading
import types
import warnings

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import function, mapped_bytes, on_ranks
from support.leaks import nothing_left
from support.threads import in_thread
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import session as _session

pytestmark = pytest.mark.usefixtures("no_session")


def mean():
    x = T.dvector("x")
    return function([x], x.mean())


def works(n):
    """Assert that a session of n ranks does its job."""
    assert on_ranks(lambda: 1) == [1] * n
    assert mean()(np.arange(10.0)) == 4.5


@pytest.mark.parametrize("n, master", [(1, 0), (2, 0), (2, 1), (5, 3)])
def test_fork_starts_one_process_for_each_rank_but_the_masters(n, master):
    before = psutil.Process().children()
    assert synk.fork(n, master_rank=master) == n
    started = set(psutil.Process().children()) - set(before)
    pids = on_ranks(os.getpid)
    assert len(started) == n - 1
    assert pids[master] == os.getpid()
    assert sorted(pids) == sorted([os.getpid()] + [p.pid for p in started])
    synk.close()
    assert not [p for p in started if p.is_running()]


def test_fork_by_default_takes_one_rank_per_core():
    assert synk.fork() == len(os.sched_getaffinity(0))
    synk.close()
    assert synk.fork(np.int64(2), use_gpu=False) == 2
    works(2)
    synk.close()
    assert synk.fork(2, False, 0, False, 1, 1) == 2  # with the largest numbers of 2017, ignored
    works(2)


@pytest.mark.slow("forks again and again")
def test_many_sessions_leave_no_memory():
    before = None
    for turn in range(12):
        synk.fork(2)
        works(2)
        synk.close()
        gc.collect()
        if turn == 3:
            before = psutil.Process().memory_info().rss
    assert psutil.Process().memory_info().rss - before < 30e6


def test_devices_and_the_variable_decide(monkeypatch):
    assert synk.fork(devices=["cpu"] * 3) == 3
    works(3)
    synk.close()
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu,cpu,cpu")
    assert synk.fork() == 4
    works(4)


@pytest.mark.parametrize("given, value", [(True, "0"), (None, "1"), (None, ""), (None, "0")])
def test_the_check_is_asked_for_once_for_all(monkeypatch, given, value):
    monkeypatch.setenv("SYNKHRONOS_CHECK", value)
    synk.fork(2, check=given)
    x = T.dvector("x")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f = function([x], x[::2].sum(), name="f")
        for _ in range(3):  # one of them is cheap
            f([1, 2, 3, 4, 5, 6])
    messages = [str(each.message) for each in told if each.category is synk.PortingWarning]
    assert len(messages) == bool(given or value != "0")
    assert all("Output 0 of Function 'f'" in message for message in messages)


def test_a_wrong_check_is_refused(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_CHECK", "often")
    with pytest.raises(ValueError, match="SYNKHRONOS_CHECK must be 0, 1, a number"):
        synk.fork(2)


def test_a_device_that_can_not_be_opened():
    before = psutil.Process().children()
    # Without pygpu the first, and with it the second.
    with pytest.raises((ImportError, synk.WorkerError), match="synkhronos info"):
        synk.fork(devices=["cpu", "cuda98"])
    assert psutil.Process().children() == before
    assert synk.fork(2) == 2
    works(2)


def test_nothing_is_printed(caplog, capfd):
    synk.fork(2)
    works(2)
    synk.distribute()
    synk.close()
    with caplog.at_level(logging.INFO, "synkhronos"):
        synk.close()
    assert "no session" in caplog.text and caplog.records[-1].levelname == "WARNING"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_a_compilation_of_seconds_is_told(level, caplog, monkeypatch):
    monkeypatch.setattr("synkhronos._machine.log._SLOW", 0.0)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # other tests import it
    monkeypatch.setattr(sys.stderr, "isatty", lambda: level == "WARNING", raising=False)
    synk.fork(2)
    with caplog.at_level(logging.INFO, "synkhronos"):
        works(2)
    told, *_ = [each for each in caplog.records if "compiling " in each.getMessage()]
    assert told.levelname == level and "later runs find it in a cache" in told.getMessage()


def test_functions_compile_with_a_stderr_that_is_closed_or_no_file(monkeypatch):
    synk.fork(2)
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, types.SimpleNamespace(write=len, flush=len)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            works(2)


def test_close_lets_go_of_the_memory_of_functions_that_live_on():
    with nothing_left():
        gc.collect()
        before = mapped_bytes(os.getpid())
        synk.fork(2)
        x = T.dvector("x")
        f = function([x], (x, "gather"))
        assert len(f(np.ones(100_000))) == 100_000
        assert mapped_bytes(os.getpid()) > before + 800_000
        synk.close()
        gc.collect()
        assert mapped_bytes(os.getpid()) == before
    np.testing.assert_array_equal(f.as_theano([1.0, 2.0]), [1, 2])


@pytest.mark.parametrize("reduces", [False, True])
def test_close_lets_go_of_the_memory_of_a_call_that_raised(reduces):
    synk.fork(2)
    x, k = T.dmatrix("x"), T.lscalar("k")
    total = x[-4:].reshape((k, 7)).sum(axis=0)  # Theano keeps the view that the error is about
    total = synk.ops.all_reduce(total) if reduces else total
    f = function([x], (total, "sum"), bcast_inputs=[k])
    before = mapped_bytes(os.getpid())
    with pytest.raises(synk.WorkerError):
        f(np.ones((2000, 70)), 3)
    assert mapped_bytes(os.getpid()) > before + 1_000_000
    synk.close()
    assert mapped_bytes(os.getpid()) <= before


def test_threads_are_limited_on_every_rank_and_restored():
    def threads():
        import threadpoolctl

        found = [p["num_threads"] for p in threadpoolctl.threadpool_info()]
        return max(found) if found else -1

    at_first = threads()
    for given in (1, 2):
        synk.fork(3, threads_per_rank=given)
        assert on_ranks(threads) == [given] * 3
        synk.close()
        assert threads() == at_first
    cores = len(os.sched_getaffinity(0))
    synk.fork(2)
    assert on_ranks(threads) == [max(1, cores // 2)] * 2
    synk.close()
    synk.fork(2 * cores + 1)
    assert on_ranks(threads) == [1] * (2 * cores + 1)


def test_threads_are_limited_in_threads_that_python_did_not_start():
    """As nutpie's; threadpoolctl leaves OpenBLAS to the first of them, and takes it for alive."""

    def fork():
        try:
            synk.fork(2, threads_per_rank=1)
            found.append(on_ranks(limits))
        except synk.WorkerError as error:
            found.append(error)
        finally:
            done.release()

    def limits():
        import threadpoolctl

        return [each["num_threads"] for each in threadpoolctl.threadpool_info()]

    found, done = [], threading.Semaphore(0)
    at_first = limits()
    for _ in range(2):
        _thread.start_new_thread(fork, ())
        done.acquire()
        assert found.pop() == [[1] * len(at_first)] * 2
        synk.close()
        assert limits() == at_first


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyError('mine')", "os._exit(4)"])
@pytest.mark.sample(1)
def test_a_script_that_forgets_to_close_leaves_nothing(script, ending):
    done = script(
        f"""
import os, sys
import numpy as np, theano.tensor as T
import synkhronos as synk
synk.fork(3)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
d = synk.data(np.arange(5.0))
f(d)
from synkhronos import session
print(*session._Current.session.worker_pids, flush=True)
{ending}
""",
        check=False,
    )
    code = {"": 0, "sys.exit(3)": 3, "os._exit(4)": 4}.get(ending, 1)
    assert done.returncode == code, done.stderr
    assert ("KeyError: 'mine'" in done.stderr) == (code == 1)
    assert code == 1 or done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_profile_workers_writes_a_profile_of_each(tmp_path, monkeypatch):
    import pstats

    monkeypatch.chdir(tmp_path)
    synk.fork(3, profile_workers=True, master_rank=1)
    works(3)
    synk.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "synk_worker_0.prof",
        "synk_worker_2.prof",
    ]
    stats = pstats.Stats(str(tmp_path / "synk_worker_0.prof"))
    assert any("next_command" in key[2] for key in stats.stats)


@pytest.mark.parametrize("plant", [os.symlink, os.link], ids=["symlink", "link"])
def test_profile_workers_follows_no_link_and_no_change_of_the_folder(tmp_path, monkeypatch, plant):
    import pstats

    folder, other, later = tmp_path / "folder", tmp_path / "other", tmp_path / "later"
    folder.mkdir(), later.mkdir()
    other.write_text("kept")
    plant(other, folder / "synk_worker_1.prof")
    monkeypatch.chdir(folder)
    synk.fork(2, profile_workers=True)
    on_ranks(lambda: os.chdir(later) or 1)
    works(2)
    synk.close()
    assert other.read_text() == "kept" and not list(later.iterdir())
    [profile] = folder.iterdir()
    assert profile.name == "synk_worker_1.prof" and not profile.is_symlink()
    assert pstats.Stats(str(profile)).stats


def test_workers_that_can_not_save_their_profile_end_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handler = logging.FileHandler("log")
    monkeypatch.setattr(logging.getLogger("synkhronos"), "handlers", [handler])
    (tmp_path / "synk_worker_1.prof").mkdir()
    synk.fork(2, profile_workers=True)
    works(2)
    worker = _session._Current.session._processes[1]
    synk.close()
    assert worker.exitcode == 0
    handler.close()
    assert "synk_worker_1.prof was not saved: " in (tmp_path / "log").read_text()
    assert {each.name for each in tmp_path.iterdir()} == {"log", "synk_worker_1.prof"}


def test_signal_masks_and_handlers_of_the_script_stay():
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGIO, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    synk.fork(2)
    works(2)
    synk.close()
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


SCRIPTS = {  # and what they print
    "workers do not read the terminal's input": (
        """
import sys, os, theano, theano.tensor as T, numpy as np
from support.helpers import on_ranks
synk.fork(2)
print(on_ranks(lambda: os.readlink("/proc/self/fd/0") == "/dev/null"))
synk.close()
print(sys.stdin.read())
""",
        ["[0.0, 1.0]", "for the master"],
    ),
    "idle workers use no CPU without a standard input": (
        """
import os, time
import psutil
os.close(0)
synk.fork(2, master_rank=1)
worker = psutil.Process(synk.session._Current.session.worker_pids[0])
before = worker.cpu_times()
time.sleep(1)
print(sum(worker.cpu_times()[:2]) - sum(before[:2]) <= 0.2)  # a busy one uses it all
""",
        ["True"],
    ),
    "standard output is broken": (
        """
import os, sys
reader, writer = os.pipe()
os.close(reader)
sys.stdout = open(writer, "w")
print("to nobody")
synk.fork(2)
synk.close()
print("all is well", file=sys.__stdout__, flush=True)
os._exit(0)
""",
        ["all is well"],
    ),
    "operations that are defined after the fork": (
        """
import theano, theano.tensor as T
synk.fork(3)

class Twice(theano.Op):
    __props__ = ()
    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])
    def perform(self, node, inputs, outputs):
        outputs[0][0] = twice(inputs[0])

def twice(x):
    return 2 * x

x = T.dvector("x")
f = synk.function([x], (Twice()(x), "gather"))
print(f([1, 2, 3, 4]).tolist())
""",
        ["[2.0, 4.0, 6.0, 8.0]"],
    ),
}


@pytest.mark.slow("starts an interpreter")
@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_where(script, what):
    text, printed = SCRIPTS[what]
    done = script(f"import synkhronos as synk{text}", input="for the master")
    assert done.stdout.splitlines() == printed


def test_no_other_thread_logs_while_a_process_is_forked(monkeypatch):
    """Or the child would have a copy of a file's buffer whose lock is taken for ever."""
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    real, taken = os.fork, []

    def take():
        if handler.lock.acquire(blocking=False):
            handler.lock.release()
            taken.append(handler)

    def fork():
        in_thread(take).result()
        return real()

    monkeypatch.setattr(os, "fork", fork)
    synk.fork(3)
    assert taken == []
    works(3)
    synk.close()
    in_thread(take).result()
    assert taken == [handler]


def test_settings_changed_after_the_fork_reach_the_ranks():
    synk.fork(2)
    assert theano.config.floatX == "float64"
    with theano.configparser.change_flags(floatX="float32"):
        assert on_ranks(lambda: theano.config.floatX == "float32") == [1, 1]


@pytest.mark.faults
def test_outputs_of_a_worker_that_find_no_room_are_an_error_of_that_rank(monkeypatch):
    master, real = os.getpid(), os.posix_fallocate

    def fill(fd, offset, nbytes):
        if os.getpid() != master and nbytes > 100_000:
            raise OSError(errno.ENOSPC, "full")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fill)
    synk.fork(3)
    x = T.dvector("x")
    f = function([x], (x, "gather"))
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="bytes of shared memory") as caught:
            f(np.ones(100_000))
        assert (caught.value.rank, caught.value.remote_type) == (1, "SharedMemoryFull")
        np.testing.assert_array_equal(f([1, 2, 3]), [1, 2, 3])


@pytest.mark.faults
def test_a_staged_input_that_finds_no_room_is_refused_before_launch(monkeypatch):
    synk.fork(2)
    x = T.dvector("x")
    f = function([x], (x, "gather"))
    np.testing.assert_array_equal(f([1, 2, 3]), [1, 2, 3])
    before = _session._Current.session.gate.sequence

    def fill(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fill)
        with pytest.raises(synk.SharedMemoryFull, match="800,000 bytes"):
            f(np.ones(100_000))
    assert _session._Current.session.gate.sequence == before
    np.testing.assert_array_equal(f([1, 2, 3]), [1, 2, 3])
    assert f(np.ones(100_000)).sum() == 100_000
