"""Functions on the ranks: inputs, reductions, batches, slices and updates, against NumPy."""

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from scenarios import Skip, scenario
from scenarios.collectives import split
from scenarios.compare import close, equal, same, true

FORKS = True


def rows_of(*shape, seed=0):
    """Return random rows of single precision."""
    return np.random.RandomState(seed).uniform(-2, 2, size=shape).astype("float32")


def counts(run):
    """Return the numbers of rows to try: even, uneven, and fewer than ranks."""
    return (64, 33, 1) if run.quick else (1024, 1000, 333, 2, 1)


def worst(pairs):
    """Compare (name, got, expected), and return a line with the largest difference."""
    largest = max([close(got, expected, name) for name, got, expected in pairs], default=0.0)
    return f"largest relative difference {largest:.1e}"


@scenario(limit=240)
def all_modes(run):
    """Every way to reduce an output, for even and uneven rows."""
    x, k = T.fmatrix("x"), T.ivector("k")
    f = synk.function(
        [x, k],
        [
            x.mean(axis=0),
            (T.sqr(x).sum(axis=0), "sum"),
            (x.prod(axis=0), "prod"),
            (x.min(axis=0), "min"),
            (x.max(axis=0), "max"),
            (T.exp(x), "gather"),
            (x.sum(axis=1), None),
            (k.sum(), "sum"),
            (2 * k, "gather"),
            x.sum(axis=1).mean(),
        ],
    )

    def pairs():
        for count in counts(run):
            rows = 1 + rows_of(count, 17) / max(count, 8)
            numbers = np.arange(count, dtype="int32")
            wide = rows.astype("float64")
            own = split(wide, run.n)[0]
            expected = [
                wide.mean(axis=0),
                (wide**2).sum(axis=0),
                wide.prod(axis=0),
                rows.min(axis=0),
                rows.max(axis=0),
                np.exp(wide),
                own.sum(axis=1) if len(own) else None,
                numbers.sum(),
                2 * numbers,
                wide.sum(axis=1).mean(),
            ]
            for mode, got, value in zip([*f.output_modes, "avg"], f(rows, numbers), expected):
                if value is not None:
                    yield f"{mode} of {count} rows", got, np.asarray(value, np.asarray(got).dtype)

    return worst(pairs())


@scenario()
def broadcast_inputs(run):
    """A matrix that every rank gets whole, in a product with scattered rows."""
    x, w = T.fmatrix("x"), T.fmatrix("w")
    f = synk.function([x], [(T.dot(x, w), "gather"), T.dot(x, w).mean()], bcast_inputs=[w])

    def pairs():
        for count in counts(run):
            rows, weights = rows_of(count, 50), rows_of(50, 30, seed=1)
            product = (rows.astype("float64") @ weights).astype("float32")
            for kind, arguments in (
                ("arrays", (rows, weights)),
                ("Data", (synk.data(rows), synk.data(weights))),
            ):
                got, mean = f(*arguments)
                yield f"product of {count} rows, {kind}", got, product
                # The mean may be near 0: compare it on the scale of what it is a mean of.
                scaled = np.array([mean, product.max()], "float32")
                yield "mean", scaled, np.array([product.mean(), product.max()], "float32")

    return worst(pairs())


@scenario()
def batches(run):
    """Rows selected by a number, slices, row numbers and a mask, of arrays and of Data."""
    x, y = T.fmatrix("x"), T.ivector("y")
    f = synk.function([x, y], [(2 * x, "gather"), (y, "gather")])
    rows, labels = rows_of(40, 6), np.arange(40, dtype="int32")
    data = f.build_inputs(rows, labels)
    for batch in (
        7,
        slice(3, 30),
        slice(None, None, -3),
        [9, 0, 5, 5, 39],
        np.arange(39, -1, -2),
        labels % 3 == 0,
    ):
        chosen = rows[:batch] if isinstance(batch, int) else rows[batch]
        expected = labels[:batch] if isinstance(batch, int) else labels[batch]
        for arguments in ((rows, labels), data):
            got, numbers = f(*arguments, batch=batch)
            equal(got, 2 * chosen, f"batch {batch}")
            equal(numbers, expected, f"batch {batch}, the second input")


@scenario()
def sliceable_shared_variables(run):
    """Rows that stay on the device of each rank, selected with batch_s."""
    s, t = theano.shared(np.zeros((1, 3), "float32")), theano.shared(np.zeros(1, "int32"))
    f = synk.function(
        [],
        [(3 * s, "gather"), (s.sum(axis=0), "sum"), (t, "gather"), s.mean()],
        sliceable_shareds=[s, t],
    )
    rows, numbers = rows_of(20 * run.n, 3), np.arange(20 * run.n, dtype="int32")
    synk.scatter([s, t], [rows, numbers])
    parts, number_parts = split(rows, run.n), split(numbers, run.n)
    selections = [
        ("all", None, [slice(None)] * run.n),
        ("a slice", slice(2, 15), [slice(2, 15)] * run.n),
        ("rows", [4, 0, 0, 19], [[4, 0, 0, 19]] * run.n),
        ("steps", slice(None, None, 3), [slice(None, None, 3)] * run.n),
    ]
    each = [np.arange(rank, 12) for rank in range(run.n)]
    selections.append(("rows of each rank", each, each))

    def pairs():
        for name, batch_s, choices in selections:
            chosen = np.concatenate([part[c] for part, c in zip(parts, choices)])
            others = np.concatenate([part[c] for part, c in zip(number_parts, choices)])
            for num_slices in (1, 3):
                what = f"{name}, {num_slices} slices"
                got, total, integers, mean = f(batch_s=batch_s, num_slices=num_slices)
                yield what, got, 3 * chosen
                yield f"{what}, sum", total, chosen.astype("float64").sum(0).astype("float32")
                yield f"{what}, integers", integers, others
                yield f"{what}, mean", mean, np.asarray(chosen.mean(dtype="float64"), "float32")

    return worst(pairs())


@scenario()
def givens(run):
    """A sliceable shared variable in the place of an input of the graph."""
    x, s = T.fmatrix("x"), theano.shared(np.zeros((1, 4), "float32"))
    f = synk.function([], (T.tanh(x), "gather"), givens=[(x, s)], sliceable_shareds=[s])
    rows = rows_of(6 * run.n, 4)
    synk.scatter(s, rows)
    close(f(), np.tanh(rows), "all rows")
    chosen = np.concatenate([part[[5, 2]] for part in split(rows, run.n)])
    close(f(batch_s=[5, 2]), np.tanh(chosen), "rows 5 and 2 of each rank")


@scenario(limit=240)
def slices(run):
    """Outputs and updates of a call in several slices, by the documented rule."""
    x = T.fmatrix("x")
    mean, total = theano.shared(np.zeros(5, "float32")), theano.shared(np.zeros(5, "float32"))
    f = synk.function(
        [x],
        [T.sqr(x).mean(axis=0), (x.sum(axis=0), "sum"), (x.max(axis=0), "max"), (x, "gather")],
        updates=[(mean, x.mean(axis=0)), (total, x.sum(axis=0), "sum")],
    )

    def pairs():
        for count in counts(run):
            rows = rows_of(count, 5)
            wide = rows.astype("float64")
            for num_slices in (1, 2, 5):
                what = f"{count} rows, {num_slices} slices"
                square, summed, largest, joined = f(rows, num_slices=num_slices)
                yield f"{what}, avg", square, (wide**2).mean(axis=0).astype("float32")
                yield f"{what}, sum", summed, wide.sum(axis=0).astype("float32")
                yield f"{what}, max", largest, rows.max(axis=0)
                yield f"{what}, gather", joined, rows
                for rank, part in enumerate(split(wide, run.n)):
                    if len(part):
                        got, sums = synk.get_value(rank, [mean, total])
                        yield f"{what}, mean of rank {rank}", got, part.mean(0).astype("float32")
                        yield f"{what}, sum of rank {rank}", sums, part.sum(0).astype("float32")

    return worst(pairs())


@scenario(limit=240)
def all_reduce_in_the_graph(run):
    """ops.all_reduce, weighted by rows where it averages, in outputs and in updates."""
    x, y = T.fmatrix("x"), T.fmatrix("y")
    mean = theano.shared(np.zeros(5, "float32"))
    reduce = synk.ops.all_reduce
    f = synk.function(
        [x],
        [
            (reduce(x.mean(axis=0)), "gather"),
            (reduce(x.sum(), "sum"), "gather"),
            (reduce(x.max(axis=0), "max"), "gather"),
            (reduce(x.min(axis=0), "min"), "gather"),
            (reduce(T.dot(y, y.T).sum(axis=0) * x.max(), "prod"), None),
        ],
        bcast_inputs=[y],
        updates=[(mean, reduce(x.mean(axis=0)))],
    )

    def pairs():
        for count in counts(run):
            rows, square = 1 + rows_of(count, 5) / (8 * count), rows_of(5, 5, seed=1) ** 2
            wide = rows.astype("float64")
            ran = min(run.n, count)
            factor = (square.astype("float64") @ square.T).sum(axis=0)
            expected = (
                np.tile(wide.mean(axis=0), ran),
                np.full(ran, wide.sum()),
                np.tile(rows.max(axis=0), ran),
                np.tile(rows.min(axis=0), ran),
            )
            *got, product = f(rows, square)
            for number, (one, other) in enumerate(zip(got, expected)):
                yield f"{count} rows, output {number}", one, other.astype("float32")
            if count >= run.n:  # else some rank takes part with a row that it borrows
                powers = factor**run.n * np.prod([part.max() for part in split(wide, run.n)])
                yield f"{count} rows, prod", product, powers.astype("float32")
            first = mean.get_value()
            yield f"{count} rows, update", first, wide.mean(axis=0).astype("float32")
            for rank in range(1, run.n):
                equal(synk.get_value(rank, mean), first, f"{count} rows, update on rank {rank}")

    return worst(pairs())


@scenario()
def output_subset(run):
    """Some of the outputs, in any order."""
    x = T.fmatrix("x")
    f = synk.function([x], [x.sum(axis=0), (x, "gather"), (x.max(), "max")])
    rows = rows_of(12, 3)
    joined, largest = f(rows, output_subset=[2, 1])
    equal(joined, rows, "gathered")
    equal(largest, np.asarray(rows.max()), "largest")
    same(len(f(rows)), 3, "the number of outputs afterwards")


@scenario()
def outputs_on_the_device(run):
    """An output that is left on the device, and the same on the host."""
    if run.kind == "cpu":
        raise Skip("CPU ranks only")
    s = theano.shared(rows_of(4, 3))
    f = synk.function([], [((2 * s).transfer(None), None), (2 * s, "gather")])
    on_device, on_host = f()
    equal(on_device, 2 * s.get_value(), f"a {type(on_device).__name__}")
    equal(on_host, np.concatenate([2 * s.get_value()] * run.n), "on the host")
    return f"{type(on_device).__module__}.{type(on_device).__name__}"


@scenario()
def random_numbers(run):
    """Streams that differ between the ranks; the master's is that of serial Theano."""
    size = 1000

    def make():
        return MRG_RandomStreams(7).uniform((size,), dtype="float32")

    drawn = make()
    theirs = synk.function([], (drawn, "gather"))().reshape(run.n, size)
    serial = theano.function([], make())()
    close(theirs[0], serial, "the master's numbers")
    for rank in range(1, run.n):
        true((theirs[rank] != theirs[0]).mean() > 0.9, f"rank {rank} draws what rank 0 draws")
    true(abs(theirs.mean() - 0.5) < 0.05, f"the mean of uniform numbers is {theirs.mean()}")


@scenario()
def as_theano(run):
    """The same call in the master alone."""
    x, w = T.fmatrix("x"), theano.shared(rows_of(6, 4))
    f = synk.function([x], (T.nnet.sigmoid(T.dot(x, w)), "gather"))
    rows = rows_of(9, 6, seed=1)
    close(f(rows), f.as_theano(rows), "on all ranks and in the master")
