"""A call walks through few functions and files: a stranger can follow it.

These are counts, not times. Who needs a longer walk raises its limit, and says why.
"""

import json

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import Layout
from support.walks import Walk, walk_of

import synkhronos as synk

LIMITS = {
    "f(x)": Walk(27, 10, 27),
    "all_reduce": Walk(24, 7, 19),
    "step of BSP": Walk(60, 9, 49),
    "pushpull": Walk(40, 7, 24),
}


def check(name, walk):
    limit = LIMITS[name]
    assert all(count <= most for count, most in zip(walk, limit)), f"{name}: {walk}, not {limit}"


LAYOUTS = [Layout(2)]


def test_a_call_of_a_function(ranks):
    x, y = T.dmatrix("x"), T.dvector("y")
    z = T.dot(x, y)
    f = synk.function([x], [z.mean(), (z.max(), "max")], bcast_inputs=[y], check=0)
    rows, vector = np.arange(3003.0).reshape(1001, 3), np.array([1.0, 2.0, 3.0])
    check("f(x)", walk_of(lambda: f(rows, vector)))


def test_an_all_reduce(ranks):
    s = theano.shared(np.ones(5000), "s")
    check("all_reduce", walk_of(lambda: synk.all_reduce(s)))


def test_a_pushpull():
    ps = pytest.importorskip("synkhronos.parameter_server")
    with ps.create("local", devices=[0, 1]) as store:
        store.init("w", np.zeros(3))
        gradients = [np.ones(3), np.arange(3.0)]
        check("pushpull", walk_of(lambda: store.pushpull("w", gradients).wait()))


def test_a_step_of_a_rule(tmp_path, monkeypatch):
    pytest.importorskip("synkhronos.rules")
    from support import rules, walks

    monkeypatch.setenv("WALK_FILE", str(tmp_path / "walk"))
    file = walks.__file__.replace("walks.py", "walked_model.py")
    rules.run("BSP", 2, tmp_path, settings={"n_rows": 192}, file=file)
    check("step of BSP", Walk(*json.loads((tmp_path / "walk").read_text())))
