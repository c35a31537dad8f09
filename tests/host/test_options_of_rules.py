"""Options of operations: the rules of `parallel` know those of the host library that is installed.

The first test fails where a new release has brought an option. Find out what it does to rows,
write a rule or a refusal if it does something, and then its name in `OPTIONS`.
"""

import contextlib
import importlib

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling, host_library
from support.layouts import Layout

import synkhronos as synk
from synkhronos.porting import ParallelFunction

LAYOUTS = [Layout(2)]
importlib.import_module(f"synkhronos._host.{host_library.NAME}.dividing")  # before base.dividing
division = importlib.import_module("synkhronos._host.base.dividing.division")


def classes_with_a_rule():
    """Return the classes of operations that have a rule, and those that derive from them."""
    with contextlib.suppress(ImportError):
        import pymc  # noqa: F401 - it has operations that derive from PyTensor's
    found, left = [], list(division._RULES)
    if host_library.ON_PYTENSOR:
        from pytensor.scan.op import ScanInfo

        left.append(ScanInfo)  # an argument of a Scan that has options of its own
    while left:
        kind = left.pop()
        found.append(kind)
        left += kind.__subclasses__()
    named = {each: each.__module__.split(".") for each in found}
    known = {each for each, names in named.items() if names[0] in ("theano", "pytensor", "pymc")}
    return {each for each in known if "gpuarray" not in named[each]}  # not in serial graphs


def test_rules_know_all_options():
    classes = classes_with_a_rule()
    unknown = {each: division.unknown_options(each) for each in classes}
    unknown = {each.__name__: names for each, names in unknown.items() if names}
    assert len(classes) > 50 and not unknown, f"No rule knows these options: {unknown}"


def test_operations_with_another_option_take_no_rows(ranks, monkeypatch):
    x, w = T.dmatrix("x"), theano.shared(np.array([1.0, 2.0]), "w")
    monkeypatch.setitem(division.chosen_operations.OPTIONS, "CumOp", "mode")
    with compiling.quickly(), synk.parallel():
        f = theano.function([x], T.cumsum(x, axis=1), name="another option")
        g = theano.function([x], x.sum() + T.cumsum(w, axis=0))
    assert (type(f) is ParallelFunction, type(g) is ParallelFunction) == (False, True)
    [reason] = [
        each.reason for each in synk.parallel_report().functions if each.name == "another option"
    ]
    assert "CumOp with an option that has no rule, 'axis', of rows" in reason
    assert f([[1, 2], [3, 4]]).tolist() == [[1, 3], [3, 7]]
    assert g([[1, 2], [3, 4]]).tolist() == [11, 13]


@pytest.mark.skipif(host_library.ON_PYTENSOR, reason="Theano's operation without __props__")
def test_a_class_without_props_has_the_arguments_of_its_constructor():
    from theano.ifelse import IfElse

    assert division.options_of(IfElse) == {"n_outs", "as_view", "gpu", "name"}
    assert division.options_of(object) == set()
