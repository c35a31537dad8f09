"""A process without file descriptors is refused in words, and the session goes on when it has some.

In interpreters of their own, which lower their own limit or that of their worker.
"""

import pytest

pytestmark = pytest.mark.faults

BEGIN = """
import os, resource
import numpy as np
import theano, theano.tensor as T
import synkhronos as synk
from synkhronos.session import current

synk.fork(2)
x, s = T.dvector("x"), theano.shared(np.arange(4.0), "s")
f = synk.function([x], [(x, "gather"), (x.sum(), "sum")], mode="FAST_COMPILE")
new = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
synk.distribute()
d = synk.data(np.arange(3.0))
assert f([1, 2, 3])[1] == 6 and f(d)[1] == 3
synk.broadcast(s)
synk.get_value(1, s)

def used(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))

def refused(kind, call, *words):
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError("it was not refused")
    for word in ("no file descriptor left of its", "ulimit -n", "free_memory()", *words):
        assert word in text, text

def all_work():
    assert f([1, 2, 3])[1] == 6 and new(np.ones(5)) == 5
    assert f(np.ones(80_000))[1] == 80_000 and f(synk.data(np.ones(7)))[1] == 7
    d.set_length(100_000)
    synk.broadcast(s, np.arange(9.0))
    assert synk.get_value(1, s).sum() == 36

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
"""

ON_THE_MASTER = """
before = used()
more = synk.data([1.0])
assert used() - before == 2
del more
limit = before + 3
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
for n_free in (0, 1):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit - used() + 1 - n_free)]
    refused(synk.SharedMemoryFull, lambda: synk.data(np.ones(5)), f"its {limit}.")
    refused(synk.SharedMemoryFull, lambda: new(np.ones(5)))  # its first call
    refused(synk.SharedMemoryFull, lambda: f(np.ones(50_000)))
    refused(synk.SharedMemoryFull, lambda: d.set_length(50_000))
    assert d.data.tolist() == [0, 1, 2] and f([1, 2, 3])[1] == 6
    refused(synk.SharedMemoryFull, lambda: synk.broadcast(s, np.ones(50_000)))
    for file in files:
        os.close(file)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
all_work()
"""

ON_A_WORKER = """
[worker] = current("this test")._processes.values()
resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (used(worker.pid), hard))
words = ("Rank 1 of 2", "SharedMemoryFull")
refused(synk.WorkerError, lambda: f(synk.data(np.ones(7))), *words)
refused(synk.WorkerError, lambda: new(np.ones(5)), *words)
refused(synk.WorkerError, lambda: f(np.ones(50_000)), *words)  # a growing output
refused(synk.WorkerError, lambda: synk.broadcast(s, np.ones(50_000)), *words)
resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (soft, hard))
all_work()
"""

END = """
synk.close()
assert synk.fork(2) == 2 and synk.data(np.ones(3)).data.sum() == 3
synk.close()
"""


@pytest.mark.parametrize("where", [ON_THE_MASTER, ON_A_WORKER], ids=["master", "worker"])
@pytest.mark.sample(1)
def test_no_descriptor_left(script, where):
    done = script(BEGIN + where + END)
    assert "Error" not in done.stderr


GATE = """
import os, resource
from synkhronos.comm.shared.gate import SharedGate

free, (soft, hard) = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
os.close(free)
for n in range(9):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + n, hard))
    try:
        SharedGate(2, 0, False).close()
        made = True
    except OSError:
        made = False
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.dup(0) == free, n
    os.close(free)
assert made
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
SharedGate(2, 0, False).close()
assert os.dup(0) == free
"""


def test_a_gate_that_is_not_made_leaves_no_descriptor(script):
    script(GATE)
