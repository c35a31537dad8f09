"""Reductions that begin while a function computes: the same results, and no rank left behind."""

import pytest
from support import hosts
from support.machine_scripts import job

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")

BEGIN = """
import os, signal, sys, threading, time
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from synkhronos._host.theano import overlapping
from support.compiling import IN_PYTHON
from support.machine_operations import KILL, RAISE, SLEEP, attempt, trouble

overlapping.BUCKET_BYTES = 1  # each gradient is a bucket
X = np.random.RandomState(0).randn(9, 4)

def network(make, reduce):
    x, t = T.dmatrix("x"), T.dvector("t")
    rng = np.random.RandomState(1)
    params = [theano.shared(rng.randn(*shape)) for shape in [(4, 6), (6, 5), (5,)]]
    h = x
    for w in params[:2]:
        h = T.tanh(T.dot(h, w))
    y = T.dot(h, params[2])
    grads = T.grad((y ** 2).mean(), params)
    grads[0] += trouble(t).sum()  # in the last bucket
    grads = [reduce(g) for g in grads]
    # Theano computes the squares in the memory of the reduced gradient, after the update of p.
    norm = T.sqrt(sum(T.sqr(g).sum() for g in grads))
    updates = [(p, p - 0.1 * g) for p, g in zip(params, grads)]
    outputs = [(y ** 2).mean(), norm]
    return make([x, t], outputs, updates=updates, mode=IN_PYTHON), params

def ended(f):
    nodes = f._compiled.maker.fgraph.toposort()
    return sum(isinstance(node.op, overlapping.End) for node in nodes)

def train(overlap):
    n = synk.fork(int(os.environ["RANKS"]), overlap=overlap)
    f, params = network(synk.function, synk.ops.all_reduce)
    assert ended(f) == (3 if overlap else 0), ended(f)
    synk.distribute()
    for rows in (8, 9, 5, 2, 1):  # some ranks have fewer rows than others, or none
        f(X[:rows], np.zeros(rows))
    before = [[synk.get_value(rank, p) for rank in range(n)] for p in params]
    for slices in (2, 3):
        f(X, np.zeros(9), num_slices=slices)
    return n, f, params, before
"""


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory):
    """Yield a job for all scripts of this file."""
    with job(tmp_path_factory.mktemp("job"), BEGIN) as one:
        yield one


EQUAL = """
n, f, params, before = train(True)
sliced = [[synk.get_value(rank, p) for rank in range(n)] for p in params]
synk.close()
*_, others, others_before = train(False)
serial, expected = network(theano.function, lambda g: g)
for rows in (8, 9, 5, 2, 1):
    serial(X[:rows], np.zeros(rows))
for values, other, right in zip(before, others_before, expected):
    assert all(np.array_equal(value, values[0]) for value in values + other)
    np.testing.assert_allclose(values[0], right.get_value(), rtol=1e-10, atol=1e-12)
for values, other in zip(sliced, others):
    assert all(np.array_equal(value, values[0]) for value in values)
    assert np.array_equal(other.get_value(), values[0])
print("equal")
"""


@pytest.mark.slow("starts a job on several hosts")
@pytest.mark.parametrize("ranks", [1, 2])
def test_results_are_those_without_overlap_and_of_serial_theano(shared_job, ranks):
    assert shared_job.run(EQUAL, ranks)[-1] == "equal"


FAULTS = """
n, f, params, _ = train(os.environ["OVERLAP"] == "1")
quiet = np.zeros(8)
X = X[:8]

def on(rank, what):
    rows = np.zeros(8)
    rows[2 * rank] = what  # the first row of the rank
    return rows

for rank in range(n):
    attempt(f, X, on(rank, RAISE))
    attempt(f, X, quiet)
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
attempt(f, X, on(n - 1, SLEEP))
attempt(f, X, quiet)
values = [[synk.get_value(rank, p) for rank in range(n)] for p in params]
print(all(np.array_equal(a, b) for each in values for a, b in zip(each, each[1:])), flush=True)
attempt(f, X, on(3, KILL))
"""


@pytest.mark.slow("starts a job of four ranks")
@pytest.mark.parametrize("overlap", "01")
def test_a_rank_that_never_comes_to_a_reduction_strands_nobody(shared_job, overlap):
    lines = shared_job.run(FAULTS, ranks=2, OVERLAP=overlap)
    errors = [line for line in lines if line.startswith("WorkerError")]
    assert len(errors) == 4, lines
    for rank, line in enumerate(errors):
        assert line.startswith(f"WorkerError {rank} "), lines
        assert "raised RuntimeError: on purpose" in line
        assert line.endswith("in time"), lines
    assert sum(line.startswith("went well ") for line in lines) == 5, lines
    assert any(line.startswith("KeyboardInterrupt") and "in time" in line for line in lines), lines
    assert "True" in lines
    died = [line for line in lines if line.startswith("WorkerDied 3")]
    assert len(died) == 1, lines
    assert died[0].endswith("in time")


OTHERS = """
n = synk.fork(int(os.environ["RANKS"]))
x = T.dmatrix("x")
sums = [synk.ops.all_reduce(T.dot(x.T, each), "sum") for each in (x, T.exp(x))]
loss = x.sum()
f = synk.function([x], [(loss, "sum"), *sums], mode=IN_PYTHON)
assert ended(f) == 2
rows = X[:8]
for _ in range(4):
    assert np.allclose(f(rows, output_subset=[0]), rows.sum())  # begins buckets that nothing ends
    f(rows[:4], output_subset=[0])
    total, one, two = f(rows)
    np.testing.assert_allclose(one, rows.T @ rows)
    np.testing.assert_allclose(two, rows.T @ np.exp(rows))
print("equal")

# A script that answers a Ctrl-C itself, for example to end after this epoch.
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
synk.close()
n, f, params, _ = train(True)
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
trouble_on_last = np.zeros(8)
trouble_on_last[-8 // n] = SLEEP
attempt(f, X[:8], trouble_on_last)
print("asked", asked, signal.getsignal(signal.SIGINT).__name__)
"""


@pytest.mark.slow("starts a job of four ranks")
def test_other_outputs_and_other_answers_to_ctrl_c(shared_job):
    lines = shared_job.run(OTHERS, ranks=2)
    assert [lines[-3], lines[-1]] == ["equal", "asked [1] <lambda>"], lines
    assert lines[-2].startswith("went well "), lines


UNEQUAL = """
synk.fork(int(os.environ["RANKS"]))
x = T.dmatrix("x")
a, b = theano.shared(np.zeros((1, 4))), theano.shared(np.zeros(4))
updates = [(a, synk.ops.all_reduce(2 * x)), (b, synk.ops.all_reduce(T.exp(x).sum(0)))]
f = synk.function([x], x.sum(), updates=updates, mode=IN_PYTHON)
assert ended(f) == 2
attempt(f, X[:5])
attempt(f, X[:4])
print(a.get_value().shape)
"""


@pytest.mark.slow("starts a job on two hosts")
@pytest.mark.parametrize("ranks", [1, 2])
def test_unequal_shapes_in_a_bucket_are_refused(shared_job, ranks):
    lines = shared_job.run(UNEQUAL, ranks)
    assert lines[-3].startswith("WorkerError 0 "), lines
    assert "arrays of different shapes on the ranks" in lines[-3]
    assert lines[-2].startswith("went well "), lines
    assert lines[-1] == f"({2 if ranks == 1 else 1}, 4)", lines
