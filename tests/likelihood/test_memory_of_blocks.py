"""What blocks keep when they have ended: no more than plain PyMC does."""

import json

import pytest

pytest.importorskip("pymc", minversion="6")

CELLS = """
import gc, json, os
import numpy as np
import numba.core.event as events
import pymc as pm
import pytensor
from llvmlite.binding import ModuleRef
from synkhronos.extensions import pymc as parallel
from synkhronos.extensions.pymc.terms import RowData, Term

pytensor.config.mode = "NUMBA"  # compiles, as that of users does
X = np.random.default_rng(0).normal(size=(50, 3))


def evaluate(model):
    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    function([np.zeros(3)])


def run_cell(ranks):
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=X @ pm.Normal("w", shape=3), observed=X[:, 0] > 0)
    if not ranks:
        return evaluate(model)
    with parallel.likelihood(model, ranks=ranks):
        evaluate(model)


def kept():
    descriptors = len(os.listdir("/proc/self/fd"))  # before Python looks for cycles
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return {
        "descriptors": descriptors,
        "code": kinds.count(ModuleRef),
        "objects": len(kinds),
        "terms": kinds.count(Term) + kinds.count(RowData),
    }


def of_cells(ranks):
    run_cell(ranks)
    before = kept()
    for _ in range(3):
        with events.install_recorder("numba:compile") as recorder:
            run_cell(ranks)
    after = kept()
    more = {each: after[each] - before[each] for each in after}
    return {**more, "terms": after["terms"], "compiled": len(recorder.buffer)}


print(json.dumps([of_cells(0), of_cells(2)]))
"""


def test_a_cell_that_is_run_again_keeps_no_more_than_with_plain_pymc(script):
    plain, ours = json.loads(script(CELLS, timeout=300).stdout)
    assert (ours["descriptors"], ours["terms"], ours["compiled"]) == (0, 0, 0)
    assert ours["code"] <= plain["code"]
    assert ours["objects"] < plain["objects"]
