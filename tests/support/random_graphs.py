"""Random graphs of Theano, each made twice from its seed: one stays serial, one runs on ranks.

A graph grows by one operation at a time, on values that it has already. Each new value is computed
at once, in Python: a step that raises is dropped, except for one in twenty. The graph is called
with several numbers of rows, and wrong indices; in between the script changes shared variables.
"""

import warnings

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Constant
from theano.gof.graph import variables
from theano.ifelse import ifelse

import synkhronos as synk
from synkhronos.porting import ParallelFunction

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = FLOATS + INTEGERS
COLUMNS = 4
ROWS = [0, 1, 2, 3, 5, 6, 7, 12, 150]
KEPT_FAILURES = 0.05
TOLERANCES = {"float16": 2e-2, "float32": 1e-4}


class Graph:
    """A program: inputs, outputs, updates of shared variables, and values for the inputs."""

    def __init__(self, seed, is_compiled=False):
        self.rng = np.random.RandomState(seed)
        self.is_compiled = is_compiled
        rng = self.rng
        dtypes = [rng.choice(["float64", rng.choice(DTYPES)]) for _ in range(4)]
        self.x, self.y = T.TensorType(dtypes[0], (False,) * 2)("x"), _vector(dtypes[1], "y")
        self.index, self.a = T.lvector("index"), T.scalar("a", "int64")
        self.inputs = [self.x, self.y, self.index, self.a]
        self.shared = [
            theano.shared(self.array((COLUMNS, COLUMNS), "float64"), "w"),
            theano.shared(self.array((COLUMNS,), dtypes[2]), "row"),
            theano.shared(np.asarray(0, rng.choice(DTYPES)), "total"),
        ]
        self.lent = self.array((9,), dtypes[3])
        self.shared.append(theano.shared(self.lent, "table", borrow=True))
        self._values = {}
        for each, value in zip(self.inputs, self.arguments(6, rng)):
            self._values[each] = value
        self.pool = [*self.inputs[:3], *self.shared, self.x.shape[0]]
        self.failing = []  # values that can't be computed for the first arguments
        n_steps = rng.randint(2, 9)
        while n_steps:
            n_steps -= self.grow()
        self.outputs = self.pool[len(self.inputs) + 4 :][-4:] + self.failing[:1]
        self.updates = self._updates()

    def array(self, shape, dtype, rng=None):
        """Return numbers whose sums are exact in any order, and mostly fit into the dtype."""
        rng = rng or self.rng
        if np.dtype(dtype).kind == "f":
            large = 20000 if dtype == "float16" and rng.rand() < 0.2 else 1
            return (rng.randint(-8, 9, shape) * large / 4).astype(dtype)
        numbers = rng.randint(-8, 9, shape)
        if np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize < 4 and rng.rand() < 0.2:
            numbers = numbers << (8 * np.dtype(dtype).itemsize - 6)  # their sums wrap around
        return numbers.astype(dtype)

    def arguments(self, n_rows, rng, is_wrong=False):
        """Return values for the inputs; a wrong one has an index that is out of bounds."""
        values = [
            self.array((n_rows, COLUMNS), self.x.dtype, rng),
            self.array((n_rows,), self.y.dtype, rng),
            rng.randint(0, COLUMNS, n_rows),
            np.asarray(rng.randint(0, 4)),
        ]
        if is_wrong and n_rows:
            values[2][rng.randint(n_rows)] = 99
        return values

    def _updates(self):
        rng, updates = self.rng, []
        for variable in self.shared[:-1]:
            if rng.rand() < 0.4:
                continue
            fitting = [e for e in self.pool if e.ndim == variable.ndim and e is not variable]
            fitting = [e for e in fitting if self._shape(e) == self._shape(variable)]
            new = fitting[rng.randint(len(fitting))] if fitting else variable + 1
            if rng.rand() < 0.3:
                new = variable + 1
            if variable.dtype == "float64" and rng.rand() < 0.5:
                new = self._gradient(variable) or new
            new = T.patternbroadcast(T.cast(new, variable.dtype), variable.broadcastable)
            updates.append((variable, new))
        return updates

    def _gradient(self, variable):
        costs = [e for e in self.pool if e.dtype in FLOATS[1:] and e is not variable]
        if not costs:
            return None
        cost = costs[self.rng.randint(len(costs))]
        cost = cost.sum() if self.rng.rand() < 0.5 else cost.mean()
        try:
            gradient = T.grad(cost, variable, disconnected_inputs="ignore")
        except Exception:  # an operation has none
            return None
        return variable - 0.25 * gradient

    def _shape(self, variable):
        return np.shape(self.value(variable))

    def value(self, variable):
        """Return the value of a variable for the first arguments, computed in Python."""
        for node in theano.gof.graph.io_toposort([], [variable]):
            if all(each in self._values for each in node.outputs):
                continue
            storage = {each: [self._leaf(each)] for each in node.inputs}
            storage.update({each: [None] for each in node.outputs})
            computed = {each: [each in node.inputs] for each in storage}
            node.op.make_thunk(node, storage, computed, [], impl="py")()
            for each in node.outputs:
                self._values[each] = storage[each][0]
        return self._leaf(variable)

    def _leaf(self, variable):
        if isinstance(variable, Constant):
            return variable.data
        if isinstance(variable, SharedVariable):
            return variable.get_value(borrow=True)
        return self._values[variable]

    def pick(self, ndim=None, dtypes=DTYPES):
        """Return a value of the graph, mostly a late one."""
        fitting = [e for e in self.pool if ndim in (None, e.ndim) and e.dtype in dtypes]
        if not fitting:
            raise ValueError("there is none")
        late = fitting[-3:] if self.rng.rand() < 0.6 else fitting
        return late[self.rng.randint(len(late))]

    def grow(self):
        """Add a value, if the step that is drawn can be made; return whether it was."""
        rng = self.rng
        step = STEPS[rng.randint(len(STEPS))]
        if self.is_compiled and step in ONLY_IN_PYTHON:
            return False
        keeps_failure = rng.rand() < KEPT_FAILURES
        try:
            made = step(self, rng)
        except Exception:  # Theano refuses the operands
            return False
        made = made if isinstance(made, (list, tuple)) else [made]
        made = [T.as_tensor_variable(each) for each in made]
        if any(each.ndim > 4 or each.dtype.startswith("complex") for each in made):
            return False
        try:
            sizes = [np.size(self.value(each)) for each in made]
        except Exception:  # what serial Theano would raise
            if keeps_failure:
                self.failing += made
            return keeps_failure
        if max(sizes) > 1000:
            return False
        self.pool += made
        return True

    def change(self, rng):
        """Change a shared variable as scripts do: a value, a borrowed array, a cell."""
        variable = self.shared[rng.randint(4)]
        new = self.array(variable.get_value(borrow=True).shape, variable.dtype, rng)
        how = rng.randint(4)
        if how == 0:
            variable.set_value(new)
        elif how == 1:
            variable.get_value(borrow=True)[...] = new
        elif how == 2 and variable is not self.shared[-1]:
            variable.container.storage[0] = np.asarray(new)
        else:
            self.lent[:] = self.array(self.lent.shape, self.lent.dtype, rng)

    def compile(self):
        """Return a function of the graph."""
        return theano.function(
            self.inputs, self.outputs, updates=self.updates, on_unused_input="ignore"
        )

    def updated(self, name, values, shared_values):
        """Return the value that an update alone gives a shared variable."""
        [new] = [new for variable, new in self.updates if variable.name == name]
        return self._alone(new, values, shared_values)

    def errors(self, values, shared_values):
        """Return the classes of what outputs and updates raise, each computed alone."""
        classes = {ZeroDivisionError}  # of float % 0.0, if it is fused with others in Python
        for each in [*self.outputs, *(new for _, new in self.updates)]:
            try:
                self._alone(each, values, shared_values)
            except Exception as error:
                classes.add(type(error))
        return classes

    def _alone(self, output, values, shared_values):
        givens = dict(zip(self.shared, shared_values))
        return theano.function(self.inputs, output, givens=givens, on_unused_input="ignore")(
            *values
        )

    @property
    def tolerance(self):
        """How much floats may differ: ranks add up in another order than one process does."""
        everything = variables(self.inputs, [*self.outputs, *(new for _, new in self.updates)])
        dtypes = {getattr(each, "dtype", "") for each in everything}
        return next((t for dtype, t in TOLERANCES.items() if dtype in dtypes), 1e-8)


def compare(seed, is_compiled=False):
    """Compare a graph on all ranks with serial Theano; return "serial", "divided" or "raises"."""
    ours, theirs = Graph(seed, is_compiled), Graph(seed, is_compiled)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        serial = theirs.compile()
        with synk.parallel(check=False):
            f = ours.compile()
        if type(f) is not ParallelFunction:
            return "serial"
        outcomes = {_call(seed, number, ours, theirs, f, serial) for number in range(5)}
    return "raises" if "raises" in outcomes else "divided"


def _call(seed, number, ours, theirs, f, serial):
    rng = np.random.RandomState(1000 * seed + number)
    n_rows = int(rng.choice(ROWS)) if number else 6
    if number and rng.rand() < 0.4:
        change = rng.randint(1 << 30)
        for each in (ours, theirs):
            each.change(np.random.RandomState(change))
    values = ours.arguments(n_rows, rng, is_wrong=rng.rand() < 0.15)
    where = f"graph {seed}, call {number}, {n_rows} rows"
    before, own = [[each.get_value() for each in graph.shared] for graph in (theirs, ours)]
    try:
        expected = serial(*[value.copy() for value in values])
    except Exception as error:
        with pytest.raises(Exception) as caught:
            f(*values)
        raised, kind = caught.value, type(error).__name__
        # Where graphs can raise several, the first rank that raises need not have the first one.
        if type(raised) is not type(error) and kind not in str(raised.__cause__):
            assert type(raised) in theirs.errors(values, before), (where, raised)
        outcome = "raises"
    else:
        for position, (found, wanted) in enumerate(zip(f(*values), expected)):
            _assert_close(found, wanted, ours.tolerance, f"{where}, output {position}")
        outcome = "divided"
    for variable, other, old, own_old in zip(ours.shared, theirs.shared, before, own):
        what = f"{where}, {variable}, {outcome}"
        value = variable.get_value()
        # Theano may have updated in place before it raised, here or there, or both half of it.
        if outcome == "raises" and not _are_close(value, other.get_value(), ours.tolerance):
            is_old = value.tobytes() == own_old.tobytes()
            other.set_value(old if is_old else theirs.updated(variable.name, values, before))
            # It may also have computed something else in the memory of what it would update.
            if not _are_close(value, other.get_value(), ours.tolerance) and _is_reused(f, variable):
                other.set_value(value)
        _assert_close(value, other.get_value(), ours.tolerance, what)
        for each in synk.gather(variable, nd_up=1) if rng.rand() < 0.5 else ():
            np.testing.assert_array_equal(each, value, what)
    return outcome


def _is_reused(f, variable):
    """Return whether a function for ranks computes in the memory of a shared variable."""
    maker = f._on_ranks.maker
    [memory] = [
        each for each, given in zip(maker.fgraph.inputs, maker.inputs) if given.variable is variable
    ]
    return maker.fgraph.has_destroyers([memory])


def _are_close(*args):
    try:
        _assert_close(*args, "")
    except AssertionError:
        return False
    return True


def _assert_close(found, expected, tolerance, what):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if found.dtype.kind == "f":
        found, expected = found.astype("float64"), expected.astype("float64")
        np.testing.assert_allclose(found, expected, tolerance, tolerance, err_msg=what)
    else:
        if expected.dtype in (np.int32, np.int64):
            # What C leaves undefined, and processors of this kind have for a float out of range.
            found = np.where(expected == np.iinfo(expected.dtype).min, expected, found)
        np.testing.assert_array_equal(found, expected, what)


def _vector(dtype, name):
    return T.TensorType(dtype, (False,))(name)


def _dtype(rng):
    return str(rng.choice(DTYPES))


def _axis(variable, rng):
    """Return an axis of a variable, several, or None for all."""
    if variable.ndim == 0 or rng.rand() < 0.3:
        return None
    return int(rng.randint(variable.ndim))


def unary(g, rng):
    a = g.pick()
    return [lambda: -a, lambda: abs(a), lambda: T.sqr(a), lambda: T.tanh(a), lambda: T.exp(a / 8),
            lambda: T.sgn(a), lambda: a * 2, lambda: a / 4, lambda: 3 - a, lambda: T.floor(a),
            lambda: T.isnan(a), lambda: a + 1, lambda: T.zeros_like(a), lambda: T.ones_like(a),
            lambda: T.invert(a)][rng.randint(15)]()  # fmt: skip


def binary(g, rng):
    a, b = g.pick(), g.pick()
    return [T.add, T.sub, T.mul, T.true_div, T.maximum, T.minimum, T.lt, T.eq, T.and_, T.fill][
        rng.randint(10)
    ](a, b)


def division(g, rng):
    divide, by = [T.int_div, T.mod, T.true_div][rng.randint(3)], g.pick()
    if divide is not T.true_div and by.dtype in FLOATS and by.owner is not None:
        raise ValueError("a mean that is rounded otherwise may have another quotient")
    return divide(g.pick(), by)


def cast(g, rng):
    return T.cast(g.pick(), _dtype(rng))


def switch(g, rng):
    return T.switch(g.pick() > 0, g.pick(), g.pick())


def add_up(g, rng):
    a = g.pick()
    kwargs = {"axis": _axis(a, rng), "keepdims": bool(rng.rand() < 0.2)}
    if rng.rand() < 0.4:
        kwargs["dtype"] = _dtype(rng)
    if rng.rand() < 0.2:
        kwargs["acc_dtype"] = _dtype(rng)
    return (T.sum if rng.rand() < 0.7 else T.prod)(a, **kwargs)


def mean(g, rng):
    a = g.pick()
    axis = _axis(a, rng)
    m = T.mean(a, axis=axis, keepdims=True)
    return [T.mean(a, axis=axis), m, a - m, m - T.mean(m), T.var(a, axis=axis)][rng.randint(5)]


def extreme(g, rng):
    a = g.pick()
    how = [T.max, T.min, T.argmax, T.any, T.all, T.argmin][rng.randint(6)]
    if a.ndim == 0 and how in (T.argmax, T.argmin):
        raise ValueError("Theano itself fails in Python")
    return how(a, axis=_axis(a, rng))


def bits(g, rng):
    op = [theano.scalar.or_, theano.scalar.and_, theano.scalar.xor][rng.randint(3)]
    a = g.pick(dtypes=INTEGERS)
    return T.elemwise.CAReduce(op, axis=_axis(a, rng))(a)


def length(g, rng):
    a = g.pick()
    n = a.shape[int(rng.randint(a.ndim))] if a.ndim else a.size
    return [n, n * 2, T.cast(n, _dtype(rng)), a.size, n - 1, n // 2, n * g.a, a.shape, n * n,
            T.prod(a.shape, dtype=_dtype(rng)), n * n / 2.0, T.cast(a.shape, _dtype(rng))][
                rng.randint(12)]  # fmt: skip


def of_length(g, rng):
    n = g.pick(0, [dtype for dtype in INTEGERS if dtype != "uint64"])
    return [lambda: T.arange(n, dtype=_dtype(rng)), lambda: T.arange(n), lambda: T.arange(1, n),
            lambda: T.zeros((n, 2), _dtype(rng)), lambda: T.alloc(g.pick(), n, COLUMNS),
            lambda: T.ones((n,)), lambda: T.arange(0, n, 2), lambda: T.alloc(g.pick(0), n),
            lambda: T.eye(n), lambda: T.alloc(g.pick(1), 2, n)][rng.randint(10)]()  # fmt: skip


def reshape(g, rng):
    a, n = g.pick(), g.x.shape[0]
    shapes = [(-1, 2), (-1, 4), (n, -1), (n * 2, -1), (2, n, -1), (1, n, -1), (-1,), (n, 2, 2),
              (6, -1), (6, 2, 2), (a.shape[0], -1), (-1, n), (3, -1), (a.size,), (4, n),
              (n // 2, -1), (a.shape[0] * 2, -1), (-1, 2, 2)]  # fmt: skip
    return a.reshape(shapes[rng.randint(len(shapes))])


def axes(g, rng):
    a = g.pick()
    order = list(rng.permutation(a.ndim))
    if rng.rand() < 0.4:
        order.insert(rng.randint(a.ndim + 1), "x")
    return a.dimshuffle([each if each == "x" else int(each) for each in order])


def basic_index(g, rng):
    a = g.pick()
    n = g.pick(0, INTEGERS) if rng.rand() < 0.3 else int(rng.randint(-2, 4))
    places = [
        n,
        slice(None, n),
        slice(n, None),
        slice(None, None, -1),
        slice(None),
        slice(None, None, 2),
    ]
    first = places[rng.randint(len(places))]
    if rng.rand() < 0.5 and a.ndim > 1:
        return a[:, first]
    return a[first]


def lookup(g, rng):
    a = g.pick()
    indices = g.pick(1, INTEGERS) if rng.rand() < 0.5 else g.index
    n = g.x.shape[0]
    return [
        lambda: a[indices], lambda: a[T.arange(n)], lambda: a[T.arange(n), g.index],
        lambda: a[:, indices], lambda: a[T.arange(a.shape[0])], lambda: a[indices, indices],
        lambda: a[T.arange(g.pick(0, INTEGERS))], lambda: a[T.arange(indices.shape[0]), indices],
        lambda: a[T.cast(T.arange(n), _dtype(rng))], lambda: a[g.y > 0],
        lambda: a[(a > 0).nonzero()],
        lambda: a[T.stack([indices, indices], axis=1)],
        lambda: a[T.arange(g.index.shape[0]), T.cast(abs(g.pick(1)) % 3, "int64")],
    ][rng.randint(13)]()  # fmt: skip


def change(g, rng):
    a, b = g.pick(), g.pick()
    how = [T.set_subtensor, T.inc_subtensor][rng.randint(2)]
    target = [lambda: a[:, 1], lambda: a[g.index], lambda: a[T.arange(g.x.shape[0]), g.index],
              lambda: a[:2], lambda: a[T.arange(a.shape[0])], lambda: a[:, g.index],
              lambda: T.zeros((COLUMNS,), b.dtype)[g.index], lambda: T.zeros_like(a)[:, :2],
              lambda: T.zeros((COLUMNS, COLUMNS), b.dtype)[g.index]][rng.randint(9)]()  # fmt: skip
    return how(target, b if rng.rand() < 0.7 else 1)


def join(g, rng):
    a = g.pick()
    b = g.pick(a.ndim)
    if rng.rand() < 0.3:
        return T.stack([a, b], axis=int(rng.randint(a.ndim + 1)))
    return T.concatenate([a, b], axis=int(rng.randint(a.ndim)))


def split(g, rng):
    a = g.pick()
    return T.split(a, [1, 3], 2, axis=int(rng.randint(a.ndim)))


def products(g, rng):
    a, b = g.pick(), g.pick()
    return [lambda: T.dot(a, b), lambda: T.dot(a.T, b), lambda: T.batched_dot(a, b),
            lambda: T.tensordot(a, b, [[0], [0]]), lambda: T.outer(a, b),
            lambda: T.dot(a, g.shared[0])][rng.randint(6)]()  # fmt: skip


def by_row(g, rng):
    a = g.pick(2, FLOATS)
    return [lambda: T.nnet.softmax(a), lambda: T.nnet.logsoftmax(a),
            lambda: T.nnet.categorical_crossentropy(T.nnet.softmax(a), g.index),
            lambda: T.sort(a, axis=int(rng.randint(2))),
            lambda: T.cumsum(a, axis=int(rng.randint(2))),
            lambda: T.nnet.categorical_crossentropy(T.nnet.softmax(a), T.cast(g.pick(1), "int64")),
            lambda: T.nnet.softmax(a + g.pick(1, FLOATS)),
            lambda: T.extra_ops.to_one_hot(g.index, COLUMNS)][rng.randint(8)]()  # fmt: skip


def repeated(g, rng):
    a, b = g.pick(), g.pick()
    rows = g.pick(2, FLOATS)
    return [lambda: T.tile(a, (1, 2)), lambda: T.repeat(a, 2, axis=int(rng.randint(a.ndim))),
            lambda: T.tile(a, 2), lambda: ifelse(T.gt(g.a, 1), a, b), lambda: T.roll(a, 1),
            lambda: ifelse(T.gt(T.sum(a), 0), b, -b), lambda: T.diag(a), lambda: T.tril(a),
            lambda: theano.scan(lambda h: h / 2, outputs_info=rows, n_steps=2)[0][-1],
            lambda: theano.scan(lambda row: row.sum(), rows)[0]][rng.randint(10)]()  # fmt: skip


def sequences(g, rng):
    """Return an array whose second axis has the rows, with the time along the first."""
    x = g.x if rng.rand() < 0.5 else g.pick(2, FLOATS[1:])
    x = T.cast(x, "float64")
    return [lambda: T.stack([x, x * 2, x - 1]), lambda: x.dimshuffle(1, 0, "x"),
            lambda: x.reshape((-1, 2, 2)).dimshuffle(1, 0, 2), lambda: x.T,
            lambda: x.reshape((x.shape[0], 2, -1)).dimshuffle(1, 0, 2),
            lambda: T.stack([x, x, x])[::-1]][rng.randint(6)]()  # fmt: skip


def merged(g, rng):
    a = sequences(g, rng) if rng.rand() < 0.6 else g.pick()
    n = g.x.shape[0]
    shapes = [(-1,), (-1, a.shape[-1]), (a.shape[0] * a.shape[1], -1), (a.shape[0], -1), (2, n, 2),
              (3, n, -1), (3, -1, 4), (n, -1), (a.shape[1], -1), (-1, n), (n * 3, 4), (-1, 4),
              (a.shape[0], a.shape[1], -1), (T.prod(a.shape) // 4, 4), (4, -1), (4, n),
              (T.prod(a.shape[:2]), a.shape[2] if a.ndim > 2 else 1)]  # fmt: skip
    a = a.reshape(shapes[rng.randint(len(shapes))])
    if rng.rand() < 0.4:
        a = a.reshape(shapes[rng.randint(len(shapes))])
    return a


def projected(g, rng):
    a = sequences(g, rng)
    return T.dot(a, g.shared[0]) if rng.rand() < 0.7 else T.tensordot(a, g.shared[0], [[-1], [0]])


def scanned(g, rng):
    """Return outputs of a scan: states with rows, or without, sums over rows, and masks."""
    xs = sequences(g, rng)
    inner = xs.ndim - 1
    xs = xs if inner == 2 else xs.dimshuffle(0, 1, "x") + T.zeros((COLUMNS,))
    w, n = g.shared[0], xs.shape[1]
    other = g.pick(1, FLOATS[1:]) if rng.rand() < 0.3 else g.shared[1]
    mask = T.gt(xs.sum(axis=2), 0) if rng.rand() < 0.5 else T.ones((xs.shape[0], n))
    wide = (lambda x: x) if rng.rand() < 0.5 else (lambda x: T.cast(x, "float32"))
    kind, shape = rng.randint(8), rng.randint(24)

    def step(x, m, h, total, same):
        new = T.tanh(wide(x).dot(w[: 2 if kind == 0 else COLUMNS]) / 8 + h / 2)
        new = bent(new, n, shape)
        new = T.switch(m.dimshuffle(0, "x"), new, h) if kind % 2 else new * m[:, None]
        if kind == 2:
            new = new - new.mean(axis=0)
        if kind == 3:
            new = new + other
        new_total = [total + new.sum(), total / 2 + new.sum(), total + same.sum(), new.max()][
            kind % 4
        ]
        return (
            T.cast(new, h.dtype),
            T.cast(new_total, total.dtype),
            T.tanh(same.dot(w) / 4),
            new.mean(axis=1),
        )

    dtypes = ["float64", "float64", "float32"]
    h = [T.zeros((n, COLUMNS), dtypes[rng.randint(3)]), T.zeros((6, COLUMNS)), T.ones((n, COLUMNS)),
         T.alloc(np.float64(0), n, COLUMNS)][rng.randint(4)]  # fmt: skip
    total = [T.zeros((), dtypes[rng.randint(3)]), T.constant(1.5), xs.sum()][rng.randint(3)]
    states, truncated = [h, total, T.as_tensor_variable(w), None], -1 if rng.rand() < 0.7 else 2
    backwards = bool(rng.rand() < 0.3)
    outputs, _ = theano.scan(
        step, [xs, mask], states, go_backwards=backwards, truncate_gradient=truncated
    )
    return [each[-1] if rng.rand() < 0.4 else each for each in outputs]


def bent(a, n, shape):
    """Return an array of the shape of `a` that is reshaped and back, in one of 12 ways."""
    mine = a.shape[0]
    ways = [
        lambda: a.reshape((-1, 2, 2)).dimshuffle(0, 2, 1).flatten(2),
        lambda: a.flatten().reshape((-1, COLUMNS)),
        lambda: a.reshape((n, 2, -1)).sum(axis=2, keepdims=True).flatten(2).dot(T.ones((2, 4))),
        lambda: a.reshape((mine * 2, 2)).dot(T.ones((2, 2)) / 2).reshape((mine, -1)),
        lambda: a.T.flatten().reshape((COLUMNS, -1)).T,
        lambda: a.T.reshape((2, -1)).cumsum(axis=0).reshape((COLUMNS, n)).T,
        lambda: T.tanh(a.T.reshape((COLUMNS * mine, 1))).reshape((COLUMNS, mine)).T,
        lambda: a.reshape((6, -1)).sum(axis=1, keepdims=True) + a,
        lambda: a.reshape((n, -1)) + a[T.arange(mine), T.zeros_like(a[:, 0], "int64")][:, None],
        lambda: a.reshape((1, mine, -1))[0] * a.reshape((-1,)).shape[0] / 8,
        lambda: T.reshape(a.T, a.T.shape).dimshuffle(1, 0),
        lambda: a.reshape((-1, n)).reshape((-1, COLUMNS)),
    ]
    return T.patternbroadcast(ways[shape](), a.broadcastable) if shape < len(ways) else a


def taps(g, rng):
    xs = T.stack([T.cast(g.x, "float64")] * 3)
    start = {"initial": xs[:2] * rng.randint(2), "taps": [-2, -1]}
    k = g.pick(dtypes=["float64"]) if rng.rand() < 0.3 else 0.5
    return theano.scan(lambda x, two, one: x + two * k - one, xs, start)[0]


def normalized(g, rng):
    a = T.cast(g.pick(2), "float64") if rng.rand() < 0.8 else T.cast(g.pick(4), "float64")
    shift, pattern = g.shared[1], ("x", 0, *["x"] * (a.ndim - 2))
    shift = T.cast(shift, "float64").dimshuffle(*pattern)
    axes = "per-activation" if a.ndim == 2 else "spatial"
    if rng.rand() < 0.3:
        return T.nnet.bn.batch_normalization_test(a, abs(shift), shift, shift, 1 + abs(shift), axes)
    return list(T.nnet.bn.batch_normalization_train(a, abs(shift), shift, axes))


def chosen(g, rng):
    a = g.pick()
    conditions = [T.gt(g.a, 1), T.gt(T.sum(g.x), 0), T.gt(g.x.shape[0], 3)]
    b = [g.pick(a.ndim), a * 2, T.zeros_like(a)][rng.randint(3)]
    return ifelse(
        conditions[rng.randint(3)], a, T.patternbroadcast(T.cast(b, a.dtype), a.broadcastable)
    )


def along_axes(g, rng):
    a = g.pick()
    axis = int(rng.randint(max(a.ndim, 1)))
    return [lambda: T.cumsum(a, axis=axis), lambda: T.cumprod(a / 8, axis=axis),
            lambda: T.sort(a, axis=axis), lambda: T.argsort(a, axis=axis),
            lambda: T.extra_ops.diff(a, axis=axis), lambda: T.roll(a, 1, axis=axis),
            lambda: T.repeat(a, 2, axis=axis), lambda: T.tile(a, (2, 1)[: a.ndim]),
            lambda: T.tile(a, (1, 2)), lambda: T.squeeze(a), lambda: T.shape_padleft(a),
            lambda: a[..., None, :], lambda: a.swapaxes(0, axis)][rng.randint(13)]()  # fmt: skip


def check(g, rng):
    condition = [T.ge(g.a, 1), T.all(g.index < COLUMNS), T.gt(g.x.shape[0], 2)][rng.randint(3)]
    return T.opt.Assert("checked")(g.pick(), condition)


STEPS = [sequences, merged, merged, projected, scanned, scanned, taps, normalized, chosen,
         along_axes, along_axes, unary, binary, binary, division, cast, cast, switch, add_up,
         add_up, add_up, mean, mean, extreme, bits, length, length, of_length, reshape, reshape,
         axes, basic_index, lookup,
         lookup, change, change, join, split, products, products, by_row, by_row, repeated,
         check]  # fmt: skip
ONLY_IN_PYTHON = {division, bits}
