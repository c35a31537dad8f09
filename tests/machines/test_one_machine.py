"""The transport of several machines on one alone: each operation, below and above the thresholds.

A job of several processes that MPI does not know is refused, so it is not one for each process.
"""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiling import IN_PYTHON
from support.expected import dtypes_of, reduced
from support.layouts import Layout
from support.running import python

import synkhronos as synk
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._host.theano import overlapping
from synkhronos._session.current import Current
from synkhronos.comm.mpi.all_reduce import CHUNK
from synkhronos.comm.mpi.transfers import SMALL

LAYOUTS = [Layout(2, transport="mpi"), Layout(3, master=1, transport="mpi")]
SIZES = [0, 8, SMALL, SMALL + 8, CHUNK + 8, 4 * CHUNK + 8]  # bytes
FLOATS = ["float16", "float32", "float64"]


def values_of(ranks, dtype, nbytes):
    """Return small whole numbers for each rank: sums, products and averages of them are exact."""
    shape = ranks.n, nbytes // np.dtype(dtype).itemsize
    values = np.random.RandomState(nbytes).randint(0, 4, shape)
    return (values * ranks.n if dtype in FLOATS else values % 2).astype(dtype)


def ops_of(dtype):
    return [op for op in OPERATIONS if dtypes_of(op, [dtype])]


def set_on(ranks, variables, values):
    for rank in range(ranks.n):
        synk.set_value(rank, variables, [each[rank] for each in values])


def assert_on(ranks, variables, expected):
    for rank in ranks:
        for variable, wanted in zip(variables, expected):
            np.testing.assert_array_equal(synk.get_value(rank, variable), wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint64", "bool"])
def test_collectives(ranks, dtype):
    values = [values_of(ranks, dtype, nbytes) for nbytes in SIZES]
    variables = [theano.shared(each[0]) for each in values]
    every = range(ranks.n)
    for op in ops_of(dtype):
        expected = [reduced(op, each, [1] * ranks.n).astype(dtype) for each in values]
        set_on(ranks, variables, values)
        for found, wanted in zip(synk.reduce(variables, op, in_place=False), expected):
            np.testing.assert_array_equal(found, wanted)
        synk.reduce(variables, op)
        assert_on([ranks.master], variables, expected)
        set_on(ranks, variables, values)
        synk.all_reduce(variables, op)
        assert_on(every, variables, expected)
    set_on(ranks, variables, values)
    for found, each in zip(synk.gather(variables), values):
        np.testing.assert_array_equal(found, each)
    synk.all_gather(variables)
    assert_on(every, variables, [each.reshape(-1) for each in values])
    synk.broadcast(variables, [each[-1] for each in values])
    assert_on(every, variables, [each[-1] for each in values])
    synk.scatter(variables, [each.reshape(-1) for each in values])
    for rank in every:
        assert_on([rank], variables, [each[rank] for each in values])


def test_the_segment_of_open_mpi_has_no_name(ranks):
    """Without mpirun nothing would remove it."""
    with open(f"/proc/{Current.link._carrier.pid}/maps") as maps:
        mapped = [line.strip() for line in maps if "/sm_segment." in line]
    assert all(line.endswith("(deleted)") for line in mapped), mapped


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("buckets", [False, True])
def test_reductions_in_functions_and_outputs(ranks, op, buckets, monkeypatch):
    """With one bucket for each reduction, or without buckets."""
    monkeypatch.setattr(overlapping, "BUCKET_BYTES", 1 if buckets else 1 << 40)
    parts = [values_of(ranks, "float64", nbytes)[0] + 1 for nbytes in SIZES]
    rows = T.dvector("rows")
    variables = [theano.shared(part) for part in parts]
    weighted = [rows.sum() * variable for variable in variables]
    over_ranks = [synk.ops.all_reduce(each, op) for each in weighted]
    f = synk.function(
        [rows],
        [(rows[0] * variable, op) for variable in variables],
        updates=[(variable, each - variable) for variable, each in zip(variables, over_ranks)],
        mode=IN_PYTHON,
    )
    nodes = f._compiled.maker.fgraph.toposort()
    assert any(isinstance(node.op, overlapping.End) for node in nodes) == buckets
    given = np.arange(1.0, ranks.n + 1)
    expected = [reduced(op, [row * part for row in given], [1] * ranks.n) for part in parts]
    for found, wanted in zip(f(given), expected):
        np.testing.assert_array_equal(found, wanted)
    after = [each - part for each, part in zip(expected, parts)]
    assert_on(range(ranks.n), variables, after)


def test_shapes_that_differ_between_ranks_are_refused(ranks):
    x, w = T.dvector("x"), theano.shared(np.zeros(3), "w")
    f = synk.function([x], (synk.ops.all_reduce(x, "sum"), "gather"), mode=IN_PYTHON)
    with pytest.raises(synk.WorkerError, match="different shapes"):
        f(np.ones(2 * ranks.n + 1))
    assert f(np.ones(ranks.n)).tolist() == [ranks.n] * ranks.n
    synk.set_value(1, w, np.zeros(4))
    with pytest.raises(ValueError, match="same shape"):
        synk.all_reduce(w)


OF_SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
}


def test_processes_that_mpi_does_not_know_are_refused(tmp_path):
    """As with `srun -N2 synkhronos run`, if this MPI has no PMIx of Slurm."""
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text("print('the script runs')")
    done = python("-m", "synkhronos", "run", "-n", "1", "script.py", cwd=tmp_path, **OF_SRUN)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "2 processes were started" in done.stderr
    assert "`srun --mpi=pmix synkhronos run script.py`" in done.stderr
    assert "`synkhronos launch script.py`" in done.stderr
