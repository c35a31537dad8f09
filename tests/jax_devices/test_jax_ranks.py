"""Ranks that compute with JAX, in processes of their own: a process can start JAX once.

SYNKHRONOS_TEST_JAX=cuda0 names another device for all ranks than CPU cores.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from support import host_library, running
from support.on_devices import PYTEST, outcome

DEVICE = os.environ.get("SYNKHRONOS_TEST_JAX", "jax:cpu")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or not host_library.ON_PYTENSOR,
    reason="JAX is not installed beside PyTensor",
)
# What JAX can't compute, or computes otherwise; and tests of what numba and Theano do.
WITHOUT = [
    "collectives/test_collectives::test_random_states",
    "collectives/test_ops::test_the_gradients_of_a_model_take_one_round",
    "collectives/test_ops::test_a_rank_that_raises_strands_nobody",
    "collectives/test_ops::test_a_branch_that_only_some_ranks_take_is_an_error",
    "calls/test_functions::test_gather_stacks_scalars_and_joins_uneven_rows",
    "calls/test_functions::test_a_rank_without_rows_does_not_run",
    "calls/test_functions::test_every_rank_sees_its_own_rows_in_rank_order",
]
PREAMBLE = f"""
import os, signal, sys
import numpy as np, pytensor, pytensor.tensor as pt
import synkhronos as synk
devices = [{DEVICE!r}] * 2
"""


def passes(done):
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_functions_collectives_and_training(n_ranks):
    master = str(n_ranks // 3)
    cases = ["jax_devices/jax_cases"]
    passes(outcome(",".join([DEVICE] * n_ranks), cases, master=master, SYNKHRONOS_TEST_ALL="1"))


def test_likelihoods():
    pytest.importorskip("pymc", minversion="6")
    case = Path(__file__).with_name("likelihood_cases.py")
    passes(running.run(*PYTEST, case, env={**os.environ, "SYNKHRONOS_TEST_ALL": "1"}, timeout=1200))


def test_suites_of_all_devices():
    names = ["collectives/test_collectives", "collectives/test_ops", "calls/test_functions"]
    # Plain functions of the mode JAX, made before the fork, warn of assertions.
    variables = {"SYNKHRONOS_TEST_MODE": "JAX", "PYTEST_ADDOPTS": "-W ignore:Skipping"}
    passes(outcome(f"{DEVICE},{DEVICE}", names, "not thorough", WITHOUT, **variables))


def says(text, *words):
    done = running.code(PREAMBLE + text)
    assert done.returncode == 0, done.stdout + done.stderr
    for each in words:
        assert each in done.stdout
    return done


def refused(call, *words):
    """Check that a call raises an exception whose message has these words."""
    text = f"try:\n    {call}\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    says(text, *words)


REFUSED = {
    "jax has started": (
        "import jax; jax.numpy.zeros(1); synk.fork(devices=devices)",
        ["SessionError", "fork() must come before JAX computes anything"],
    ),
    "no jax": (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'jax' else find(name, *rest); "
        "synk.fork(devices=devices)",
        ["ImportError", "JAX, which is not installed here", "synkhronos[jax-cuda]"],
    ),
    "opencl": ("synk.fork(devices=['opencl0:0'])", ["ImportError", "need Theano"]),
    "mixed": ("synk.fork(devices=['cpu', 'jax:cpu'])", ["ValueError", "or none"]),
    "no such device": (
        "synk.fork(devices=['jax:cpu777'] * 2)",
        ["WorkerError", "JAX can't open the device jax:cpu777: it has no device of that number"],
    ),
    "a mode of jax on cpu ranks": (
        "synk.fork(2); synk.function([], [], mode='JAX')",
        ["ValueError", "fork(devices=['cuda0']), or ['jax:cpu']"],
    ),
    "a fork after the session": (
        "synk.fork(devices=devices); synk.close(); synk.fork(devices=devices)",
        ["SessionError", "fork() must come before JAX computes anything"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, words = REFUSED[case]
    refused(call, *words)


def test_a_killed_worker_ends_the_session_and_values_are_numpys():
    text = """
synk.fork(devices=devices)
x, w = pt.dvector("x"), pytensor.shared(np.zeros(2), "w")
f = synk.function([x], [], updates=[(w, w + synk.ops.all_reduce(x.sum(), "sum"))])
f(np.arange(4.0))
os.kill(synk.status().ranks[1].pid, signal.SIGKILL)
try:
    f(np.arange(4.0))
except synk.WorkerDied as error:
    print("died:", error)
synk.close()
print(type(w.container.storage[0]).__name__, w.get_value())
"""
    says(text, "died: Worker rank 1", "ndarray [6. 6.]")


def test_products_of_float32_are_not_rounded_to_fewer_bits():
    text = """
synk.fork(devices=devices)
x = pt.fmatrix("x")
a = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
f = synk.function([], (x.dot(x.T), None), bcast_inputs=[x])
print(np.abs(f(a) - a.astype("float64") @ a.T.astype("float64")).max() < 1e-4, f(a).dtype)
"""
    says(text, "True float32")


def test_a_function_keeps_no_copy_of_values_and_takes_any_random_state():
    text = """
synk.fork(devices=devices[:1])
data = pytensor.shared(np.ones(1000), "data")
f = synk.function([], data.sum())
import jax
f()
print("copies:", sum(each.shape == (1000,) for each in jax.live_arrays()))
for kind in (np.random.SFC64, np.random.MT19937):
    rng = pytensor.shared(np.random.Generator(kind(1)))
    following, x = pt.random.normal(size=(3,), rng=rng).owner.outputs
    g = synk.function([], x.sum(), updates=[(rng, following)])
    print(kind.__name__, g() != g())
"""
    says(text, "copies: 1", "SFC64 True", "MT19937 True")
