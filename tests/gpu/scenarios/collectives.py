"""Every collective, for many dtypes and shapes, against NumPy."""

import itertools

import numpy as np
import theano

import synkhronos as synk
from scenarios import Skip, scenario
from scenarios.compare import close, equal, refused, same, true

FORKS = True

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "bool")
# 0-d variables stay on the CPU in Theano; (0, 3) has no elements; the largest take several blocks.
SHAPES = ((), (0, 3), (1,), (5,), (7, 3), (2, 3, 4, 5), (1000, 257))
OPS = ("avg", "sum", "prod", "min", "max")
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def cases(run, with_rows=False):
    """Return the dtypes with the shapes to try."""
    shapes = SHAPES[:-1] if run.quick else SHAPES
    return list(itertools.product(DTYPES, [s for s in shapes if s or not with_rows]))


def numbers(shape, dtype, seed):
    """Return numbers near 1, so that products stay in range, or small integers."""
    random = np.random.RandomState(seed)
    if dtype == "bool":
        return np.asarray(random.uniform(size=shape) < 0.5)
    if dtype.startswith("float"):
        return np.asarray(random.uniform(-2, 2, size=shape), dtype)
    return np.asarray(random.randint(0, 5, size=shape), dtype)


def variable(dtype, ndim):
    """Return a shared variable, on the device where Theano puts such a one there."""
    return theano.shared(np.zeros((1,) * ndim, dtype), f"{dtype}-{ndim}d")


def give_each(variables, values):
    """Give each rank its own values: `values` has, for each rank, one for each variable."""
    for rank, own in enumerate(values):
        synk.set_value(rank, variables, own)


def split(rows, n):
    """Return what each rank gets of some rows."""
    edges = np.floor(np.linspace(0, len(rows), n + 1)).astype(int)
    return [rows[a:b] for a, b in zip(edges[:-1], edges[1:])]


def reduced(op, values):
    """Return the reduction of some arrays of one dtype by NumPy, computed as is promised."""
    dtype = values[0].dtype
    if dtype.kind == "b":
        ufunc = np.logical_or if op in ("sum", "max") else np.logical_and
        return ufunc.reduce(values)
    wide = [value.astype("float64") for value in values] if dtype.kind == "f" else values
    ufunc = UFUNCS["sum" if op == "avg" else op]
    with np.errstate(over="ignore"):
        total = ufunc.reduce(np.stack(wide), axis=0, **({"dtype": dtype} if wide is values else {}))
    return (total / len(values) if op == "avg" else total).astype(dtype)


def each_variable(run, check, with_rows=False):
    """Check every dtype and shape; return where the values were, and the largest difference."""
    kinds, worst = set(), 0.0
    for dtype, shape in cases(run, with_rows):
        s = variable(dtype, len(shape))
        kinds.add(type(s).__name__)
        worst = max(worst, check(s, dtype, shape, f"{dtype} {shape}") or 0.0)
    exact = f"largest relative difference {worst:.1e}" if worst else "equal to the bit"
    return f"{exact}; {', '.join(sorted(kinds))}"


@scenario()
def set_and_get_value(run):
    """What one rank is given, it has, and nobody else."""

    def check(s, dtype, shape, what):
        values = [numbers(shape, dtype, rank) for rank in range(run.n)]
        give_each(s, values)
        for rank in range(run.n):
            equal(synk.get_value(rank, s), values[rank], f"{what} of rank {rank}")
        equal(s.get_value(), values[0], f"{what} of the master")

    return each_variable(run, check)


@scenario()
def broadcast(run):
    """The master's value, and a new one of another shape, from an array and from Data."""

    def check(s, dtype, shape, what):
        value = numbers(shape, dtype, 1)
        s.set_value(value)
        synk.broadcast(s)
        for rank in range(run.n):
            equal(synk.get_value(rank, s), value, f"{what} of rank {rank}")
        longer = numbers((shape[0] + 3, *shape[1:]) if shape else (), dtype, 2)
        for given in (longer, synk.data(longer)):
            synk.broadcast(s, value)
            synk.broadcast(s, given)
            for rank in range(run.n):
                equal(synk.get_value(rank, s), longer, f"{what} given to rank {rank}")

    return each_variable(run, check)


@scenario()
def scatter(run):
    """Even and uneven rows, fewer than ranks, selected ones, from an array and from Data."""

    def check(s, dtype, shape, what):
        rows = numbers((2 * run.n + 1, *shape[1:]), dtype, 1)
        some = np.array([3, 0, 2, 2])[: run.n + 1] % len(rows)
        for given, batch, expected in (
            (rows, None, rows),
            (synk.data(rows), None, rows),
            (rows[: run.n - 1], None, rows[: run.n - 1]),
            (synk.data(rows), some, rows[some]),
            (rows, slice(1, None), rows[1:]),
        ):
            synk.scatter(s, given, batch=batch)
            for rank, part in enumerate(split(expected, run.n)):
                equal(synk.get_value(rank, s), part, f"{what} to rank {rank}, batch {batch}")

    return each_variable(run, check, with_rows=True)


@scenario()
def gather(run):
    """Equal shapes stacked and joined; unequal ones joined, or as a list."""

    def check(s, dtype, shape, what):
        values = [numbers(shape, dtype, rank) for rank in range(run.n)]
        give_each(s, values)
        equal(synk.gather(s), np.stack(values), f"{what} stacked")
        if shape:
            equal(synk.gather(s, nd_up=0), np.concatenate(values), f"{what} joined")
            ragged = [numbers((rank + 1, *shape[1:]), dtype, rank) for rank in range(run.n)]
            give_each(s, ragged)
            equal(synk.gather(s, nd_up=0), np.concatenate(ragged), f"{what} joined, ragged")
            if run.n > 1:
                for got, value in zip(synk.gather(s), ragged):
                    equal(got, value, f"{what} as a list")

    return each_variable(run, check)


@scenario()
def all_gather(run):
    """Joined on every rank, of equal and of unequal lengths."""

    def check(s, dtype, shape, what):
        for lengths in ([shape[0]] * run.n, range(1, run.n + 1)):
            values = [
                numbers((length, *shape[1:]), dtype, rank) for rank, length in enumerate(lengths)
            ]
            give_each(s, values)
            synk.all_gather(s)
            for rank in range(run.n):
                equal(synk.get_value(rank, s), np.concatenate(values), f"{what} on rank {rank}")

    return each_variable(run, check, with_rows=True)


@scenario()
def lengths_and_shapes(run):
    """What each rank has, as it says itself."""

    def check(s, dtype, shape, what):
        shapes = [(rank + 1, *shape[1:]) for rank in range(run.n)]
        give_each(s, [numbers(each, dtype, 1) for each in shapes])
        same(synk.get_lengths(s), [each[0] for each in shapes], f"{what}, lengths")
        same(synk.get_shapes(s), shapes, f"{what}, shapes")

    return each_variable(run, check, with_rows=True)


def reduces(check_one):
    """Return a check for each operation that a dtype has; averages of the others are refused."""

    def check(s, dtype, shape, what):
        worst = 0.0
        for op in OPS:
            if op == "avg" and not dtype.startswith("float"):
                refused((TypeError, ValueError), lambda: synk.all_reduce(s), f"{what}, avg")
                continue
            worst = max(worst, check_one(s, op, dtype, shape, f"{what}, {op}"))
        return worst

    return check


@scenario()
def reduce(run):
    """To the master, in place and not; the workers keep what they have."""

    def check(s, op, dtype, shape, what):
        values = [numbers(shape, dtype, rank) for rank in range(run.n)]
        give_each(s, values)
        expected = reduced(op, values)
        worst = close(synk.reduce(s, op, in_place=False), expected, f"{what}, to a new array")
        equal(s.get_value(), values[0], f"{what}: the master's after reduce to a new array")
        synk.reduce(s, op)
        worst = max(worst, close(s.get_value(), expected, f"{what}, in place"))
        for rank in range(1, run.n):
            equal(synk.get_value(rank, s), values[rank], f"{what}: that of rank {rank} after it")
        return worst

    return each_variable(run, reduces(check))


@scenario(limit=240)
def all_reduce(run):
    """To all ranks, which have the same bits then; once more with nccl=False."""

    def check(s, op, dtype, shape, what):
        values = [numbers(shape, dtype, rank) for rank in range(run.n)]
        expected, worst = reduced(op, values), 0.0
        for nccl in (True, False):
            give_each(s, values)
            synk.all_reduce(s, op, nccl=nccl)
            first = s.get_value()
            worst = max(worst, close(first, expected, f"{what}, nccl={nccl}"))
            for rank in range(1, run.n):
                equal(synk.get_value(rank, s), first, f"{what}, nccl={nccl}, on rank {rank}")
        return worst

    return each_variable(run, reduces(check))


@scenario()
def several_at_once(run):
    """Variables of all dtypes and shapes in one call of each collective."""
    kinds = cases(run, with_rows=True)
    variables = [variable(dtype, len(shape)) for dtype, shape in kinds]
    values = [[numbers(shape, dtype, rank) for dtype, shape in kinds] for rank in range(run.n)]
    give_each(variables, values)
    for rank in range(run.n):
        for got, value, kind in zip(synk.get_value(rank, variables), values[rank], kinds):
            equal(got, value, f"get_value {kind}")
    for got, each, kind in zip(synk.gather(variables), zip(*values), kinds):
        equal(got, np.stack(each), f"gather {kind}")
    same(list(synk.get_shapes(variables)), [[shape] * run.n for _, shape in kinds], "get_shapes")

    synk.all_reduce(variables, "max")
    for s, each, kind in zip(variables, zip(*values), kinds):
        equal(synk.get_value(run.n - 1, s), reduced("max", each), f"all_reduce {kind}")
    synk.all_gather(variables)
    for s, (_, shape) in zip(variables, kinds):
        same(synk.get_lengths(s), [shape[0] * run.n] * run.n, f"lengths of {s} after all_gather")
    synk.broadcast(variables, values[0])
    rows = [numbers((run.n + 1, *shape[1:]), dtype, 3) for dtype, shape in kinds]
    synk.scatter(variables, rows)
    for s, all_rows in zip(variables, rows):
        equal(synk.get_value(run.n - 1, s), split(all_rows, run.n)[-1], f"scatter {s}")
    return f"{len(variables)} variables"


@scenario()
def large(run):
    """64 MiB, through each collective."""
    mib = 1 if run.quick else 64
    values = [numbers((mib * 2**18,), "float32", rank) for rank in range(run.n)]
    s = variable("float32", 1)
    give_each(s, values)
    equal(synk.gather(s, nd_up=0), np.concatenate(values), "gather")
    expected = reduced("avg", values)
    worst = close(synk.reduce(s, in_place=False), expected, "reduce")
    synk.all_reduce(s)
    worst = max(worst, close(synk.get_value(run.n - 1, s), expected, "all_reduce"))
    synk.broadcast(s, values[-1])
    equal(synk.get_value(run.n - 1, s), values[-1], "broadcast")
    synk.all_gather(s)
    equal(synk.get_value(run.n - 1, s), np.tile(values[-1], run.n), "all_gather")
    synk.scatter(s, values[0])
    equal(synk.gather(s, nd_up=0) if run.n > 1 else s.get_value(), values[0], "scatter")
    return f"{mib} MiB; largest relative difference {worst:.1e}"


@scenario()
def after_updates(run):
    """A variable that a function has written to, and one to which set_value gave a new shape."""
    s = theano.shared(np.arange(6, dtype="float32"), "s")
    double = synk.function([], updates=[(s, 2 * s)])
    synk.all_reduce(s, "sum")
    double()
    expected = np.arange(6, dtype="float32") * run.n * 2
    close(synk.get_value(run.n - 1, s), expected, "updated after all_reduce")
    synk.all_reduce(s)
    close(synk.get_value(run.n - 1, s), expected, "average of what was updated")
    s.set_value(np.ones(3, "float32"))
    if run.n > 1:
        same(synk.get_lengths(s), [3] + [6] * (run.n - 1), "lengths after set_value")
        refused(ValueError, lambda: synk.all_reduce(s), "an all_reduce of unequal shapes")
    synk.broadcast(s)
    double()
    close(
        synk.get_value(run.n - 1, s), np.full(3, 2, "float32"), "after a broadcast of a new shape"
    )


@scenario()
def values_on_the_device(run):
    """That the values of vectors and larger really are on the device."""
    if run.kind == "cpu":
        raise Skip("CPU ranks only")
    s = theano.shared(np.zeros((3, 2), "float32"))
    synk.broadcast(s, np.ones((4, 2), "float32"))
    kind = type(s.container.data)
    true(kind.__name__ == "GpuArray", f"the master's value is a {kind} after a broadcast")
    return f"{type(s).__name__} of {kind.__module__}.{kind.__name__}"
