"""Sessions in unusual surroundings: no standard streams, a /proc of other processes, no memory."""

import errno
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import theano.tensor as T
from support import running
from support.helpers import function
from support.running import python_path

import synkhronos as synk
from synkhronos._machine import processes, shared_memory
from synkhronos._machine.shared_memory import Segments

# Where it can, it leaves its error in a file, because there may be no standard error.
TRY = """
import contextlib, os, sys, traceback
def failed(kind, error, trace):
    with open("error", "w") as file:
        traceback.print_exception(kind, error, trace, file=file)
sys.excepthook = failed

@contextlib.contextmanager
def refused(kind, *words):
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("it was not refused")
"""

WORK = """
import numpy as np
import theano, theano.tensor as T
from support.helpers import Call, function, on_ranks
import synkhronos as synk

def streams():
    return {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)}

def noise():
    assert streams() & files == streams(), streams()
    for number in (1, 2):
        os.write(number, b"noise" * 1000)  # as code in C does
    return 1

def work():
    x, s = T.dvector("x"), theano.shared(np.arange(4.0), "s")
    f = function([x], [(x, "gather"), (x.sum() + s.sum(), "sum")])
    every = [synk.data(np.full(5, float(number))) for number in range(4)]
    for number, d in enumerate(every):
        assert set(on_ranks(noise)) == {1}
        rows, total = f(d)
        assert rows.tolist() == d.data.tolist() == [number] * 5, d.data
        d.set_length(5000)
        f(np.ones(7000))
        synk.broadcast(s, np.arange(4.0))
        synk.all_reduce(s, op="max")
        assert s.get_value().tolist() == [0, 1, 2, 3]
"""

WITHOUT = """
files = {"/dev/null", OPEN}
for n_ranks in (1, 2, 3):
    synk.fork(n_ranks)
    work()
    synk.close()
assert streams() <= files
"""

CLOSED_LATER = """
files = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)} | {"/dev/null"}
synk.fork(2)
for number in (0, 1, 2):
    os.close(number)
one = synk.data(np.ones(5))
assert streams() == {"/dev/null"}
work()
for number in (0, 1, 2):
    os.close(number)
x = T.dvector()
f = function([x], (x, "gather"))
assert f(np.ones(100_000)).sum() == 100_000  # an output that lies in a worker's memory
assert streams() == {"/dev/null"}
work()
synk.close()
"""


def run(tmp_path, script, form):
    """Run a script by a shell, with `python` and `script` put into the command `form`."""
    path = tmp_path / "script.py"
    path.write_text(TRY + script)
    command = form.format(python=shlex.quote(sys.executable), script=path)
    tests = os.path.dirname(os.path.dirname(__file__))
    env = {**os.environ, "PYTHONPATH": python_path(tests)}
    done = running.run("sh", "-c", command, cwd=tmp_path, env=env)
    error = tmp_path / "error"
    assert not error.exists(), error.read_text()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "<&- 2>&-"])
@pytest.mark.slow("starts an interpreter")
def test_no_memory_gets_the_number_of_a_closed_standard_stream(tmp_path, closed):
    opened = tmp_path / "opened"
    script = WORK + WITHOUT.replace("OPEN", repr(str(opened)))
    run(tmp_path, script, f"exec {{python}} {{script}} <>{opened} >>{opened} 2>&1 {closed}")


@pytest.mark.slow("starts an interpreter")
def test_standard_streams_that_the_script_closes_later(tmp_path):
    run(tmp_path, WORK + CLOSED_LATER, "exec {python} {script}")


def unshared(options, command="true"):
    return f"unshare {options} sh -c {shlex.quote(command)}"


def needs(options):
    """Skip the test if this process can't make namespaces with these options."""
    if shutil.which("unshare") is None:
        pytest.skip("needs the command unshare, of util-linux")
    done = subprocess.run(unshared(options), shell=True, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to `unshare {options}`: {done.stderr.strip()}")


NAMESPACE = """
files = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)} | {"/dev/null"}
assert os.getpid() == 1 and os.readlink("/proc/self") != "1"
for n_ranks in (2, 3):
    synk.fork(n_ranks)
    work()
    found = synk.status()
    assert {(rank.process, rank.resident) for rank in found.ranks} == {("unknown", None)}
    synk.close()
"""


@pytest.mark.slow("starts an interpreter")
def test_a_pid_namespace_that_kept_the_proc_of_another_one(tmp_path):
    needs("--pid --fork")
    run(tmp_path, WORK + NAMESPACE, "exec unshare --pid --fork {python} {script}")


NOT_SHARED = """
import synkhronos as synk
for _ in range(2):
    with refused(synk.SessionError, *WORDS):
        synk.fork(2)
assert synk.fork(1) == 1
assert synk.data([1.0]).data.sum() == 1
synk.close()
"""
NO_PROC = "fork() needs a /proc that shows this process", "unshare --mount-proc"
NO_MEMORY = "fork() can't make shared memory", "/dev/shm", "synkhronos info"
MOUNTS = {
    "read-only": ("mount -t tmpfs -o ro none /dev/shm", NO_MEMORY),
    "missing": ("mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3", NO_MEMORY),
    "no open files in proc": (
        "mount -t tmpfs none /proc && mkdir /proc/7 && ln -s 7 /proc/self && touch /proc/7/maps "
        "&& echo 'CapEff: ffffffffffffffff' > /proc/7/status",
        NO_MEMORY,
    ),
    "no proc": ("mount -t tmpfs none /proc", NO_PROC),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("mount", MOUNTS)
def test_fork_is_refused_where_no_memory_can_be_shared(tmp_path, mount):
    needs("--mount")
    line, words = MOUNTS[mount]
    script = NOT_SHARED.replace("WORDS", repr(words))
    run(tmp_path, script, unshared("--mount", line + " && exec {python} {script}"))


def test_the_memory_of_systems_without_nameless_files_is_refused_in_words(monkeypatch):
    class Nowhere:
        Error, O_CREX = shared_memory.posix_ipc.Error, 0

        def SharedMemory(*_, **__):
            raise Nowhere.Error("no such place")

    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as an older Linux takes it
    monkeypatch.setattr(shared_memory, "posix_ipc", Nowhere)
    with pytest.raises(synk.SessionError, match="again: /dev/shm: no such place"):
        synk.fork(2)


CLOSED_TO_OTHERS = """
import ctypes
import numpy as np
import theano
import synkhronos as synk
s = theano.shared(np.arange(4.0), "s")

def works():
    assert synk.fork(2) == 2
    synk.broadcast(s)
    assert synk.get_value(1, s).sum() == 6
    synk.close()

works()  # and imports all that another user may not read
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
else:
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
with refused(synk.SessionError, "has changed its user", "PR_SET_DUMPABLE, 1"):
    synk.fork(2)
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
works()
"""


def test_fork_is_refused_where_ranks_may_not_open_the_memory_of_one_another(tmp_path):
    run(tmp_path, CLOSED_TO_OTHERS, "exec {python} {script}")


FULL = """
import resource
import numpy as np
import synkhronos as synk
synk.fork(2)
d = synk.data(np.ones(4))
"""
FEW_ADDRESSES = """
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20), before[1]))
for make in (lambda: synk.data(shape=(16 << 20,), dtype="float64"), lambda: d.set_length(16 << 20)):
    with refused(synk.SharedMemoryFull, "can't map more memory", "ulimit -v"):
        make()
assert d.data.sum() == 4
resource.setrlimit(resource.RLIMIT_AS, before)
assert synk.data(shape=(16 << 20,), dtype="int8").data.sum() == 0
"""
SMALL_FILES = """
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
with refused(synk.SharedMemoryFull, "files of at most 65,536 bytes", "ulimit -f"):
    synk.data(shape=(100_000,), dtype="float64")
assert synk.data(np.ones(100)).data.sum() == 100
resource.setrlimit(resource.RLIMIT_FSIZE, before)
assert synk.data(np.ones(100_000)).data.sum() == 100_000
"""
FEW_FILES = """
several = []
with refused(synk.SharedMemoryFull, "no file left that can be made (inodes)"):
    for _ in range(20):
        several.append(synk.data(np.ones(4)))
several.clear()
assert synk.data(np.ones(4)).data.sum() == 4
"""


@pytest.mark.parametrize("lack", [FEW_ADDRESSES, SMALL_FILES], ids=["addresses", "size of files"])
def test_what_is_lacking_is_told_as_a_lack_of_memory(tmp_path, lack):
    run(tmp_path, FULL + lack, "exec {python} {script}")


def test_a_lack_of_inodes_is_told_as_a_lack_of_memory(tmp_path):
    needs("--mount")
    inner = "mount -t tmpfs -o size=64m,nr_inodes=12 none /dev/shm && exec {python} {script}"
    run(tmp_path, FULL + FEW_FILES, unshared("--mount", inner))


SMALL = """
import gc, os
import numpy as np
import theano, theano.tensor as T
import synkhronos as synk

gc.disable()  # all memory goes with the last reference to it
every = np.resize(np.arange(100, dtype="int8"), 70 << 20)

def rows(megabytes):
    return every[:megabytes << 20]

def free():
    room = os.statvfs("/dev/shm")
    return room.f_bavail * room.f_frsize >> 20

def refused_without_data(call):
    try:
        call()
    except synk.SharedMemoryFull as error:
        assert "Use smaller arrays (fewer rows in each call)" in str(error), error
        assert "free_memory" not in str(error), error
    else:
        raise AssertionError("it was not refused")

x, y = T.bvector("x"), T.bvector("y")
"""
GROWING = """
from support.helpers import function

for n_ranks, master in ((1, 0), (2, 0), (3, 1)):
    synk.fork(n_ranks, master_rank=master)
    total = T.sum(x, dtype="int64")
    f, serial = function([x], (total, "sum")), theano.function([x], total, mode="FAST_COMPILE")
    both = function([x], (total + T.sum(y, dtype="int64"), "sum"), bcast_inputs=[y])
    for size in (30, 50, 55, 20, 58):
        assert f(rows(size)) == serial(rows(size)), size
    if n_ranks == 1:  # it has memory of its own process
        synk.close()
        continue
    for _ in range(2):
        refused_without_data(lambda: f(rows(70)))
        assert free() == 63  # and some KB
        for size in (20, 50):
            assert f(rows(size)) == serial(rows(size)), size
    # Another function may use it, and an input that of another one.
    for sizes in ((10, 40), (40, 10), (30, 30), (5, 55)):
        expected = serial(rows(sizes[0])) + n_ranks * serial(rows(sizes[1]))
        assert both(*map(rows, sizes)) == expected, sizes
    refused_without_data(lambda: both(rows(30), rows(35)))
    assert free() == 63  # and some KB

    # The numbers of selected rows are copied, too.
    few = rows(1)
    for n_rows in (3 << 20, 5 << 20):
        chosen = np.arange(n_rows) * 7 % len(few)
        assert f(few, batch=chosen) == serial(few[chosen])
    del f

    # A Data keeps its contents until it has got more memory.
    f = function([x], (total, "sum"))
    d = synk.data(rows(30))
    with refused(synk.SharedMemoryFull, "Free some Data (free_memory())"):
        d.set_value(rows(50))
    assert f(d) == serial(rows(30)) and np.array_equal(d, rows(30))
    with refused(synk.SharedMemoryFull, "Free some Data (free_memory())"):
        f(rows(50))
    d.free_memory()
    d.set_value(rows(50))
    assert f(d) == serial(rows(50))
    del f, both, d
    synk.close()
    assert free() == 64
"""
PARALLEL = """
w, other = theano.shared(0.0, "w"), theano.shared(0.0, "other")
serial = theano.function([x], x.max(), updates=[(other, other + x.sum())], mode="FAST_COMPILE")
with synk.parallel(2, check=CHECK):
    step = theano.function(
        [x], x.max(), updates=[(w, w + x.sum())], name="step", mode="FAST_COMPILE"
    )
    longer = theano.function([x], x + 1, name="longer", mode="FAST_COMPILE")
    for size in (30, 70, 50, 70, 20):
        assert step(rows(size)) == serial(rows(size))
        assert w.get_value() == other.get_value() > 0
    assert synk.gather(w, nd_up=1).tolist() == [other.get_value()] * 2
    for size in (20, 40, 70, 1):  # the inputs of 40 have room, the outputs have not
        assert np.array_equal(longer(rows(size)), rows(size) + 1)
    found = {each.name: each for each in synk.parallel_report().functions}
assert (found["step"].calls, found["step"].calls_on_ranks) == (5, 3)
assert (found["longer"].calls, found["longer"].calls_on_ranks) == (4, 2)
for each in found.values():
    assert each.reason == "shared memory has no room for its inputs and outputs"
    assert "Use smaller arrays (fewer rows" in each.instead and "--shm-size" in each.instead
assert free() == 64
"""
MOUNT_SMALL = "mount -t tmpfs -o size=64m none /dev/shm && exec {python} {script}"


def test_an_array_may_use_the_room_of_the_one_before(tmp_path):
    needs("--mount")
    run(tmp_path, SMALL + GROWING, unshared("--mount", MOUNT_SMALL))


@pytest.mark.parametrize("check", [False, True])
def test_calls_of_parallel_that_have_no_room_are_serial(tmp_path, check):
    needs("--mount")
    script = SMALL + PARALLEL.replace("CHECK", str(check))
    run(tmp_path, script, unshared("--mount", MOUNT_SMALL))


@pytest.mark.parametrize("n, master", [(2, 0), (3, 1)])
@pytest.mark.sample(1)
def test_a_file_of_another_process_is_never_read(no_session, monkeypatch, tmp_path, n, master):
    # As in a PID namespace: /proc/<pid> is a process that has a file of its own at this number.
    other = tmp_path / "secret"
    other.write_bytes(b"secret" * 10_000)
    script = (
        "import os, sys\n"
        f"fd = os.open({str(other)!r}, os.O_RDWR)\n"
        "for number in range(3, 200): os.dup2(fd, number)\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    synk.fork(n, master_rank=master)
    x = T.dvector("x")
    f = function([x], (x.sum(), "sum"))
    good = synk.data(np.ones(6))
    assert f(good) == 6
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with monkeypatch.context() as context:
            context.setattr(processes, "number_in_proc", lambda: process.pid)
            strange = synk.data(np.ones(6))
        with pytest.raises(synk.WorkerError, match=r"no memory of the session.*--mount-proc") as no:
            f(strange)
        assert no.value.remote_type == "OSError"
        process.stdin.close()
    assert f(good) == 6
    assert f(synk.data(np.ones(6))) == 6
    assert other.read_bytes() == b"secret" * 10_000


def test_another_file_is_not_mapped(tmp_path):
    mine, other = Segments().create(100), Segments().create(100)
    theirs = Segments()
    for ref in (
        mine.ref._replace(fd=other.ref.fd),
        mine.ref._replace(inode=other.ref.inode),
        mine.ref._replace(device=mine.ref.device + 1),
    ):
        with pytest.raises(OSError, match="no memory of the session") as error:
            theirs.attach(ref)
        assert error.value.errno == errno.ESTALE
    assert theirs.attach(mine.ref).array("u1", (100,)).sum() == 0


def test_the_status_tells_nothing_of_other_processes(no_session, monkeypatch):
    synk.fork(2)
    with monkeypatch.context() as context:
        context.setattr(processes, "proc_has_our_numbers", lambda: False)
        found = synk.status()
    assert {(rank.process, rank.resident) for rank in found.ranks} == {("unknown", None)}
    assert {rank.process for rank in synk.status().ranks} <= {"running", "sleeping"}
