"""On a network that is trusted, MPI reduces arrays itself."""

import subprocess

import numpy as np
import pytest
from support import hosts
from support.running import IN_PYTHON

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")

SCRIPT = """
import numpy as np, theano, theano.tensor as T, synkhronos as synk
from synkhronos import ops
from synkhronos._session.current import Current

n, link = synk.fork(2), Current.session.gate.link
numbers = np.random.RandomState(1)

def reduced(op, dtype):
    values = [(100 * numbers.randn(1 << 17)).astype(dtype) for _ in range(n)]
    if dtype[0] == "f":
        values[0][:2] = np.nan
        values[-1].view(f"u{values[-1].itemsize}")[1:3] = np.array(-np.nan, dtype).view(
            f"u{values[-1].itemsize}"
        )
    s = theano.shared(np.zeros(1, dtype))
    for rank, each in enumerate(values):
        synk.set_value(rank, s, each)
    before = link.count_traffic()
    synk.all_reduce(s, op)
    sent = link.count_traffic()[1] - before[1]
    everyone = [synk.get_value(rank, s) for rank in range(n)]
    assert len({each.tobytes() for each in everyone}) == 1, (op, dtype)
    expected = {"sum": np.sum, "avg": np.mean, "max": np.max}[op](values, axis=0)
    np.testing.assert_allclose(everyone[0], expected, 0, 1e-3 if dtype == "float32" else 1e-9)
    return sent

for op, dtype in ("sum", "float32"), ("avg", "float64"), ("sum", "int32"):
    assert reduced(op, dtype) < 5000, "through the carriers"
assert reduced("max", "float32") > 1 << 18, "MPI's maximum is not that of NumPy"

x = T.dmatrix("x")
f = synk.function([x], ops.all_reduce(x.sum(axis=0), "sum"))
rows = np.arange(7.0 * (1 << 16)).reshape(7, -1)
np.testing.assert_array_equal(f(rows), rows.sum(axis=0))
synk.close()
print(n, "ranks")
"""

ENDING = """
import os, signal, threading, numpy as np, theano, synkhronos as synk
from synkhronos._session.current import Current

synk.fork(2)
s = theano.shared(np.ones(1 << 23, "float32"))
synk.broadcast(s)
[rank] = Current.session.worker_pids
threading.Timer(1, os.kill, [rank, signal.SIGKILL]).start()
try:
    while True:
        synk.all_reduce(s)
except synk.WorkerDied:
    print("saved")
"""


def launched(these, folder, script):
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        these.launch("--trust-network", "script.py"),
        cwd=folder,
        env=these.environment(**IN_PYTHON),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert these.is_empty()
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow("starts a session on three hosts")
def test_sums_of_arrays_are_those_of_mpi_and_the_same_on_all_ranks(three_hosts, tmp_path):
    assert launched(three_hosts, tmp_path, SCRIPT) == (0, "6 ranks\n", "")


@pytest.mark.slow("sends for some seconds")
def test_a_script_ends_well_while_mpi_still_sums(two_hosts, tmp_path):
    """Its carrier was killed after 5 seconds, and MPI then ended the job with an error."""
    two_hosts.slow(2, "40mbit")
    try:
        assert launched(two_hosts, tmp_path, ENDING) == (0, "saved\n", "")
    finally:
        two_hosts.slow(2, "10gbit")


def test_what_mpi_can_not_count_and_would_end_the_script_for_goes_through_the_carriers():
    from synkhronos.comm.mpi.mpi_reductions import MpiReductions

    for size, can in (((1 << 31) - 1, True), (1 << 31, False)):
        arrays = [np.ones(1, np.float32), np.broadcast_to(np.int8(1), size)]
        assert MpiReductions.can_reduce(None, arrays, ["sum", "avg"], False) is can
