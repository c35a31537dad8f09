"""Programs for serial Theano in tests/ported, and the lines with which they run on all ranks.

A ported program is its serial one with a few lines changed, run by ``synkhronos run``: in a session
of so many ranks, where values that the script sets are broadcast.
"""

import contextlib
import difflib
import types
from pathlib import Path

import numpy as np

import synkhronos as synk

FOLDER = Path(__file__).parents[1] / "ported"

_IMPORT = "from theano import function", "from synkhronos import function, ops"
# For each program what changes: text of one line, and the text in its place.
CHANGES = {
    "logistic": [
        ("from theano import function", "from synkhronos import function, ops, rows"),
        ("[T.grad(cost, param) for", "[ops.all_reduce(T.grad(cost, param)) for"),
        ("slice(index * size, (index + 1) * size)", "rows(index, size)"),
    ],
    "lenet": [
        _IMPORT,
        ("x.reshape((size, 1, side, side))", "x.reshape((-1, 1, side, side))"),
        ("= T.grad(cost, params)", "= [ops.all_reduce(g) for g in T.grad(cost, params)]"),
    ],
    "lstm": [
        _IMPORT,
        ("(param, param - 0.5 * g)", "(param, param - 0.5 * ops.all_reduce(g))"),
        ("cost, updates=updates)", "cost, updates=updates, axes={x: 1, mask: 1})"),
    ],
    "rbm": [
        _IMPORT,
        ("(param, param - 0.1 * g)", "(param, param - 0.1 * ops.all_reduce(g))"),
        ("(chain, end)])", "(chain, end)], serial_random=True)"),
    ],
    "da": [
        _IMPORT,
        ("(param, param - rate * g)", "(param, param - rate * ops.all_reduce(g))"),
        ("cost, updates=updates)", "cost, updates=updates, serial_random=True)"),
    ],
    "sda": [
        _IMPORT,
        ("(param, param - rate * g)", "(param, param - rate * ops.all_reduce(g))"),
        ("cost, updates=updates)", "cost, updates=updates, serial_random=True)"),
    ],
    "conjugate": [
        ("from theano import function", "from synkhronos import data, function"),
        ("random.normal(size=(rows, columns))", "data(random.normal(size=(rows, columns)))"),
        (
            'random.randint(classes, size=rows, dtype="int32")',
            'data(random.randint(classes, size=rows, dtype="int32"))',
        ),
    ],
    "lasagne": [
        _IMPORT,
        ("= T.grad(loss, params)", "= [ops.all_reduce(g) for g in T.grad(loss, params)]"),
        ("loss, updates=updates)", "loss, updates=updates, serial_random=True)"),
    ],
    "network": [
        _IMPORT,
        ("= T.grad(loss, params)", "= [ops.all_reduce(g) for g in T.grad(loss, params)]"),
        ("function([x], p)", 'function([x], (p, "gather"))'),
    ],
    "trainer": [],  # a library, which knows nothing of ranks: run with --parallel
}


def source(name, changed=False):
    """Return the text of a serial program, or of the ported one."""
    text = (FOLDER / f"serial_{name}.py").read_text()
    for old, new in CHANGES[name] if changed else ():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return text


def changed_lines(name):
    """Return the lines of a ported program that its serial one does not have."""
    lines = difflib.ndiff(source(name).splitlines(), source(name, changed=True).splitlines())
    return [line[2:].strip() for line in lines if line.startswith("+ ")]


def run(name, changed=False, **sizes):
    """Run a program here; return its results by their names, each as an array."""
    program = types.ModuleType(name)
    program.__file__ = str(FOLDER / f"serial_{name}.py")
    exec(compile(source(name, changed), program.__file__, "exec"), program.__dict__)
    return {key: np.array(value, float) for key, value in program.main(**sizes).items()}


def run_on_ranks(name, ranks, check=False, changed=True, **sizes):
    """Run a ported program, or the serial one in a block of ``synk.parallel``."""
    with session(ranks, check, parallel=not (changed and CHANGES[name])):
        return run(name, changed, **sizes)


@contextlib.contextmanager
def session(ranks, check=False, parallel=False):
    """Fork as ``synkhronos run --follow`` does, or ``run --parallel``; close at the end."""
    synk.fork(ranks, follow=True, check=check)
    try:
        with synk.parallel(check=check) if parallel else contextlib.nullcontext():
            yield
    finally:
        synk.close()


def difference(found, expected):
    """Return the largest difference of results, relative to the largest value of each."""
    assert found.keys() == expected.keys()
    return max(
        np.abs(found[key] - value).max() / np.abs(value).max() for key, value in expected.items()
    )
