"""Everything public says what it takes, returns and raises, and has an example that is a test."""

import importlib
import importlib.util
import inspect
import re

import pytest
from support.bad_input import CASES

import synkhronos as synk
from synkhronos.extensions import rules, train, updates
from synkhronos.functions import Function
from synkhronos.inputs import Data

MODULES = {"synk": synk, "synk.ops": synk.ops, "rules": rules, "updates": updates, "train": train}
if importlib.util.find_spec("keras") is not None:
    MODULES["keras"] = importlib.import_module("synkhronos.extensions.keras")
FUNCTIONS = {
    f"{name}.{each}": getattr(module, each)
    for name, module in MODULES.items()
    for each in module.__all__
    if inspect.isfunction(getattr(module, each))
}
METHODS = {
    f"{owner.__name__}.{name}": member.fget if isinstance(member, property) else member
    for owner in (Function, Data)
    for name, member in vars(owner).items()
    if not name.startswith("_") or name == "__call__"
}
REFUSING = {case.use.name for case in CASES}


def everything():
    return [pytest.param(called, id=name) for name, called in {**FUNCTIONS, **METHODS}.items()]


@pytest.mark.parametrize("called", everything())
def test_all_arguments_and_results_have_hints(called):
    signature = inspect.signature(called)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    assert not [p.name for p in parameters if p.annotation is p.empty]
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example(name):
    assert ">>> " in FUNCTIONS[name].__doc__


@pytest.mark.parametrize("owner", [Function, Data])
def test_a_class_has_an_example_of_every_method(owner):
    for name in METHODS:
        kind, _, method = name.partition(".")
        if kind == owner.__name__ and method not in ("__call__", "data"):
            assert re.search(rf">>> .*\.{method}\b", owner.__doc__), method


@pytest.mark.parametrize("name", [name for name in {**FUNCTIONS, **METHODS} if name in REFUSING])
def test_what_refuses_arguments_says_so(name):
    assert "Raises\n" in {**FUNCTIONS, **METHODS}[name].__doc__
