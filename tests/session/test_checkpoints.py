"""Checkpoints: a run that was saved and loaded is the run that was not interrupted."""

import json

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.helpers import function
from support.layouts import ON_DEVICES, Layout, forked
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk

LAYOUTS = [Layout(2), Layout(1), Layout(3, master=1)]
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(23, 5)
Y = (X.sum(axis=1) > 0).astype("float64")


class Run:
    """Training with Adam, dropout and early stopping, as a script has it."""

    def __init__(self, extensions, streams, seed):
        start = np.random.RandomState(seed)  # a new process begins with other parameters
        x, y = T.dmatrix("x"), T.dvector("y")
        self.params = [
            theano.shared(start.randn(5, 4), "w"),
            theano.shared(start.randn(4), "b"),
            theano.shared(start.randn(4), "v"),
        ]
        w, b, v = self.params
        hidden = T.tanh(T.dot(x, w) + b)
        kept = streams(seed).binomial(hidden.shape, p=0.5, dtype="float64")
        loss = T.nnet.binary_crossentropy(T.nnet.sigmoid(T.dot(hidden * kept, v)), y).mean()
        self.rate = theano.shared(0.05, "rate")
        rule = extensions.update_rules.adam
        self.step = extensions.train.make_train_step([x, y], loss, self.params, rule, self.rate)
        clean = T.nnet.binary_crossentropy(T.nnet.sigmoid(T.dot(hidden, v)), y).mean()
        self.validate = synk.function([x, y], clean)
        self.epoch = theano.shared(0, "epoch")
        self.best_error = theano.shared(np.inf, "best error")
        self.best = [theano.shared(p.get_value(), f"best {p.name}") for p in self.params]
        self.losses = []
        self.saved = [self.step, self.validate, self.rate, self.epoch, self.best_error, *self.best]

    def go_on(self, until):
        """Train to an epoch; stop early where the error has not fallen for two epochs."""
        waited = 0
        while self.epoch.get_value() < until and waited < 3:
            for begin in range(0, len(X), 8):
                rows = slice(begin, min(begin + 8, len(X)))
                self.losses.append(float(self.step(X, Y, batch=rows)))
            error = float(self.validate(X, Y))
            waited += 1
            if error < self.best_error.get_value():
                waited = 0
                self.best_error.set_value(error)
                for kept, param in zip(self.best, self.params):
                    kept.set_value(param.get_value())
            self.rate.set_value(self.rate.get_value() * 0.9)
            synk.broadcast([self.rate])
            self.epoch.set_value(self.epoch.get_value() + 1)
        return self

    def values(self):
        of_master = (*self.best, self.best_error)
        return [
            *(synk.gather(v).tolist() for v in (*self.params, self.rate)),
            *(v.get_value().tolist() for v in of_master),
        ]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.npz")


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
def test_on_another_number_of_ranks(path):
    w, own = theano.shared(np.ones(2), "w"), theano.shared(0.0, "own")
    streams = MRG_RandomStreams(3), RandomStreams(3)
    draws = [each.uniform((1, 2)) for each in streams]
    states = [state for each in streams for state, *_ in each.state_updates]

    def made():
        return function([], [(draw, "gather") for draw in draws], updates=None)

    with forked(Layout(2)):
        f = made()
        f()
        synk.set_value(1, own, 5.0)
        synk.save(path, [w, *states])
        with pytest.warns(synk.PortingWarning, match="only 2 ranks can load it"):
            synk.save(path + ".own.npz", [own])
        expected = f()
    for n in (1, 3):
        with forked(Layout(n)):
            f = made()
            synk.load(path, [w, *states])
            found = f()
            for numbers, before in zip(found, expected):
                assert np.array_equal(numbers[0], before[0])  # rank 0 goes on
                assert len(np.unique(numbers)) == 2 * n
            if n == 3:  # as distribute() gives them
                synk.load(path, [w, *states])
                assert all(map(np.array_equal, f(), found))
            with pytest.raises(ValueError, match="the different values of 2 ranks"):
                synk.load(path + ".own.npz", [own])


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
@pytest.mark.filterwarnings("ignore:save")
def test_a_value_that_was_set_before_is_not_sent_after_a_load(path):
    with forked(Layout(2), follow=True):
        s, t = theano.shared(np.zeros(2), "s"), theano.shared(np.zeros(2), "t")
        f = function([], [(s.sum(), "gather"), (t.sum(), "gather")])
        f()
        synk.set_value(1, s, np.ones(2))
        synk.save(path, [s, t])
        for each in (s, t):
            each.set_value(np.full(2, 5.0))
        synk.load(path, [s, t])
        assert [each.tolist() for each in f()] == [[0, 2], [0, 0]]
        assert not synk.session._Current.session.changes.pending


@pytest.mark.parametrize("streams", [MRG_RandomStreams, RandomStreams])
@pytest.mark.parametrize("n, master", [(1, 0), (2, 0), (3, 1)])
@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
@pytest.mark.sample(2)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    tmp_path, extensions, n, master, streams
):
    path = tmp_path / "run.npz"
    with compiling.quickly():
        with forked(Layout(n, master)):
            whole = Run(extensions, streams, 1).go_on(2)
            synk.save(path, whole.saved)
            before = len(whole.losses)
            expected = whole.go_on(5).values()
        with forked(Layout(n, master)):
            resumed = Run(extensions, streams, 2)
            synk.load(path, resumed.saved)
            assert resumed.epoch.get_value() == 2
            assert resumed.go_on(5).values() == expected
            assert resumed.losses == whole.losses[before:] and len(resumed.losses) == 9
            synk.load(path, resumed.saved)  # also when all ranks have everything
            resumed.losses.clear()
            assert resumed.go_on(5).values() == expected
            assert resumed.losses == whole.losses[before:]


def test_every_kind_of_variable(ranks, path):
    values = [
        np.float64(3.5),
        np.arange(6).reshape(2, 3),
        np.array([np.nan, -0.0, np.inf], "float32"),
        np.zeros((0, 4)),
        np.array([1 + 2j]),
        np.array([True, False]),
        np.arange(24, dtype="int16").reshape(2, 3, 4).T,
    ]
    names = ["w", None, "a/b\\c\0", "w" * 300, "..", "", "größe"]
    variables = [theano.shared(value, name) for value, name in zip(values, names)]
    synk.broadcast(variables[:4])  # the workers lack the others
    synk.save(path, variables)
    with np.load(path, allow_pickle=False) as file:
        assert len(file.files) == 8 and file["0_w"] == 3.5
        assert np.array_equal(file["1"], values[1])
    for variable in variables:
        variable.set_value(np.zeros_like(variable.get_value()))
    synk.load(path, variables)
    for variable, value in zip(variables, values):
        for rank in range(ranks.n):
            found = synk.get_value(rank, variable)
            assert found.dtype == value.dtype and found.tobytes() == value.tobytes("C")


def test_saving_sends_nothing(ranks, path):
    s = theano.shared(np.zeros(2), "s")
    synk.save(path, s)
    s.set_value(np.ones(2))
    f = function([], (s, "gather"))
    assert f().tolist() == [1] * 2 * ranks.n
    synk.load(path, s)
    assert f().tolist() == [0] * 2 * ranks.n


def test_values_that_differ_between_ranks_are_told_once_and_restored(ranks, path):
    s, t = theano.shared(np.zeros(3), "s"), theano.shared(np.zeros((2, 2)), "t")
    for rank, shape in zip(range(ranks.n), [(1, 6), (2, 3), (3, 2)]):
        synk.set_value(rank, [s, t], [np.full(3 + rank, rank), np.zeros(shape)])
    if ranks.n == 1:
        synk.save(path, [s, t])
    else:
        with pytest.warns(synk.PortingWarning, match=r"save\(\): [st] has other values") as told:
            synk.save(path, [s, t])
        assert len(told) == 2 and told[0].filename == __file__
        assert "write synkhronos.broadcast(s) before save()" in str(told[0].message)
        synk.save(path, [s, t])
    expected = synk.gather([s, t])
    synk.broadcast([s, t], [np.ones(1), np.ones((1, 1))])
    synk.load(path, [s, t])
    for found, each in zip(synk.gather([s, t]), expected):
        assert [row.tolist() for row in found] == [row.tolist() for row in each]


def test_states_that_are_equal_stay_equal(ranks, path):
    streams = RandomStreams(1), MRG_RandomStreams(1)
    draws = [(each.uniform((1, 2)), "gather") for each in streams]
    states = [state for each in streams for state, *_ in each.state_updates]
    f = function([], draws)
    synk.broadcast(states)
    synk.save(path, f)
    expected = f()
    for _ in range(2):
        synk.load(path, f)
        for numbers, before in zip(f(), expected):
            assert np.array_equal(numbers, before) and (numbers == numbers[0]).all()


def test_functions_give_their_variables_but_for_data(ranks, path):
    x = T.dvector("x")
    w, rows, c = (theano.shared(np.ones(3), name) for name in ("w", "rows", "c"))
    f = function([], [(w.sum() + rows.sum(), "sum")], sliceable_shareds=[rows])
    g = function([x], updates=[(c, c + x.sum() - x.sum() + w)])
    synk.save(path, [f, g, w])
    with np.load(path) as file:
        kept = json.loads(str(file["about"]))["variables"]
    assert sorted(each["name"] for each in kept) == ["c", "w"]
    g([1.0] * ranks.n)
    synk.save(path, g)
    g([1.0] * ranks.n)
    synk.load(path, g)
    assert synk.gather(c).tolist() == [[2.0] * 3] * ranks.n


def test_other_variables_are_refused_and_nothing_changes(ranks, path):
    w, v = theano.shared(np.ones((2, 2)), "w"), theano.shared(np.ones(2), "v")
    state = RandomStreams(1).uniform().owner.inputs[0]
    synk.save(path, [w, v, state])
    other = {
        "is 'v' (float64, 1-d), and 'w' (float64, 2-d) in the file": [v, w, state],
        "has 2 variables, but": [w, v],
        "the file lacks 'w'": [w, v, state, theano.shared(1.0, "w")],
        "variable 1 is 'u' (float64, 1-d)": [w, theano.shared(np.ones(2), "u"), state],
        "variable 1 is 'v' (float32, 1-d)": [w, theano.shared(np.ones(2, "float32"), "v"), state],
        "variable 1 is 'v' (float64, 2-d)": [w, theano.shared(np.ones((2, 1)), "v"), state],
        "variable 2 is one without a name (float64, 0-d)": [w, v, theano.shared(1.0)],
        "must have length 1 where the variable is broadcastable": [
            theano.shared(np.ones((1, 2)), "w", broadcastable=(True, False)),
            v,
            state,
        ],
    }
    w.set_value(np.zeros((2, 2)))
    for phrase, given in other.items():
        with pytest.raises(ValueError) as caught:
            synk.load(path, given)
        assert phrase in str(caught.value)
    assert w.get_value().tolist() == [[0, 0], [0, 0]]
    synk.load(path, [w, v, state])
    assert synk.get_value(ranks.n - 1, w).tolist() == [[1, 1], [1, 1]]


@pytest.mark.layouts(Layout(2))
@pytest.mark.parametrize(
    "values",
    [[{"array": "other"}], [{"random": ["other", "MT19937", 0, 0, 0.0]}], [None], []],
    ids=range(4),
)
def test_values_of_another_kind_are_refused(ranks, path, values):
    w, state = theano.shared(np.ones(3), "w"), theano.shared(np.random.RandomState(0), "state")
    synk.save(path, [w, state])
    with np.load(path) as file:
        arrays = {**file, "other": np.zeros((3, 3))}
    for number, named in enumerate([r"'w' \(float64, 1-d\)", r"'state' \(a random state\)"]):
        about = json.loads(str(arrays["about"]))
        about["variables"][number]["values"] = values
        np.savez(path, **{**arrays, "about": json.dumps(about)})
        w.set_value(np.zeros(3))
        with pytest.raises(ValueError, match=f"{named} in .*run.npz' can't be read: it is damaged"):
            synk.load(path, [w, state])
        assert not w.get_value().any()


def test_a_sparse_variable_is_refused(ranks, path):
    """It raised AttributeError."""
    sparse = pytest.importorskip("scipy.sparse")
    pytest.importorskip("theano.sparse")
    w = theano.shared(sparse.csr_matrix(np.eye(2)), "w")
    with pytest.raises(
        TypeError, match=r"save\(\) can't take .*, of type .*works on arrays and rand"
    ):
        synk.save(path, w)
