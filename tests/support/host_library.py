"""The host library that the tests of this run are for: Theano or PyTensor.

The suites are written with Theano's names. On PyTensor the folder ``on_pytensor`` serves them, in
this process and in those that tests start. `LEFT_OUT` lists what can't run there, and why.
"""

import os
import sys
from pathlib import Path

import numpy as np

from support.running import python_path
from synkhronos._host import choice

NAME = choice.choose()
ON_PYTENSOR = NAME == "pytensor"

# PyTensor's default mode compiles each function for seconds, so the suites run in Python mostly.
# SYNKHRONOS_TEST_MODE=NUMBA runs them as users do, and CVM with C code.
MODE = os.environ.get("SYNKHRONOS_TEST_MODE", "FAST_COMPILE") if ON_PYTENSOR else "FAST_COMPILE"

TESTS = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("on_pytensor")

# The folders, and modules with examples, that run on PyTensor.
SUITES = [
    "tests/calls",
    "tests/collectives",
    "tests/training",
    "tests/jax_devices",
    "tests/faults",
    "tests/host",
    "tests/likelihood",
    "tests/docs/test_examples.py",
    "tests/docs/test_libraries_page.py",
    "tests/docs/test_readme.py",
    "tests/session/test_resuming.py",
    "tests/tools/test_info_pytensor.py",
    "tests/whole/test_added_operation.py",
    "tests/whole/test_bad_input.py",
    "tests/parameter_server/test_train_with_store.py",
    "tests/parameter_server/test_storing.py",
    "synkhronos/functions.py",
    "synkhronos/collectives.py",
    "synkhronos/inputs.py",
    "synkhronos/values.py",
    "synkhronos/ops.py",
    "synkhronos/porting.py",
    "synkhronos/resuming.py",
    "synkhronos/extensions/train.py",
    "synkhronos/extensions/update_rules.py",
    "synkhronos/extensions/updates.py",
    "synkhronos/extensions/pymc",
]

# The pages whose examples are written for PyTensor.
OF_PYTENSOR = ["docs/pytensor.rst", "docs/pymc.rst"]

# Parts of the names of tests, and the reasons why they can't run on PyTensor.
LEFT_OUT = {
    "FAST_COMPILE-patches]": "operations of Theano's nnet",
    "FAST_COMPILE-levels of classes]": "operations of Theano's nnet",
    "FAST_COMPILE-single floats, halved-": "ranks were forked with warnings as errors",
    "FAST_COMPILE-an unsigned sum-in_python]": "serial PyTensor raises OverflowError",
    "FAST_COMPILE-a small length-": "serial PyTensor raises OverflowError",
    "FAST_COMPILE-small numbers of rows-": "serial PyTensor 3.1 raises OverflowError",
    "FAST_COMPILE-no number, as an integer-": "casts of PyTensor 3.1 raise",
    **{
        f"test_parallel_scans.py::{name}": "ranks can't reduce in steps of PyTensor's scans"
        for name in (
            "test_means_that_are_states_are_rounded_as_serially",
            "test_loops_that_theano_rewrites_are_in_the_chain",
            "test_a_rank_that_raises_in_a_step_ends_the_loops",
        )
    },
    **{
        f"FAST_COMPILE-{name}-float": "ranks can't reduce in steps of PyTensor's scans"
        for name in (
            *("normalized steps", "steps that grow by sums", "descended", "sums in two levels"),
            *("several loops that reduce", "sums and loops that are chosen"),
        )
    },
    "FAST_COMPILE-tiled-float": "PyTensor's tile takes no ndim",
    "test_parallel.py::test_outputs_by_name": "functions of PyTensor have no outputs by name",
    "test_parallel.py::test_the_exceptions_of_a_mode": "PyTensor's NanGuardMode warns first",
    "test_copies_of_theano_function_are_caught": "Theano's pfunc",
    "collectives/test_overlapping.py": "reductions between machines overlap on Theano alone",
    "test_lending.py::test_what_outlives_a_call_is_not_lent": "products into shared memory",
    "test_lending.py::test_arrays_that_change_their_shapes": "products into shared memory",
    "test_slices.py::test_outputs_that_are_not_asked_for_are_not_computed": "all are computed",
    "test_distribute.py::test_functions_without_a_blas_travel": "Theano's fallback without a BLAS",
    "FAST_COMPILE-tuples]": "PyTensor takes no inputs as tuples",
    "FAST_COMPILE-outputs_dict]": "functions of PyTensor have no outputs by name",
    "FAST_COMPILE-updates_dict]": "PyTensor does not warn of updates in a dict",
    "FAST_COMPILE-default_updates]": "PyTensor deprecates no_default_updates",
    "test_a_swapped_random_state_goes_on": "numbers of Theano's RandomStreams",
    "FAST_COMPILE-container]": "functions of PyTensor have no containers by name",
    "test_theano_arguments.py::test_the_tools_of_theano_take_it": "Theano's tools",
    "functions.py::synkhronos.functions.Function": "it shows Theano's tools",
    "test_print.py": "Theano's operation Print",
}


def random_state(seed):
    """Return a random state of the kind that the host's random state variables hold."""
    return np.random.default_rng(seed) if ON_PYTENSOR else np.random.RandomState(seed)


def said(text):
    """Return what a message says on this host: the host's names of types and constants differ."""
    if ON_PYTENSOR:
        text = text.replace("TensorType(float64, vector)", "Vector(float64, shape=(?,))")
        text = text.replace("TensorConstant{1.0}", "1.0")
        text = text.replace("variable, an In, or a tuple", "variable or an In")
    return text


def leave_out(items):
    """Return the tests that can't run on this host."""
    if not ON_PYTENSOR:
        return set()
    return {item for item in items if any(each in item.nodeid for each in LEFT_OUT)}


def serve():
    """Put Theano's names on the path of this process, and of those that it starts."""
    if not ON_PYTENSOR:
        return
    os.environ["SYNKHRONOS_HOST"] = NAME
    flags = os.environ.get("PYTENSOR_FLAGS", "")
    os.environ["PYTENSOR_FLAGS"] = f"mode={MODE},{flags}".rstrip(",")
    sys.path.insert(0, str(NAMES))
    os.environ["PYTHONPATH"] = python_path(NAMES)


def reason_to_leave_out(path):
    """Return why a file can't run on this host, or None."""
    if not path.is_file():
        return None
    name = path.relative_to(TESTS.parent).as_posix()
    if not ON_PYTENSOR:
        return "it is for PyTensor" if name in OF_PYTENSOR else None
    if not any(name == each or name.startswith(f"{each}/") for each in SUITES + OF_PYTENSOR):
        return "it is for Theano"
    return next((LEFT_OUT[each] for each in LEFT_OUT if name.endswith(each)), None)


serve()
