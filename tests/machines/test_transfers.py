"""Arrays on their way between machines, when the ranks that want them are gone or lack room."""

import contextlib
import os
import resource
import time

import pytest
from support import hosts
from support.machine_scripts import BEGIN, job

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory):
    """Yield a job for all tests that any carrier will do for."""
    with job(tmp_path_factory.mktemp("job"), BEGIN + SETUP) as one:
        yield one


@contextlib.contextmanager
def slow_cable(these, rate="100mbit"):
    these.slow(2, rate)
    try:
        yield
    finally:
        these.slow(2, "10gbit")


SETUP = """
rows, more, v = T.dmatrix("rows"), T.dmatrix("more"), theano.shared(np.zeros(2), "v")
large = np.ones((2, 1_000_000))
summing = synk.function([rows], (rows.sum(), "sum"))
summing_two = synk.function([rows, more], (rows.sum() + more.sum(), "sum"))
fill = synk.function([x], updates=[(v, T.repeat(x, 1_000_000))])
fill(np.ones(2))

def pause(word):
    print(word, flush=True)
    while not os.path.exists(os.path.join(os.path.dirname(__file__), word)):
        time.sleep(0.01)

def interrupted(call, *args):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        call(*args)
        timer.join()
        time.sleep(0.1)
    except KeyboardInterrupt:
        print("left early", flush=True)
"""
SLOW = pytest.mark.slow("a cable with 100 Mbit/s")


@pytest.mark.slow("starts a job on several hosts")
@pytest.mark.parametrize(
    "call",
    [
        "summing, large",
        pytest.param("synk.broadcast, v", marks=SLOW),
        pytest.param("synk.all_reduce, v", marks=SLOW),
        pytest.param("synk.gather, v", marks=SLOW),
    ],
)
def test_a_session_may_end_while_arrays_are_on_their_way(shared_job, call):
    """The memory that carriers read and write is the session's, which gives it back."""
    script = f"""
    interrupted({call})
    synk.close()
    del large, v
    synk.fork(1)
    again = synk.function([x], (x.sum(), "sum"))
    attempt(again, np.ones(n))
    synk.all_reduce(w)
    print("ended", flush=True)
    """
    with slow_cable(shared_job.hosts):
        lines = shared_job.run(script)
    assert lines[-3:] == ["left early", "went well 2.0", "ended"]


@pytest.mark.slow("a cable with 100 Mbit/s")
def test_memory_that_the_master_still_fetches_from_is_not_replaced(shared_job):
    """A worker's outputs grow in the call after one that was left while they came."""
    script = """
    sized = synk.function([x], (T.zeros((T.cast(x.sum(), "int64"),)) + x.sum(), "gather"))
    interrupted(sized, np.zeros(2) + 1_000_000)
    attempt(sized, np.zeros(2) + 2_000_000)
    attempt(plain, np.zeros(2) + 7)
    """
    with slow_cable(shared_job.hosts):
        lines = shared_job.run(script)
    assert lines[-3:] == ["left early", f"went well {4e6 * 2e6}", "went well 14.0"]


@pytest.mark.slow("starts a job, and waits until maps are dropped")
@pytest.mark.parametrize("host", [1, 2])
def test_a_carrier_without_descriptors_fails_the_calls_that_need_one(tmp_path, host):
    """The message names its machine, and the calls work again when there are descriptors."""
    script = """
    def calls():
        attempt(summing_two, large, 2 * large)
        attempt(synk.all_reduce, v)
        attempt(plain, np.zeros(2) + 7)

    summing_two(np.ones((600, 3)), np.ones((600, 3)), num_slices=256)
    pause("narrow")
    calls()
    pause("wide")
    calls()
    synk.close()
    synk.fork(1)
    again = synk.function([x], (x.sum(), "sum"))
    pause("narrow-again")
    attempt(again, np.ones(2))
    pause("wide-again")
    attempt(again, np.ones(2))
    """
    with job(tmp_path, BEGIN + SETUP) as one:
        one.begin(script)
        one.lines_before("narrow")
        programs = one.hosts.programs(host)
        [carrier] = [pid for pid in programs if "comm.mpi.carrier" in programs[pid]]
        assert len(os.listdir(f"/proc/{carrier}/fd")) < 60  # many arrays lie in one segment
        limits = resource.prlimit(carrier, resource.RLIMIT_NOFILE)

        def descriptors():
            return {int(name) for name in os.listdir(f"/proc/{carrier}/fd")}

        def go_on(word, narrow):
            numbers, settles = descriptors(), narrow
            while settles:  # until the carrier has dropped maps of freed segments
                time.sleep(1.5)
                before, numbers = numbers, descriptors()
                settles = numbers != before
            first_free = next(number for number in range(len(numbers) + 1) if number not in numbers)
            limit = (first_free, limits[1]) if narrow else limits
            resource.prlimit(carrier, resource.RLIMIT_NOFILE, limit)
            (one.folder / word).touch()

        go_on("narrow", True)
        narrow = one.lines_before("wide")
        go_on("wide", False)
        wide = one.lines_before("narrow-again")
        go_on("narrow-again", True)
        again = one.lines_before("wide-again")
        go_on("wide-again", False)
        lines = one.rest()
    name = f"synk{one.hosts.net}-{host} could not do its part, "
    assert [name in line for line in narrow] == [True, True, False], narrow
    assert all(line.startswith("WorkerError") for line in narrow[:2])
    assert "no file descriptor left" in narrow[0]
    assert narrow[2] == "went well 14.0"
    assert wide == ["went well 6000000.0", "went well None", "went well 14.0"]
    if host == 2:  # a new rank there needs a connection
        assert name in again[-1]
    assert lines[-1] == "went well 2.0"
