"""Any function, called in any way, on any number of ranks, gives what serial Theano gives.

Each example is a graph and a few calls of it. What every rank should find is worked out here from
serial Theano's results for the rows of each slice, by the rules of the documentation; where the
mode of an output is the natural one (a sum summed, a mean averaged, ...) also from its result for
all rows at once.

``SYNKHRONOS_FUZZ=1000`` looks for new failures in so many random examples for each rank count.
Failures that were found are the explicit examples below.
"""

import os
from typing import NamedTuple, Tuple

import numpy as np
import pytest
import theano
import theano.tensor as T
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.expected import batches, plain, reduced, selected
from support.helpers import MODE, function, say, shares
from support.layouts import Layout, forked

import synkhronos as synk
from synkhronos import WorkerError

FUZZ = int(os.environ.get("SYNKHRONOS_FUZZ", 0))
SETTINGS = settings(
    max_examples=FUZZ or 120,
    derandomize=not FUZZ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
FEW = 20  # examples in the quick tier
COLUMNS = 2


class Call(NamedTuple):
    """One call: the arguments of the function, but for the values, which are random numbers."""

    rows: int
    batch: object = None
    num_slices: int = 1
    output_subset: object = None
    given_as: str = "array"  # or "data", "minibatch", "list"


class Case(NamedTuple):
    """A graph, and calls of the function that it makes."""

    dtype: str
    ndim: int
    chain: Tuple[str, ...]  # elementwise, from x to y
    outputs: Tuple[Tuple[str, object], ...]  # what of y, and the mode
    updates: Tuple[Tuple[str, object], ...]  # of s and then t
    calls: Tuple[Call, ...]


# Graphs.


CHAIN = {
    "negate": lambda y, w: -y,
    "double": lambda y, w: y * 2,
    "increment": lambda y, w: y + 1,
    "square": lambda y, w: y * y,
    "clip": lambda y, w: T.minimum(y, 1),
    "weigh": lambda y, w: y * w,
    "tanh": lambda y, w: T.tanh(y) if "float" in y.dtype else y,
}
OUTPUTS = {
    "rows": lambda y, s, t: y,
    "reversed": lambda y, s, t: y[::-1],
    "every other": lambda y, s, t: y[::2],
    "sum": lambda y, s, t: y.sum(0),
    "total": lambda y, s, t: y.sum(),
    "mean": lambda y, s, t: y.mean(0),
    "max": lambda y, s, t: y.max(0),
    "min": lambda y, s, t: y.min(0),
    "first": lambda y, s, t: y[0],
    "count": lambda y, s, t: y.shape[0],
    "shape": lambda y, s, t: y.shape[:1],
    "state": lambda y, s, t: s + 0 * y.sum(0),
}
NATURAL = {
    ("rows", "gather"),
    ("sum", "sum"),
    ("total", "sum"),
    ("mean", "avg"),
    ("max", "max"),
    ("min", "min"),
    ("count", "sum"),
}
UPDATES = {
    "sum": lambda y, own, other: y.sum(0),
    "max": lambda y, own, other: y.max(0),
    "last": lambda y, own, other: y[-1],
    "add": lambda y, own, other: own + y.sum(0),
    "cross": lambda y, own, other: other - y.sum(0),
    "swap": lambda y, own, other: other + 0 * y.sum(0),
}
MODES = ["avg", "sum", "prod", "min", "max", "gather", None, "c_sum", "c_gather"]


def modes_of(output):
    """Return the modes that make sense where shares, and so shapes, may be uneven."""
    return ["gather", "c_gather", None] if output in ("rows", "reversed", "every other") else MODES


@st.composite
def calls(draw, n_outputs):
    rows = draw(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12]))
    subset = st.none() | st.lists(st.integers(0, n_outputs - 1), max_size=3)
    return Call(
        rows,
        draw(batches(rows)),
        draw(st.sampled_from([1, 1, 2, 2, 3, 4, 30])),
        draw(subset) if n_outputs else None,
        draw(st.sampled_from(["array", "data", "minibatch", "list"])),
    )


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(["float32", "float64", "int32"]))
    ndim = draw(st.sampled_from([1, 2]))
    chain = tuple(draw(st.lists(st.sampled_from(sorted(CHAIN)), max_size=2)))
    names = draw(st.lists(st.sampled_from(sorted(OUTPUTS)), max_size=4))
    outputs = tuple((name, draw(st.sampled_from(modes_of(name)))) for name in names)
    update_modes = [mode for mode in MODES if ndim == 2 or mode not in ("gather", "c_gather")]
    update = st.tuples(st.sampled_from(sorted(UPDATES)), st.sampled_from(update_modes))
    updates = tuple(draw(st.lists(update, max_size=2)))
    if any("gather" in str(mode) for _, mode in updates):
        # The variable changes its length, so nothing may depend on it.
        updates = tuple((n if n in ("sum", "max", "last") else "sum", m) for n, m in updates)
        outputs = tuple((n if n != "state" else "sum", m) for n, m in outputs)
    some = draw(st.lists(calls(len(outputs)), min_size=1, max_size=4))
    if draw(st.booleans()):  # a call like the last one, but for what it asks for
        some.append(some[-1]._replace(output_subset=draw(calls(len(outputs))).output_subset))
    return Case(dtype, ndim, chain, outputs, updates, tuple(some))


# What should come out.


class Model:
    """The documented rules, on top of a serial function ``(x, w, s, t) -> outputs + updates``."""

    def __init__(self, case, serial, ranks):
        self.case, self.serial, self.n, self.master = case, serial, ranks.n, ranks.master
        zero = np.zeros((COLUMNS,) * (case.ndim - 1), case.dtype)
        self.states = [(zero, zero)] * ranks.n

    def call(self, x, w, num_slices):
        """Return the outputs; raise what serial Theano raises."""
        case, count = self.case, len(self.case.outputs)
        modes = [mode for _, mode in case.outputs]
        parts, states, weights = {}, list(self.states), {}
        for rank, share in enumerate(shares(x, self.n)):
            if len(share) == 0 and not (len(x) == 0 and rank == self.master):
                continue
            slices = [part for part in shares(share, num_slices) if len(part)] or [share]
            found = [self.serial(part, w, *self.states[rank]) for part in slices]
            counts = [max(len(part), 1) for part in slices]
            columns = list(zip(*found)) if found[0] else []
            whole = num_slices == 1 or len(share) == 0  # nothing to accumulate
            parts[rank] = [
                values[0] if whole else reduced(mode, values, counts)
                for mode, values in zip(modes, columns)
            ]
            states[rank] = (
                tuple(
                    np.asarray(values[0] if whole else reduced(mode, values, counts), case.dtype)
                    for (_, mode), values in zip(case.updates, columns[count:])
                )
                + self.states[rank][len(case.updates) :]
            )
            weights[rank] = max(len(share), 1)
        self.states = states
        source = self.master if self.master in parts else min(parts)
        return [
            parts[source][i]
            if mode is None
            else reduced(mode, [part[i] for part in parts.values()], list(weights.values()))
            for i, mode in enumerate(modes)
        ]


# How the functions and variables that all examples share are made.


class Variables:
    """Two shared variables of each dtype and number of axes, and how to set and read them."""

    def __init__(self):
        self._made = {}

    def __call__(self, dtype, ndim):
        if (dtype, ndim) not in self._made:
            zero = np.zeros((COLUMNS,) * ndim, dtype)
            s, t = theano.shared(zero, "s"), theano.shared(zero.copy(), "t")
            new = s.type()
            read = [(v, "gather") for v in (s, t)]
            read += [(v.shape[:1] if ndim else T.ones(1, "int64"), "gather") for v in (s, t)]
            self._made[dtype, ndim] = (
                s,
                t,
                function([], bcast_inputs=[new], updates=[(s, new), (t, new)]),
                function([], read),
            )
        return self._made[dtype, ndim]


LAYOUTS = [Layout(2), Layout(3, master=1)]


@pytest.fixture(scope="module")
def ranks(request, layout):
    with forked(layout) as ranks:
        ranks.variables, ranks.cases = Variables(), 0
        yield ranks
        say(request, f"{ranks.cases} calls compared on {ranks.n} ranks")
        del ranks.variables


def assert_equal(found, expected, dtype, is_exact, what):
    found = np.asarray(found)
    assert found.dtype == dtype, what
    assert found.shape == np.shape(expected), what
    if is_exact:
        np.testing.assert_array_equal(found, expected, err_msg=what)
        return
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    scale = np.nanmax(np.abs(expected)) if np.size(expected) and np.any(expected == expected) else 1
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=tolerance * max(scale, 20), err_msg=what
    )


def check(ranks, case):
    x, w = T.TensorType(case.dtype, (False,) * case.ndim)("x"), T.scalar("w", case.dtype)
    s, t, put, read = ranks.variables(case.dtype, case.ndim - 1)
    put(np.zeros((COLUMNS,) * (case.ndim - 1), case.dtype))
    y = x
    for name in case.chain:
        y = CHAIN[name](y, w)
    outputs = [OUTPUTS[name](y, s, t) for name, _ in case.outputs]
    updates = [
        (own, T.cast(UPDATES[name](y, own, other), case.dtype), mode)
        for own, other, (name, mode) in zip((s, t), (t, s), case.updates)
    ]
    f = function(
        [x],
        [(output, mode) for output, (_, mode) in zip(outputs, case.outputs)],
        bcast_inputs=[w],
        updates=updates,
        on_unused_input="ignore",
    )
    first, second = s.type(), t.type()
    serial = theano.function(
        [x, w, first, second],
        outputs + [value for _, value, _ in updates],
        givens={s: first, t: second},
        on_unused_input="ignore",
        mode=MODE,
    )
    model = Model(case, serial, ranks)
    for number, call in enumerate(case.calls):
        ranks.cases += 1
        check_call(ranks, case, call, f, serial, model, number)
        check_states(case, read, model, f"after {call}")


def check_call(ranks, case, call, f, serial, model, number):
    random = np.random.RandomState(100 * number + call.rows)
    value = random.randint(-3, 4, (call.rows, COLUMNS)[: case.ndim]).astype(case.dtype)
    w = np.array(random.randint(1, 4), case.dtype)
    rows = selected(value, call.batch)
    keywords = {
        "batch": call.batch,
        "num_slices": call.num_slices,
        "output_subset": call.output_subset,
    }
    if call.num_slices > 1 and case.dtype == "int32" and any(m == "avg" for _, m in case.updates):
        with pytest.raises(ValueError, match="would be averaged over the slices"):
            f(value, w, **keywords)
        return
    argument = value
    if call.given_as == "data":
        argument = synk.data(value)
    elif call.given_as == "minibatch":
        argument = synk.data(value, minibatch=True)
        if len(rows) > len(value):
            with pytest.raises(ValueError, match="minibatch of"):
                f(argument, w, **keywords)
            return
        rows = value[: len(rows)]  # in order, whatever was selected
    elif call.given_as == "list" and value.size:
        argument = value.tolist()
    states = model.states
    needed = range(len(case.outputs))
    if call.output_subset is not None:
        needed = sorted(set(call.output_subset))
    try:
        with np.errstate(all="ignore"):
            expected = model.call(rows, w, call.num_slices)
    except (ValueError, IndexError):
        # The maximum of no rows, for one. What is not asked for may or may not be computed.
        assert len(rows) == 0
        model.states = states
        if len(needed) == len(case.outputs):
            with pytest.raises(WorkerError):
                f(argument, w, **keywords)
        return
    found = f(argument, w, **keywords)
    assert len(found) == len(needed)
    is_exact = "tanh" not in case.chain
    for result, position in zip(found, needed):
        name, mode = case.outputs[position]
        what = f"output {position}, {name!r} by {mode!r}, of {case}, {call}"
        dtype = np.dtype(serial.maker.outputs[position].variable.dtype)
        if plain(mode) == "avg" and dtype.kind != "f":
            dtype = np.dtype(theano.config.floatX)
        exactly = is_exact and name != "mean" and plain(mode) not in ("avg", "prod")
        assert_equal(result, expected[position], dtype, exactly, what)
        if (name, plain(mode)) in NATURAL:
            whole = serial(rows, w, *states[ranks.master])[position]
            assert_equal(result, whole, dtype, exactly, f"whole {what}")


def check_states(case, read, model, what):
    *values, first, second = read()
    for number, (value, lengths) in enumerate(zip(values, (first, second))):
        if case.ndim == 2:
            value = np.split(value, np.cumsum(lengths)[:-1])
        is_exact = "tanh" not in case.chain and all(
            m not in ("avg", "prod") for _, m in case.updates
        )
        for rank, (found, states) in enumerate(zip(value, model.states)):
            assert_equal(
                found,
                states[number],
                np.dtype(case.dtype),
                is_exact,
                f"variable {number} on rank {rank} of {case} {what}",
            )


@pytest.mark.layouts(LAYOUTS[0])
@settings(SETTINGS, max_examples=FEW)
@given(cases())
def test_a_few_are_equal_to_serial_theano(ranks, case):
    check(ranks, case)


@pytest.mark.slow("compiles a function for serial Theano and one for ranks 120 times")
@SETTINGS
@given(cases())
@example(Case("float32", 1, (), (("first", "sum"),), (), (Call(1, None, 2),)))
@example(Case("float64", 2, (), (("sum", None),), (("sum", "gather"),), (Call(5, [4, 0], 2),)))
@example(Case("float64", 1, (), (("rows", "gather"),), (), (Call(4, slice(3, 0, -1), 2),)))
@example(Case("float64", 1, (), (("rows", "gather"),), (), (Call(4, slice(0, 3, -1), 2),)))
@example(Case("float64", 1, (), (("sum", "sum"),) * 2, (), (Call(4, None, 1, [1]), Call(4))))
@example(Case("float64", 1, (), (("count", "gather"),), (), (Call(3, None, 2),)))
@example(Case("int32", 1, (), (("count", "avg"),), (("sum", "sum"),), (Call(0), Call(1))))
def test_equal_to_serial_theano(ranks, case):
    check(ranks, case)
