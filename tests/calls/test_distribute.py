"""Functions reach the ranks once, with one copy of each variable, already compiled."""

import gc
import logging
import os

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, on_ranks, worker
from support.layouts import IS_MIXED, Layout
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import _host
from synkhronos import session as _session

LAYOUTS = [Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture
def dumped(monkeypatch):
    """Record what is sent: (number of functions, known variables, new variables)."""
    sent = []
    real = _host.dump

    def dump(functions, known, new, portable=False):
        pickled = real(functions, known, new, portable)
        if not portable:
            sent.append((len(functions), list(known.values()), list(new.values()), len(pickled)))
        return pickled

    synk.distribute()
    gc.collect()
    monkeypatch.setattr(_host, "dump", dump)
    return sent


def test_a_call_sends_only_the_function_that_is_called(dumped):
    x = T.dvector("x")
    f, g = function([x], (x.sum(), "sum")), function([x], (x.max(), "max"))
    assert dumped == [] and g([1, 5]) == 5
    assert [n for n, *_ in dumped] == [1]
    for number in (1, 2):
        assert f([number, 5]) == number + 5
        assert [n for n, *_ in dumped] == [1, 1]


def test_distribute_is_repeatable_and_sends_only_what_is_new(dumped, caplog):
    x = T.dvector("x")
    s, t = theano.shared(np.zeros(2), "s"), theano.shared(1.0, "t")
    f = function([x], x.sum() + s.sum())
    with caplog.at_level(logging.INFO, "synkhronos"):
        synk.distribute()
        synk.distribute()
        assert [(n, new) for n, _, new, _ in dumped] == [(1, [s])]
        g = function([x], x.sum() + s.sum() + t)
        h = function([x], x.sum() * t)
        synk.distribute()
        synk.distribute()
    # For several kinds of devices functions are sent one by one.
    both = [(1, [t]), (1, [])] if IS_MIXED else [(2, [t])]
    names = [g.name, h.name] if IS_MIXED else [f"{g.name}, {h.name}"]
    assert [(n, new) for n, _, new, _ in dumped] == [(1, [s]), *both]
    assert any(variable is s for variable in dumped[1][1])
    assert [r.message.split(": ")[1].rsplit(", ", 1)[0] for r in caplog.records] == [
        f"distributed {name}" for name in [f.name, *names]
    ]
    assert f([1, 2]) > 0
    assert g([1, 1]) == f([1, 1]) + 1
    assert h([1, 1]) == f([1, 1])
    assert len(dumped) == 1 + len(both)


@pytest.mark.filterwarnings("ignore::synkhronos.PortingWarning")
def test_values_are_the_masters_at_that_moment_and_not_sent_again(ranks, dumped):
    s = theano.shared(np.arange(50000.0), "s")
    s.set_value(np.arange(50000.0) + 1)
    f = function([], (s.sum(), "gather"))
    synk.distribute()
    assert dumped[-1][3] > 400_000
    s.set_value(np.zeros(50000))
    g = function([], (s.max(), "gather"))
    synk.distribute()
    assert dumped[-1][3] < 100_000
    expected = [0 if r == ranks.master else 50000 for r in range(ranks.n)]
    np.testing.assert_array_equal(g(), expected)
    np.testing.assert_array_equal(f() > 0, np.array(expected) > 0)


def test_one_variable_in_two_functions_stays_one(ranks):
    x = T.dvector("x")
    s, twin = theano.shared(0.0, "s"), theano.shared(0.0, "s")
    write = function([x], updates=[(s, s + x.sum())])
    write(np.ones(ranks.n))
    read = function([], (s * 1, "gather"))  # sent later
    np.testing.assert_array_equal(read(), [1] * ranks.n)
    write(np.ones(ranks.n))
    np.testing.assert_array_equal(read(), [2] * ranks.n)
    again = function([x], (s + x.sum(), "gather"), updates=[(s, s * 10)])
    again(np.zeros(ranks.n))
    np.testing.assert_array_equal(read(), [20] * ranks.n)
    write(np.ones(ranks.n))
    np.testing.assert_array_equal(read(), [21] * ranks.n)
    function([], updates=[(twin, twin - 1)])()  # of equal name and value
    both = [(s * 1, "gather"), (twin * 1, "gather")]
    np.testing.assert_array_equal(function([], both)(), [[21] * ranks.n, [-1] * ranks.n])
    del write, read, again
    gc.collect()
    on_ranks(lambda: 0)  # the ranks have forgotten the functions, and have the variable
    np.testing.assert_array_equal(function([], (s * 1, "gather"))(), [21] * ranks.n)


def count_optimizer_and_compiler():
    """On a worker: count from now on what must not run there."""
    from theano.gof import cmodule, opt

    counts = theano._synkhronos_counts = {"optimize": 0, "compile": 0}

    def counted(kind, owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            counts[kind] += 1
            return real(*args, **kwargs)

        setattr(owner, name, call)

    counted("optimize", opt.SeqOptimizer, "apply")
    counted("compile", cmodule.GCC_compiler, "compile_str")


@pytest.mark.slow("compiles in earnest")
@pytest.mark.skipif(IS_MIXED, reason="ranks of another kind than the master's compile")
def test_no_optimizer_and_no_compiler_run_on_the_workers(ranks):
    pid = os.getpid()

    def begin():
        if os.getpid() != pid:
            count_optimizer_and_compiler()
        return 0

    def counts():
        found = getattr(theano, "_synkhronos_counts", {})
        return sum(found.values()) + 100 * len(found)

    on_ranks(begin)
    x, y = T.fmatrix("x"), T.fmatrix("y")
    number = np.float32(int.from_bytes(os.urandom(2), "big") / 7)  # no cache has seen it
    w = theano.shared(np.ones((3, 3), "float32"))
    out = T.tanh(T.dot(x, w) * number + y) + T.alloc(np.float32(2), x.shape[0], 3)
    f = synk.function([x, y], [(out, "gather"), out.mean()])
    g = theano.function([x, y], out)
    a = np.random.RandomState(0).rand(7, 3).astype("float32")
    np.testing.assert_allclose(f(a, a)[0], g(a, a), rtol=1e-5)
    # 200: both are counted, and none has run.
    assert on_ranks(counts) == [0 if r == ranks.master else 200 for r in range(ranks.n)]


@pytest.mark.parametrize("streams", [MRG_RandomStreams, RandomStreams])
@pytest.mark.sample(1)
@pytest.mark.usefixtures("compiled_if_thorough")
def test_random_streams_differ_between_ranks_and_repeat_for_a_seed(ranks, streams):
    def draws(seed):
        stream = streams(seed)
        draw = stream.uniform((4,))
        f = synk.function([], [(draw, "gather")])
        drawn = np.array([f()[0].reshape(ranks.n, 4) for _ in range(2)])
        return drawn

    first, again, other = draws(7), draws(7), draws(8)
    np.testing.assert_array_equal(first, again)
    assert not np.isin(first, other).any()
    flat = first.transpose(1, 0, 2).reshape(ranks.n, -1)
    assert len(np.unique(flat)) == flat.size
    plain_stream = streams(7)
    plain = theano.function([], plain_stream.uniform((4,)))
    np.testing.assert_array_equal(first[:, 0], [plain(), plain()])  # rank 0 is as without us
    assert first.min() >= 0 and first.max() < 1


@pytest.mark.usefixtures("compiled_if_thorough")
def test_random_streams_used_by_two_functions_go_on(ranks):
    stream = MRG_RandomStreams(3)
    draw = stream.normal((2,))
    f = function([], (draw, "gather"))
    g = function([], (draw * 1, "gather"))
    drawn = np.array([f(), g(), f(), g()])
    assert len(np.unique(drawn)) == drawn.size
    plain_stream = MRG_RandomStreams(3)
    plain = theano.function([], plain_stream.normal((2,)))
    np.testing.assert_allclose(drawn[:, :2], [plain() for _ in range(4)], rtol=1e-12)


def counts_of_ranks():
    counts = []
    for count in (lambda: len(worker().replicas), lambda: len(worker().variables)):
        gc.collect()
        on_ranks(lambda: 0)  # carries what was released
        gc.collect()
        counts.append(on_ranks(count))
    return counts


def test_released_functions_and_variables_are_forgotten_by_the_workers(ranks):
    before = counts_of_ranks()
    x = T.dvector("x")
    s = theano.shared(np.zeros(1000), "s")
    f = function([x], x.sum() + s.sum())
    g = function([x], x.sum() * s.sum())
    f([1]), g([1])
    held = counts_of_ranks()
    assert [a - b for a, b in zip(held[0], before[0])] == [2] * ranks.n
    assert [a - b for a, b in zip(held[1], before[1])] == [1] * ranks.n
    del f
    held = counts_of_ranks()
    assert [a - b for a, b in zip(held[0], before[0])] == [1] * ranks.n
    assert [a - b for a, b in zip(held[1], before[1])] == [1] * ranks.n
    assert g([2, 2]) == 0
    del g, s
    assert counts_of_ranks() == before


def test_a_pending_function_that_is_gone_is_not_sent(dumped):
    x = T.dvector("x")
    f = function([x], x.sum())
    del f
    gc.collect()
    synk.distribute()
    assert dumped == []


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("will not be pickled")

    def __call__(self, x):
        return x

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other


def raise_on_load():
    raise ImportError("no such module here")


class FailsOnLoad(Stubborn):
    def __reduce__(self):
        return raise_on_load, ()


def pending(functions):
    return [each._key in _session._Current.session.registry.pending for each in functions]


@pytest.mark.parametrize("kind, error", [(Stubborn, TypeError), (FailsOnLoad, synk.WorkerError)])
def test_what_cant_be_sent_is_refused_and_harms_no_other(ranks, kind, error):
    x = T.dvector("x")
    s = theano.shared(np.zeros(3), "s")
    gc.collect()  # what earlier tests could not send
    synk.distribute()
    functions = [
        function([x], (x.sum() * s.sum(), "sum"), name="first"),
        function([x], (Call(kind())(x), "sum"), name="second"),
        function([x], (x.sum() + s.sum(), "sum"), name="third"),
    ]
    for _ in range(2):
        with pytest.raises(error) as caught:
            synk.distribute()
        assert pending(functions) == [False, True, True]
    before = ranks.session.gate.sequence
    with pytest.raises(error, match=r"will not be pickled|no such module here") as caught:
        functions[1]([1, 2])
    if kind is Stubborn:
        assert "Function 'second' can't be sent" in str(caught.value)
        assert ranks.session.gate.sequence == before
    else:
        assert caught.value.rank != ranks.master
    assert functions[2]([1, 2]) == 3
    assert functions[0]([1, 2]) == 0
    del functions[1], caught


@pytest.mark.skipif(IS_MIXED, reason="functions for several kinds of devices travel one by one")
def test_many_functions_travel_in_one_command(ranks, monkeypatch, dumped):
    x = T.dvector("x")
    factors = [theano.shared(float(number)) for number in range(20)]
    functions = [function([x], (x.sum() * each, "sum")) for each in factors]
    synk.distribute()
    assert [n for n, *_ in dumped] == [20]
    assert [f([1, 2]) for f in functions] == [3.0 * number for number in range(20)]
    # Values that are large together travel in several messages.
    monkeypatch.setattr("synkhronos._session.registry.BYTES_AT_A_TIME", 30)
    more = [theano.shared(np.full(2, float(number))) for number in range(4)]
    functions = [function([x], (x.sum() * each.sum(), "sum")) for each in more]
    synk.distribute()
    assert [n for n, *_ in dumped] == [20, 2, 2]
    assert [f([1, 2]) for f in functions] == [6.0 * number for number in range(4)]


def test_functions_without_a_blas_travel(ranks):
    # An outer product is SciPy's ger where Theano has no BLAS to link: a Fortran routine.
    import scipy.linalg.blas

    ger = scipy.linalg.blas.dger
    x = T.dvector("x")
    f = function([x], (Call(lambda x: ger(1.0, x, x), T.dmatrix)(x), "sum"))
    np.testing.assert_array_equal(f(np.ones(ranks.n)), np.full((1, 1), ranks.n))
