"""Faults on several machines: the call ends with the rank and the host, and nothing is left."""

import contextlib
import shutil
import textwrap

import pytest
from support import hosts
from support.machine_scripts import Job, job
from support.running import python_path, run

from synkhronos.comm.mpi.job import digest

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory):
    """Yield a job for all tests after which it goes on."""
    with job(tmp_path_factory.mktemp("job")) as one:
        yield one


@pytest.mark.slow("starts a job on several hosts")
def test_what_a_rank_raises_names_rank_and_host_and_the_session_goes_on(shared_job):
    script = """
    for call in (plain, reducing):
        for rank in range(n):
            attempt(call, on(rank, RAISE))
            attempt(call, quiet)
    synk.all_reduce(w)
    print(np.sum(synk.gather(w)))
    """
    lines = shared_job.run(script, ranks=2)
    for rank in range(4):
        host = f"synk{shared_job.hosts.net}-{1 + rank // 2}"
        said = f"WorkerError {rank} ['Rank {rank} of 4 on {host} raised RuntimeError: on purpose"
        assert sum(line.startswith(said) for line in lines) == 2, lines
    assert lines.count("went well 0.0") == 8
    assert lines[-1] == "0.0"


@pytest.mark.parametrize("rank", [3, pytest.param(1, marks=pytest.mark.slow("starts a job"))])
def test_a_workers_death_names_rank_and_host_and_a_new_session_works(shared_job, rank):
    script = f"""
    attempt(reducing, on({rank}, KILL))
    attempt(plain, quiet)
    synk.close()
    synk.fork(2)
    f = synk.function([x], (x.sum(), "sum"))
    attempt(f, np.ones(n))
    """
    lines = shared_job.run(script, ranks=2)
    deaths = [line for line in lines if line.startswith(f"WorkerDied {rank}")]
    assert len(deaths) == 2, lines
    assert f"Worker rank {rank} on synk{shared_job.hosts.net}-{1 + rank // 2} (process" in deaths[0]
    assert all("in time" in line for line in deaths)
    assert lines[-1] == "went well 4.0"


@pytest.mark.slow("starts a job on several hosts")
def test_a_reduction_that_only_some_ranks_come_to_is_refused(shared_job):
    script = """
    from theano.ifelse import ifelse
    some = ifelse(T.gt(x.sum(), 0), synk.ops.all_reduce(2 * x.sum(), "sum"), x.sum())
    lazy = theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False)
    f = synk.function([x], (some, "sum"), mode=theano.Mode(lazy, "fast_compile"))
    for rank in (0, n - 1):
        attempt(f, on(rank, 5))
        attempt(plain, quiet)
    attempt(f, quiet + 8)
    unlike = synk.function([x], (synk.ops.all_reduce(trouble(x), "sum"), "sum"))
    attempt(unlike, on(2, NARROW) + on(3, NARROW))
    attempt(unlike, quiet + 8)
    """
    lines = shared_job.run(script, ranks=2)
    *refused, unlike = [line for line in lines if line.startswith("WorkerError")]
    assert len(refused) == 2, lines
    hosts = f"float64 on synk{shared_job.hosts.net}-1, float32 on synk{shared_job.hosts.net}-2"
    assert f"arrays of different dtypes on the machines: {hosts}." in unlike
    assert all("has left a call in which rank" in line for line in refused)
    assert lines.count("went well 0.0") == 2
    assert lines[-3] == "went well 256.0"
    assert lines[-1] == "went well 128.0"


@pytest.mark.slow("starts a job on several hosts")
@pytest.mark.parametrize(
    "kind", ["KeyboardInterrupt", "Exception", "TimeoutError", "BaseException"]
)
def test_ctrl_c_or_what_a_handler_raises_leaves_a_call_and_the_next_is_right(shared_job, kind):
    script = f"""
    class Stop({kind}):
        pass

    def stop(number, frame):
        raised.append(Stop("time is up"))
        raise raised[-1]

    def stopped(call, rows, seconds):
        del raised[:]
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call(rows)
            time.sleep(0.2)
        except BaseException as error:
            assert error is raised[0], error
        signal.setitimer(signal.ITIMER_REAL, 0)

    raised = []
    signal.signal(signal.SIGALRM, stop)
    begin = time.monotonic()
    stopped(plain, on(0, SLEEP) + on(n - 1, SLEEP), 0.3)
    assert raised and time.monotonic() - begin < SECONDS - 1
    attempt(plain, np.zeros(n) + 7)
    for number in range(40):
        stopped(reducing, quiet + 8, 0.0002 * number + 0.0001)
        assert plain(quiet + 8) == 8 * n
    synk.broadcast(w, np.zeros(3))
    reducing(quiet + 8)
    print(synk.gather(w).tolist())
    """
    lines = shared_job.run(script)
    # Python writes a line if a signal comes in a finalizer.
    assert [line for line in lines if line.startswith("went well")] == ["went well 14.0"], lines
    assert lines[-1] == str([[16.0] * 3] * 2)


# Arrays on their way, when the ranks that want them are gone.


@contextlib.contextmanager
def slow_cable(these, rate="100mbit"):
    these.slow(2, rate)
    try:
        yield
    finally:
        these.slow(2, "10gbit")


SETUP = """
rows, v = T.dmatrix("rows"), theano.shared(np.zeros(2), "v")
large = np.ones((2, 1_000_000))
summing = synk.function([rows], (rows.sum(), "sum"))
fill = synk.function([x], updates=[(v, T.repeat(x, 1_000_000))])
fill(np.ones(2))

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
        lines = shared_job.run(SETUP + textwrap.dedent(script))
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
        lines = shared_job.run(SETUP + textwrap.dedent(script))
    assert lines[-3:] == ["left early", f"went well {4e6 * 2e6}", "went well 14.0"]


@pytest.mark.slow("starts a job on several hosts")
def test_a_broadcast_along_three_machines_that_is_left_early(three_hosts, tmp_path):
    """Machines pass on what comes: those behind one that has left the call are told."""
    script = """
    w = theano.shared(np.zeros(1_000_000), "large")
    synk.broadcast(w)
    for number in range(3):
        interrupted(synk.broadcast, w)
        attempt(plain, np.zeros(n) + 7)
    synk.broadcast(w, np.arange(1_000_000.0))
    print([bool((synk.get_value(rank, w) == np.arange(1_000_000)).all()) for rank in range(n)])
    """
    one = Job(three_hosts, tmp_path)
    with slow_cable(three_hosts):
        lines = one.run(SETUP.replace("(2, 1_000", "(n, 1_000") + textwrap.dedent(script))
    one.close()
    assert lines.count("went well 21.0") == lines.count("left early") == 3, lines
    assert lines[-1] == "[True, True, True]"


def begin_with(two_hosts, tmp_path, on_second):
    """Begin a session where Python runs something first on the second host; return its end."""
    script = tmp_path / "script.py"
    script.write_text("print('begun')")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, platform, socket, sys\n"
        "def refuse(path):\n"
        "    raise FileNotFoundError(path)\n"
        f"if socket.gethostname().endswith('-2'):\n    {on_second}\n"
    )
    environment = two_hosts.environment(PYTHONPATH=python_path(tmp_path))
    done = run(*two_hosts.script("-n", "1", script), cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert f"synk{two_hosts.net}-2" in done.stderr
    assert "begun" not in done.stdout
    assert two_hosts.is_empty()
    return done


@pytest.mark.slow("starts a job on several hosts")
def test_machines_with_other_versions_are_refused_with_a_table(two_hosts, tmp_path):
    """Also with another source tree of the same version."""
    tree = tmp_path / "tree" / "synkhronos"
    shutil.copytree(hosts.ROOT / "synkhronos", tree, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tree / "errors.py", "a") as file:
        file.write("# Changed.\n")
    import_it = f"sys.path.insert(0, {str(tree.parent)!r})"
    done = begin_with(
        two_hosts, tmp_path, f"platform.python_version = lambda: '3.11.99'; {import_it}"
    )
    assert "fork() needs the same versions on all machines" in done.stderr
    assert "3.11.99" in done.stderr
    assert digest() in done.stderr and digest(tree) in done.stderr


@pytest.mark.slow("starts a job of MPI")
def test_a_machine_without_proc_is_refused(two_hosts, tmp_path):
    done = begin_with(two_hosts, tmp_path, "os.readlink = refuse")
    assert f"can't start ranks on synk{two_hosts.net}-2: fork() needs a /proc" in done.stderr
