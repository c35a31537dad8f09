"""Whatever theano.function takes, synk.function takes: each form gives what plain Theano gives."""

import contextlib
import copy
import io
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import theano
import theano.tensor as T
import theano.tensor.inplace
from support.helpers import MODE, Call
from support.layouts import ON_DEVICES, Layout
from theano import In, Out

import synkhronos as synk
from synkhronos import _host

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks", "compiled_if_thorough")

X = np.arange(1.0, 7.0)


class Names:
    """Variables of one function, made anew for each."""

    def __init__(self):
        self.x, self.y = T.dvector("x"), T.dscalar("y")
        self.z = T.fvector("z")
        self.s, self.t = theano.shared(np.full(3, 2.0), "s"), theano.shared(1.0, "t")


class Build:
    """Make a function of Theano's, or of this package with each output in mode "gather"."""

    def __init__(self, make, is_parallel):
        self._make, self._is_parallel = make, is_parallel

    def __call__(self, inputs, outputs=None, **kwargs):
        return self._make(inputs, outputs, **{"mode": MODE, **kwargs})

    def rows(self, output):
        """Return an output with the mode in which it is that of all rows."""
        return (output, "gather") if self._is_parallel else output


def both(program):
    """Return what a program gives with Theano, and on all ranks."""
    results = []
    for make, is_parallel in ((theano.function, False), (synk.function, True)):
        results.append(program(Build(make, is_parallel), Names()))
    return results


def assert_same(serial, parallel):
    several = (dict, list, tuple)
    assert type(serial) is type(parallel) or not isinstance(serial, several)
    assert isinstance(serial, several) or not isinstance(parallel, several)
    if isinstance(serial, dict):
        assert list(serial) == list(parallel)
        serial, parallel = list(serial.values()), list(parallel.values())
    if isinstance(serial, (list, tuple)):
        assert len(serial) == len(parallel)
        for one, other in zip(serial, parallel):
            assert_same(one, other)
    else:
        np.testing.assert_allclose(np.asarray(parallel), np.asarray(serial), rtol=1e-14)


class Programs:
    """Programs that make functions, and return what these compute."""

    def default(make, v):
        f = make([v.x, In(v.y, value=2.0)], make.rows(v.x * v.y))
        return [f(X), f(X, 5), f(X, y=3), f(X), f(x=X, y=7)]

    def default_array(make, v):
        f = make([In(v.x, value=X)], make.rows(v.x * 2))
        return [f(), f(-X[:4]), f()]

    def default_set(make, v):
        f = make([v.x, In(v.y, value=2.0)], make.rows(v.x * v.y))
        f[v.y] = 9
        first = f["y"]
        results = [f(X), f(X)]
        f.value["y"] = 4
        results += [f(X), f["y"]]
        f[1] = 5
        results += [f(x=X), f.container[v.y].value, first]
        f.container["y"].value = 11
        return [*results, f(X), f(X), "y" in f, v.x in f.value, "other" in f, v.y in f.container]

    def name(make, v):
        f = make([In(v.x, name="rows"), In(v.y, name="factor", value=1.0)], make.rows(v.x * v.y))
        return [f(rows=X), f(factor=3, rows=X), f(X, factor=2), f["factor"]]

    def flags(make, v):
        inputs = [In(v.x, mutable=True, borrow=True), In(v.y, borrow=True, autoname=False)]
        f = make(inputs, [make.rows(v.x * v.y), make.rows(v.x)])
        mine = X.copy()
        results = f(mine, 3)
        np.testing.assert_array_equal(mine, X)
        return results

    def downcast(make, v):
        f = make([In(v.z, allow_downcast=True), In(v.x, strict=True)], make.rows(v.x + v.z))
        return f(X, X)

    def update(make, v):
        f = make([v.x, In(v.y, value=1.0, update=v.y * 2)], make.rows(v.x + v.y))
        results = [f(X), f(X), f[v.y], f(X, 10), f["y"], f(y=3, x=X), f.value[v.y]]
        f["y"] = -1
        return [*results, f["y"], f(X), f(X), f.container["y"].value]

    def update_of_a_vector(make, v):
        f = make([In(v.x, value=X[:3], update=v.x + v.s), v.y], v.x * v.y, updates=[(v.s, v.s + 1)])
        return [f(y=2), f(y=3), f[v.x], f(X[:3], 2), f["x"], f["s"], v.s.get_value()]

    def container(make, v):
        f = make([In(v.x, value=v.s.container), v.y], v.x * v.y)
        first = f(y=2)
        v.s.set_value(np.ones(3))
        return [first, f["x"]]

    def container_with_update(make, v):
        f = make([v.x, In(v.y, value=v.t.container, update=v.y + 1)], make.rows(v.x * v.y))
        return [f(X), f(X), v.t.get_value(), f["y"]]

    def container_given(make, v):
        f = make([v.x, In(v.y, value=v.t.container, implicit=False)], make.rows(v.x * v.y))
        return [f(X), f(X, 3), f(X), v.t.get_value()]

    def implicit(make, v):
        f = make([v.x, In(v.y, value=4.0, implicit=True)], make.rows(v.x * v.y))
        return [f(X), f["y"]]

    def tuples(make, v):
        results = []
        for spec in (
            (v.y, 3.0),
            ["y", v.y, 3.0],
            ("y", (v.y, v.y + 1), 3.0),
            ((v.y, v.y + 1), 3.0),
        ):
            f = make([v.x, spec], make.rows(v.x * v.y))
            results += [f(X), f(X), f(X, 2), f(x=X, y=5), f["y"]]
        for spec in ((v.y,), ("y", v.y), (In(v.y, name="y"),), (In(v.y), 6.0)):
            results.append(make((v.x, spec), make.rows(v.x * v.y))(X, 2))
        return results

    def outputs(make, v):
        a, b = make.rows(v.x + 1), make.rows(v.x * 2)
        return [
            make([v.x], (a, b))(X),
            make([v.x], (a,))(X),
            make([], ())(),
            make([v.x], [a])(X),
            make([v.x], a)(X),
            make([v.x], (a, b, a))(X),
        ]

    def out(make, v):
        a, b = Out(v.x + 1, borrow=True), Out(v.x, borrow=True)
        f = make([v.x], [make.rows(a), make.rows(b)])
        return [f(X), f(X + 1), make([v.x], make.rows(a))(X)]

    def out_alone(make, v):
        return make([], [Out(v.s), Out(v.t * 2)])()

    def outputs_dict(make, v):
        chosen = {"b": make.rows(v.x), "a": make.rows(Out(v.x * 2, borrow=True)), "c": v.t}
        f = make([v.x], chosen, mode="FAST_RUN")  # its linker takes output_subset
        results = [f(X), f(X, output_subset=["c", "a"]), f(X, output_subset=[])]
        results[1] = {key: results[1][key] for key in sorted(results[1])}
        return [*results, make([], {})(), make([v.x], OrderedDict(z=make.rows(v.x)))(X)]

    def updates_dict(make, v):
        f = make([], updates={v.s: v.s + 1})
        g = make([], updates=OrderedDict([(v.s, v.t * v.s), (v.t, v.t + 1)]))
        with pytest.warns(UserWarning, match="updates"):
            h = make([], updates={v.s: v.t + v.s, v.t: v.t * 3})
        f(), g(), h(), f()
        return [v.s.get_value(), v.t.get_value()]

    def updates_tuple(make, v):
        make([], updates=((v.s, v.s + v.t), (v.t, 5.0)))()
        return [v.s.get_value(), v.t.get_value()]

    def default_updates(make, v):
        v.t.default_update = v.t + 1
        v.s.default_update = v.s * 2
        make([], v.t * v.s, no_default_updates=True)()
        make([], v.t * v.s, no_default_updates=[v.t])()
        make([], v.t * v.s, no_default_updates=False)()
        return [v.s.get_value(), v.t.get_value()]

    def keywords(make, v):
        with pytest.warns(UserWarning, match="not part of the computational graph"):
            f = make([v.x, v.y], make.rows(v.x), on_unused_input="warn")
        g = make([v.x, v.y], make.rows(v.x), on_unused_input="ignore")
        h = make([v.z], make.rows(v.z * 2), allow_input_downcast=True)
        k = make(
            [v.x],
            make.rows(v.x + v.y),
            givens={v.y: T.constant(2, dtype="int8")},
            rebuild_strict=False,
        )
        return [f(X, 1), g(X, 1), h(X), k(X)]

    def profile(make, v):
        f = make([v.x], make.rows(v.x + 1), profile=True)
        results = [f(X), f(X)]
        assert f.profile.fct_callcount == 2
        assert make([], v.t).profile is None
        return results

    def in_place(make, v):
        y = T.inplace.add_inplace(v.x + 1, v.y)
        return make([v.x, v.y], make.rows(y), accept_inplace=True)(X, 2)

    def copies(make, v):
        f = make([], [v.s, v.t], updates=[(v.s, v.s + v.t)], name="f")
        other = theano.shared(np.zeros(3))
        g, h, k = f.copy(), f.copy(delete_updates=True, name="h"), f.copy(swap={v.s: other})
        results = [f(), g(), h(), copy.copy(f)(), k(), k(), f(), h(), v.s.get_value()]
        assert (g.name, h.name, k.name) == ("f copy", "h", "f copy")
        return [*results, other.get_value()]

    def copy_without_what_used_an_input(make, v):
        f = make([v.x], [v.s], updates=[(v.s, v.s + T.ge(v.x.sum(), -1e6))])
        g = f.copy(delete_updates=True)
        return [f(X), g(X), g(X)]

    def copy_with_inputs(make, v):
        # A list: Theano's copy of a function with one output returns a list in any case.
        f = make([v.x, In(v.y, value=1.0, update=v.y + v.t)], [make.rows(v.x * v.y)])
        f(X), f(X)
        other = theano.shared(10.0)
        g, h, k = f.copy(), f.copy(swap={v.t: other}), f.copy(share_memory=True)
        return [g(X), g(X), h(X), h(X), k(X), f[v.y], f(X)]


PROGRAMS = [name for name in vars(Programs) if not name.startswith("_")]
if ON_DEVICES:  # where Theano fails with containers, and warns of its profiler
    PROGRAMS = [name for name in PROGRAMS if "container" not in name and name != "profile"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_as_in_theano(ranks, program):
    assert_same(*both(getattr(Programs, program)))


V = Names()
REFUSED = {
    "one input": lambda make: make(V.x, V.x),
    "unused": lambda make: make([V.x, V.y], V.x),
    "unused word": lambda make: make([V.x, V.y], V.x, on_unused_input="whatever"),
    "twice": lambda make: make([V.x, In(V.x)], V.x),
    "given": lambda make: make([V.x], V.x, givens={V.x: V.s}),
    "given, kept": lambda make: make([In(V.x, value=X, update=V.x)], V.x, givens={V.x: V.s}),
    "shared": lambda make: make([In(V.s)], V.s),
    "constant": lambda make: make([In(T.constant(1.0))], V.s),
    "value": lambda make: make([V.x, In(V.y, value="abc")], V.x * V.y),
    "value of a type": lambda make: make([In(V.y, value=X)], V.y),
    "tuple": lambda make: make([(V.y, "y", 3.0)], V.y),
    "empty tuple": lambda make: make([()], V.y),
    "tuple and updates": lambda make: make([(V.y, 3.0)], V.y, updates=[(V.s, V.s)]),
    "tuple and givens": lambda make: make([(V.y, 3.0)], V.y * V.t, givens={V.t: V.t}),
    "tuple and profile": lambda make: make([(V.y, 3.0)], V.y, profile=True),
    "keys": lambda make: make([V.x], {1: V.x}),
    "update twice": lambda make: make([], updates=[(V.s, V.s), (V.s, V.s)]),
    "no default updates": lambda make: make([], V.t, no_default_updates="all"),
    "strict": lambda make: make([In(V.x, strict=True)], V.x)([1, 2]),
    "no downcast": lambda make: make([In(V.z, allow_downcast=False)], V.z)(X),
    "downcast": lambda make: make([In(V.z)], V.z, allow_input_downcast=True)(X),
    "missing": lambda make: make([V.x, In(V.y, value=1.0)], V.x * V.y)(y=2),
    "too many": lambda make: make([V.x, In(V.y, value=1.0)], V.x * V.y)(X, 2, 3),
    "both": lambda make: make([V.x, In(V.y, value=1.0)], V.x * V.y)(X, 2, y=3),
    "unknown": lambda make: make([V.x, In(V.y, value=1.0)], V.x * V.y)(X, z=3),
    "implicit": lambda make: make([In(V.y, value=1.0, implicit=True)], V.y)(3),
    "container": lambda make: make([In(V.y, value=V.t.container)], V.y)(3),
    "subset": lambda make: make([], {"a": V.t})(output_subset=[0]),
    "read": lambda make: make([V.x], V.x)["z"],
    "set": lambda make: make([V.x], V.x).value.__setitem__("z", 3),
    "set wrong": lambda make: make([In(V.y, value=1.0)], V.y).value.__setitem__("y", "abc"),
    "swap": lambda make: make([], V.t).copy(swap={V.s: V.s}),
    "swap type": lambda make: make([], V.t).copy(swap={V.t: V.s}),
    "in place": lambda make: make([V.x], T.inplace.exp_inplace(V.x)),
    "argument": lambda make: make([V.x], V.x, no_such_argument=1),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.layouts(Layout(2))
def test_an_error_in_theano_is_an_error_here(ranks, name):
    serial, parallel = Build(theano.function, False), Build(synk.function, True)
    with pytest.raises(Exception):  # noqa: B017 - Theano raises errors of many kinds
        REFUSED[name](serial)
    with pytest.raises((TypeError, ValueError, RuntimeError, theano.compile.UnusedInputError)) as e:
        REFUSED[name](parallel)
    assert len(str(e.value).split()) > 4
    assert parallel([V.x], (V.x.sum(), "sum"))(X) == X.sum()


def test_what_ranks_keep_is_set_on_all_ranks(ranks):
    v = Names()
    f = synk.function([v.x, In(v.y, value=1.0, update=v.y + v.x.sum())], [v.y])
    [kept] = f.get_shared()
    f(np.ones(2 * ranks.n))
    np.testing.assert_array_equal(synk.gather(kept), np.full(ranks.n, 3.0))
    f[v.y] = 7
    np.testing.assert_array_equal(synk.gather(kept), np.full(ranks.n, 7.0))
    f(np.ones(ranks.n), 5)
    np.testing.assert_array_equal(synk.gather(kept), np.full(ranks.n, 6.0))
    with pytest.raises(TypeError, match=r"Input 'x' of .* takes TensorType"):
        f("wrong", 100)
    np.testing.assert_array_equal(synk.gather(kept), np.full(ranks.n, 6.0))
    assert f.update_modes == ["avg"]
    f.as_theano(np.ones(3), 1)
    assert f[v.y] == 4
    with pytest.raises(TypeError, match=r"build_inputs\(\) makes no Data"):
        f.build_inputs(X, 1)


def test_slices_accumulate_the_update_of_an_input(ranks):
    v = Names()
    f = synk.function([v.x, In(v.y, value=0.0, update=v.y + v.x.mean())], [])
    f(np.arange(4.0 * ranks.n), num_slices=2)
    [kept] = f.get_shared()
    np.testing.assert_array_equal(synk.gather(kept), 4 * np.arange(ranks.n) + 1.5)


def test_a_default_may_be_data(ranks):
    v = Names()
    d = synk.data(X)
    f = synk.function([In(v.x, value=d), In(v.y, value=2.0)], (v.x * v.y, "gather"))
    np.testing.assert_array_equal(f(), 2 * X)
    d[:2] = 0
    np.testing.assert_array_equal(f(batch=3), [0, 0, 6])
    np.testing.assert_array_equal(f.as_theano(y=1), d)
    assert [each.shape for each in f.build_inputs()] == [(6,), ()]
    assert "x=..., y=..." in repr(f)


def test_shared_variables_are_values_too(ranks):
    v = Names()
    f = synk.function([v.x], v.x.sum() + v.s.sum() * v.t)
    np.testing.assert_array_equal(f[v.s], [2, 2, 2])
    assert f["t"] == 1 and v.t in f and f["x"] is None
    with pytest.raises(TypeError, match=r"synkhronos.broadcast\(variable, value\)"):
        f[v.s] = np.ones(3)
    with pytest.raises(TypeError, match="give it in the call"):
        f[v.x] = np.ones(3)


def test_the_tools_of_theano_take_it(ranks):
    v = Names()
    f = synk.function([v.x], (v.x * 2 + v.t, "gather"), name="f")
    g = theano.function([v.x], v.x * 2 + v.t)
    assert isinstance(f, theano.compile.function_module.Function)
    assert isinstance(f, synk.functions.Function)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        theano.printing.debugprint(f)
        theano.printing.debugprint(g)
    half = len(text.getvalue()) // 2
    assert text.getvalue()[:half] == text.getvalue()[half:] != ""
    assert [str(node.op) for node in f.maker.fgraph.toposort()] == [
        str(node.op) for node in g.maker.fgraph.toposort()
    ]
    assert f.trust_input is False and f.fn is not None
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(f, protocol)


@pytest.mark.skipif(
    ON_DEVICES, reason="inputs are moved to the device, which the ranks don't share"
)
def test_an_operation_in_place_on_an_input_is_refused(ranks):
    x = T.dvector("x")
    with pytest.raises(ValueError, match="works in place on its input x"):
        synk.function([x], T.inplace.exp_inplace(x), accept_inplace=True)


def test_calls_are_checked(ranks):
    v, made = Names(), theano.sparse.csr_matrix("made")
    rows = theano.sparse.csr_from_dense(T.as_tensor_variable(np.eye(6)))
    f = synk.function(
        [v.x, In(v.y, value=2.0), In(v.z, value=[1.0], update=v.z * 2), made],
        {"a": (v.x * v.y, "gather"), "b": (made * 2, "gather"), "c": (v.z, None)},
        check=True,
    )
    f[v.y] = 3
    value = theano.function([], rows)()
    for factor, kept in ((3, 1), (2, 2), (2, 4)):
        results = f(X, made=value)
        np.testing.assert_array_equal(results["a"], X * factor)
        np.testing.assert_array_equal(results["b"].toarray(), 2 * np.eye(6))
        np.testing.assert_array_equal(results["c"], [kept])
    wrong = synk.function([made], {"d": (theano.sparse.sp_sum(made), "avg")}, check=1)
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match=r"Output 0 of .* is not what serial "):
            wrong(value)


def test_a_function_inside_of_another_is_not_sent(ranks):
    x = T.dvector("x")
    inner = synk.function([x], (x.sum(), "sum"), name="inner")
    outer = synk.function([x], (Call(lambda rows: rows if inner else None)(x), "gather"))
    if ranks.n > 1:
        with pytest.raises(TypeError, match="Function 'inner' can't be pickled or copied"):
            outer(X)
    assert inner(X) == X.sum()


def test_a_swapped_random_state_goes_on(ranks):
    from theano.tensor.shared_randomstreams import RandomStreams

    streams, x = RandomStreams(5), T.dvector("x")
    draw = streams.uniform((1,))
    f = synk.function([x], (x + draw, "gather"))
    state = draw.rng
    other = theano.shared(np.random.RandomState(6))
    g = f.copy(swap={state: other})
    first, second = g(np.zeros(ranks.n)), g(np.zeros(ranks.n))
    assert not np.isclose(first, second).any()
    assert first[ranks.master] == np.random.RandomState(6).uniform() or ranks.master > 0


def test_a_script_may_put_a_function_of_its_own_in_place_of_the_hosts(ranks, monkeypatch):
    called, original = [], _host.library.function

    def counted(*args, **kwargs):
        called.append(kwargs["name"])
        return original(*args, **kwargs)

    monkeypatch.setattr(_host.library, "function", counted)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="mine", on_unused_input="ignore")
    assert f(X) == X.sum() and {*called} == {"mine"}
