"""Importing the package lists its names, and does nothing else."""

import importlib
from pathlib import Path

import pytest
from support.running import python

import synkhronos as synk


def test_the_names_are_listed_and_there():
    for name in synk.__all__:
        assert getattr(synk, name).__name__.rpartition(".")[2] == name
        assert getattr(synk, name).__doc__
        assert name in dir(synk)
    assert not {"Any", "List", "TYPE_CHECKING", "importlib"} & {*dir(synk)}
    for module, names in synk._PUBLIC.items():
        for name in names:
            own = getattr(importlib.import_module(f"synkhronos.{module}"), name)
            assert getattr(synk, name) is own
    with pytest.raises(AttributeError, match=r"synkhronos.*no_such_name"):
        synk.no_such_name  # noqa: B018
    assert synk.__version__.count(".") == 2
    space = {}
    exec("from synkhronos import *", space)
    assert sorted({*space} - {"__builtins__"}) == synk.__all__


USE = f"""
import synkhronos as synk
reveal_type(synk.fork(2))
reveal_type(synk.ops)
with synk.profile() as recorded:
    reveal_type(recorded)
synk.fork("two")
synk.no_such_name
{", ".join(f"synk.{name}" for name in synk.__all__)}
"""


@pytest.mark.slow("runs mypy over the package")
def test_mypy_finds_names_and_mistakes(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    sources = str(Path(synk.__file__).parents[1])
    done = python("-m", "mypy", *options, "use.py", cwd=tmp_path, MYPYPATH=sources)
    lines = done.stdout.splitlines()
    for line, said in [
        (3, 'Revealed type is "int"'),
        (4, 'Revealed type is "types.ModuleType"'),
        (6, 'Revealed type is "synkhronos.profiling.Profile"'),
        (7, 'Argument 1 to "fork" has incompatible type "str"'),
        (8, 'Module has no attribute "no_such_name"'),
    ]:
        assert [each for each in lines if each.startswith(f"use.py:{line}:") and said in each]
    assert "Found 2 errors" in lines[-1]


@pytest.mark.slow("starts an interpreter")
def test_the_modules_of_2017_hold_what_they_held(script):
    done = script("""
import synkhronos as synk
assert not hasattr(synk, "function_module") and not hasattr(synk, "data_module")
from synkhronos.function_module import Function
from synkhronos.data_module import Data
synk.fork(1)
print(isinstance(synk.data([1.0]), Data), isinstance(synk.function([], []), Function))
synk.close()
""")
    assert done.stdout.split() == ["True", "True"]


def test_errors_are_of_the_kinds_that_a_caller_expects():
    for error in (synk.SessionError, synk.WorkerError, synk.WorkerDied):
        assert issubclass(error, RuntimeError)
    assert issubclass(synk.SharedMemoryFull, MemoryError)
    assert not issubclass(synk.WorkerDied, synk.WorkerError)


LOOK = """
import os, sys, threading
fds = len(os.listdir("/proc/self/fd"))
import synkhronos
import psutil
print(len(psutil.Process().children()), threading.active_count(), "theano" in sys.modules,
      "pygpu" in sys.modules, len(os.listdir("/proc/self/fd")) - fds,
      [n for n in os.listdir("/dev/shm") if str(os.getpid()) in n], file=sys.stderr)
"""


def test_a_plain_import_starts_nothing_opens_nothing_and_prints_nothing(script):
    done = script(LOOK, options=["-W", "error"])
    assert done.stdout == ""
    assert done.stderr.strip() == "0 1 False False 0 []"


@pytest.mark.parametrize(
    "first", ["synkhronos", pytest.param("theano", marks=pytest.mark.thorough)]
)
def test_either_order_of_import(script, first):
    second = {"synkhronos": "theano", "theano": "synkhronos"}[first]
    done = script(f"""
import {first}
import {second}
import theano.tensor as T, synkhronos as synk, theano.gpuarray
print(synk.fork(2))
x = T.dvector()
print(synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")([1, 2]))
synk.close()
""")
    assert done.stdout.split() == ["2", "3.0"]
    assert done.stderr == ""
