"""Any sequence of public calls, on any number of ranks, leaves what plain NumPy says it should.

A hypothesis state machine forks, makes functions, Data and shared variables, calls functions and
collectives, makes mistakes on purpose, closes and forks again. The model beside it is one NumPy
array for each rank and variable. All numbers are small integers, so that results are exact; but for
averages, which are compared with a tolerance and then taken over by the model.

``SYNKHRONOS_FUZZ=1000`` looks for new failures in so many random sequences. One that is found is
printed as a program, and belongs below as a test.
"""

import gc
import os
from collections import Counter
from typing import Callable, NamedTuple, Tuple

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from support.expected import batches, reduced, selected
from support.helpers import Call, function, say, shares
from support.waiting import TEST_SECONDS, end_after

import synkhronos as synk
from synkhronos import SessionError, WorkerError
from synkhronos import session as _session

FUZZ = int(os.environ.get("SYNKHRONOS_FUZZ", 0))
SETTINGS = settings(
    max_examples=FUZZ or 60,
    stateful_step_count=40,
    derandomize=not FUZZ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SOME = st.lists(st.sampled_from("vuzkd"), min_size=1, max_size=3, unique=True)  # variables
SOME_WITH_ROWS = st.lists(st.sampled_from("vukd"), min_size=1, max_size=3, unique=True)
REFUSED = (TypeError, ValueError, SessionError)
LARGE = 1e6  # what grows beyond is replaced, long before numbers are no more exact
BAD = 99  # a number in the rows of a rank that raises
done = Counter()  # how often each thing was done and compared, over all examples


# What has to be among that, for the kinds of functions see KINDS.
ACTIONS = {
    *("fork", "close", "function", "function dropped", "distribute", "set in the master"),
    *("data", "data value", "data length", "data write", "data dropped"),
    *("broadcast", "scatter", "gather", "all_gather", "reduce", "reduce to new", "all_reduce"),
    *("set_value", "get_value", "get_shapes, get_lengths", "look at all values"),
    *("old values held", "broadcast of borrowed values"),
    "errors of ranks",
}


def raise_if_bad(x):
    if BAD in x:
        raise ArithmeticError("a bad row")
    return x


# Functions: graphs of scattered rows x, a number w and the shared variables of the machine, and
# what each computes on one rank.


class Kind(NamedTuple):
    """A function: how it is made, and what a rank computes from its rows."""

    make: Callable  # (x, w, variables) -> keywords of synk.function
    compute: Callable  # (rows, w, values) -> outputs, {variable: new value}
    modes: Tuple = ()
    updates: Tuple = ()  # (variable, mode)
    uses: str = ""
    scatters: bool = False


KINDS = {
    "sums": Kind(
        lambda x, w, v: {
            "outputs": [(x * w, "gather"), (x.sum(), "c_sum"), (x.sum(0), None), (x.sum(0), "avg")]
        },
        lambda x, w, v: ([x * w, x.sum(), x.sum(0), x.sum(0)], {}),
        modes=("gather", "c_sum", None, "avg"),
        scatters=True,
    ),
    "extremes": Kind(
        lambda x, w, v: {
            "outputs": [(x.max(0), "max"), (x.min() + w, "min")],
            "updates": [(v["u"], T.maximum(v["u"], x.max()), "max"), (v["v"], v["v"] + w, "min")],
        },
        lambda x, w, v: (
            [x.max(0), x.min() + w],
            {"u": np.maximum(v["u"], x.max()), "v": v["v"] + w},
        ),
        modes=("max", "min"),
        updates=(("u", "max"), ("v", "min")),
        uses="uv",
        scatters=True,
    ),
    "adding": Kind(
        lambda x, w, v: {
            "outputs": (x.sum(), "sum"),
            "updates": [(v["v"], v["v"] + x.sum() * w, "sum"), (v["z"], v["z"] - w, "sum")],
        },
        lambda x, w, v: ([x.sum()], {"v": v["v"] + x.sum() * w, "z": v["z"] - w}),
        modes=("sum",),
        updates=(("v", "sum"), ("z", "sum")),
        uses="vz",
        scatters=True,
    ),
    "swapping": Kind(
        lambda x, w, v: {"updates": [(v["u"], v["v"]), (v["v"], v["u"])]},
        lambda x, w, v: ([], {"u": v["v"], "v": v["u"]}),
        updates=(("u", "avg"), ("v", "avg")),
        uses="uv",
    ),
    "reading": Kind(
        lambda x, w, v: {
            "outputs": [
                (v["v"] * w, "gather"),
                (v["k"].sum(), "sum"),
                (v["z"], None),
                (v["z"], "max"),
                (w * 2, "prod"),
            ]
        },
        lambda x, w, v: ([v["v"] * w, v["k"].sum(), v["z"], v["z"], w * 2.0], {}),
        modes=("gather", "sum", None, "max", "prod"),
        uses="vkz",
    ),
    "picking": Kind(
        lambda x, w, v: {
            "outputs": [(v["d"] * w, "gather"), (v["d"].sum(0), "sum")],
            "updates": [(v["z"], v["z"] + v["d"].sum(), "sum")],
            "sliceable_shareds": [v["d"]],
        },
        lambda d, w, v: ([d * w, d.sum(0)], {"z": v["z"] + d.sum()}),
        modes=("gather", "sum"),
        updates=(("z", "sum"),),
        uses="dz",
    ),
    "raising": Kind(
        lambda x, w, v: {"outputs": (Call(raise_if_bad, T.dmatrix)(x) * w, "gather")},
        lambda x, w, v: ([raise_if_bad(x) * w], {}),
        modes=("gather",),
        scatters=True,
    ),
}


# Sequences set variables in the master alone.
pytestmark = pytest.mark.filterwarnings("ignore::synkhronos.PortingWarning")


class Variable:
    """A shared variable, and what each rank should have in it."""

    def __init__(self, name, value):
        self.shared = theano.shared(value, name)
        self.values = [value]  # the master's alone, while the workers do not know the variable
        self.is_known = False


class Made(NamedTuple):
    """A function of the session, and of which kind it is."""

    call: object
    kind: Kind
    name: str


class Machine(RuleBasedStateMachine):
    """The session, and beside it the values that there should be."""

    def __init__(self):
        super().__init__()
        self.n = self.master = 0
        self.functions, self.data, self.held = [], [], []
        self.variables = {
            "v": Variable("v", np.zeros(2)),
            "u": Variable("u", np.ones(2)),
            "z": Variable("z", np.array(3.0)),
            "k": Variable("k", np.arange(3)),
            "d": Variable("d", np.arange(8.0).reshape(4, 2)),
        }

    # What the model knows.

    def learn(self, names):
        """Note that the workers have these variables from now on, with the master's values."""
        for name in names:
            variable = self.variables[name]
            if not variable.is_known:
                variable.is_known = True
                variable.values = [variable.values[0]] * self.n

    def check_variables(self):
        for result, value in self.held:
            assert_same(result, value, "an old value that was handed out")
        for name, variable in self.variables.items():
            ranks = range(self.n) if variable.is_known else []
            for rank in ranks:
                assert_same(synk.get_value(rank, variable.shared), variable.values[rank], name)
            own = variable.values[self.master if variable.is_known else 0]
            assert_same(variable.shared.get_value(), own, name)

    def replace_large(self):
        """Start anew with what has grown."""
        for variable in self.variables.values():
            if max(np.abs(value).max(initial=0) for value in variable.values) > LARGE:
                small = np.ones_like(variable.values[0])
                synk.broadcast(variable.shared, small)
                variable.values = [small] * self.n

    # Rules.

    def is_open(self):
        return self.n > 0

    @precondition(lambda self: not self.is_open())
    @rule(
        n=st.integers(1, 4),
        master=st.integers(0, 3),
        names=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=5, unique=True),
    )
    def fork(self, n, master, names):
        done["fork"] += 1
        assert synk.fork(n, master_rank=master % n) == n
        self.n, self.master = n, master % n
        for name in names:
            self.make(name)

    @precondition(is_open)
    @rule(really=st.integers(0, 5))
    def close(self, really):
        if really:  # or sessions would be short
            return
        done["close"] += 1
        self.check_variables()
        pids = _session._Current.session.worker_pids
        synk.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        for variable in self.variables.values():
            variable.values = [variable.values[self.master if variable.is_known else 0]]
            variable.is_known = False
        self.functions, self.data, self.held, self.n = [], [], [], 0

    @precondition(is_open)
    @rule(name=st.sampled_from(sorted(KINDS)))
    def make_function(self, name):
        self.make(name)

    def make(self, name):
        done["function"] += 1
        kind = KINDS[name]
        x, w = T.dmatrix("x"), T.dscalar("w")
        shared = {name: variable.shared for name, variable in self.variables.items()}
        made = function(
            [x] if kind.scatters else [],
            bcast_inputs=[w],
            on_unused_input="ignore",
            **kind.make(x, w, shared),
        )
        self.functions.append(Made(made, kind, name))

    @precondition(lambda self: len(self.functions) > 3)
    @rule(data=st.data())
    def drop_function(self, data):
        done["function dropped"] += 1
        self.functions.pop(data.draw(st.integers(0, len(self.functions) - 1)))
        gc.collect()

    @precondition(is_open)
    @rule()
    def distribute(self):
        done["distribute"] += 1
        synk.distribute()
        for made in self.functions:
            self.learn(made.kind.uses)

    @precondition(is_open)
    @rule(data=st.data(), rows=st.integers(0, 9))
    def make_data(self, data, rows):
        done["data"] += 1
        value = numbers(data, (rows, 2))
        self.data.append([synk.data(value), value])

    @precondition(lambda self: self.data)
    @rule(data=st.data(), order=st.permutations(["value", "length", "write"]))
    def change_data(self, data, order):
        pair = data.draw(st.sampled_from(self.data))
        for how in order:
            done[f"data {how}"] += 1
            held, value = pair
            rows = data.draw(st.integers(1, 9))
            new = numbers(data, (rows, 2))
            if how == "value":
                held.set_value(new)
            elif how == "length":
                held.set_length(rows)
                keep = min(rows, len(value))
                new[:keep] = value[:keep]
                held[keep:] = new[keep:]
            else:
                new = value + 1
                held.data += 1
            pair[1] = new
            assert_same(np.asarray(held), new, "Data")

    @precondition(lambda self: self.data)
    @rule(data=st.data())
    def drop_data(self, data):
        done["data dropped"] += 1
        self.data.pop(data.draw(st.integers(0, len(self.data) - 1)))

    @precondition(is_open)
    @rule(data=st.data(), name=st.sampled_from("vuzkd"))
    def set_in_the_master(self, data, name):
        """As any script does: the workers' values stay."""
        done["set in the master"] += 1
        variable = self.variables[name]
        rank = self.master if variable.is_known else 0
        new = numbers(data, variable.values[rank].shape).astype(variable.values[rank].dtype)
        variable.shared.set_value(new)
        variable.values[rank] = new

    # Calls.

    @precondition(lambda self: self.functions)
    @rule(data=st.data(), count=st.integers(3, 10))
    def make_calls(self, data, count):
        for _ in range(count):
            self.make_call(data)
        self.replace_large()

    def make_call(self, data):
        made = data.draw(st.sampled_from(self.functions))
        kind, w, keywords, arguments, rows = made.kind, data.draw(st.integers(1, 3)), {}, [], None
        self.learn(kind.uses)
        if kind.scatters:
            if self.data and data.draw(st.booleans()):
                argument, x = data.draw(st.sampled_from(self.data))
            else:
                argument = x = numbers(data, (data.draw(st.integers(0, 9)), 2))
            keywords["batch"] = data.draw(batches(len(x)))
            rows = selected(x, keywords["batch"])
            form = data.draw(st.sampled_from(["as it is", "list", "minibatch"]))
            if form == "list" and x.size:
                argument = x.tolist()
            elif form == "minibatch" and len(rows) <= len(x):
                argument = synk.data(x, minibatch=True)
                rows = x[: len(rows)]  # in order, whatever was selected
            arguments.append(argument)
            rows = shares(rows, self.n)
        elif made.name == "picking":
            rows = self.variables["d"].values
            shortest = min(map(len, rows))
            picks = st.lists(st.integers(0, shortest - 1), max_size=5) if shortest else st.nothing()
            picked = keywords["batch_s"] = data.draw(st.none() | picks)
            if picked is not None:
                rows = [own[np.array(picked, int)] for own in rows]
        if rows is not None:
            keywords["num_slices"] = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        if len(kind.modes) > 1:
            subset = st.none() | st.lists(st.sampled_from(range(len(kind.modes))), min_size=1)
            keywords["output_subset"] = data.draw(subset)
        for _ in range(data.draw(st.integers(1, 2))):
            done[f"call of {made.name}"] += 1
            self.call_and_compare(made, rows, w, arguments, keywords)

    def call_and_compare(self, made, rows, w, arguments, keywords):
        kind, subset = made.kind, keywords.get("output_subset")
        if made.name == "extremes" and not any(map(len, rows)):
            if subset is None:  # what is not asked for may or may not be computed
                done["errors of ranks"] += 1
                with pytest.raises(WorkerError):
                    made.call(*arguments, w, **keywords)
            return
        expected, states = self.expect(kind, rows, w, keywords.get("num_slices", 1))
        found = made.call(*arguments, w, **keywords)
        for name, values in states.items():
            self.variables[name].values = values
        if not isinstance(found, list):
            found = [found]
        chosen = range(len(kind.modes)) if subset is None else sorted(set(subset))
        assert len(found) == len(chosen)
        for result, i in zip(found, chosen):
            assert_same(result, expected[i], made.name, exactly=kind.modes[i] != "avg")

    def expect(self, kind, rows, w, num_slices):
        """Return the outputs, and the values of each updated variable on all ranks.

        The rows are those of each rank, of the input or of the variable d, or None.
        """
        known = [name for name, variable in self.variables.items() if variable.is_known]
        own = [
            {name: self.variables[name].values[rank] for name in known} for rank in range(self.n)
        ]
        nothing = rows is not None and not any(map(len, rows))
        parts, weights = {}, {}
        states = {name: [values[name] for values in own] for name, _ in kind.updates}
        for rank in range(self.n):
            cuts = [None]
            if rows is not None:
                if len(rows[rank]) == 0 and not (nothing and rank == self.master):
                    continue
                cuts = [cut for cut in shares(rows[rank], num_slices) if len(cut)] or [rows[rank]]
            found = [kind.compute(cut, w, own[rank]) for cut in cuts]
            counts = [1 if cut is None else max(len(cut), 1) for cut in cuts]
            weights[rank] = sum(counts)
            columns = zip(*(outputs for outputs, _ in found))
            parts[rank] = [
                together(mode, column, counts) for mode, column in zip(kind.modes, columns)
            ]
            for name, mode in kind.updates:
                states[name][rank] = together(mode, [new[name] for _, new in found], counts)
        source = self.master if self.master in parts else min(parts)
        outputs = [
            parts[source][i]
            if mode is None
            else reduced(mode, [part[i] for part in parts.values()], list(weights.values()))
            for i, mode in enumerate(kind.modes)
        ]
        return outputs, states

    # Collectives.

    @precondition(is_open)
    @rule(data=st.data(), names=SOME)
    def broadcast(self, data, names):
        done["broadcast"] += 1
        self.learn(names)
        values = None
        if data.draw(st.booleans()):
            values = [self.new_value(data, name) for name in names]
        synk.broadcast(*self.given(names, values))
        for i, name in enumerate(names):
            variable = self.variables[name]
            variable.values = [
                variable.values[self.master] if values is None else values[i]
            ] * self.n

    @precondition(is_open)
    @rule(data=st.data(), names=SOME_WITH_ROWS)
    def scatter(self, data, names):
        done["scatter"] += 1
        self.learn(names)
        rows = data.draw(st.integers(0, 7))
        values = [self.new_value(data, name, rows) for name in names]
        batch = data.draw(batches(rows))
        synk.scatter(*self.given(names, values), batch=batch)
        for name, value in zip(names, values):
            self.variables[name].values = shares(selected(value, batch), self.n)

    @precondition(is_open)
    @rule(names=SOME, nd_up=st.integers(0, 1))
    def gather(self, names, nd_up):
        done["gather"] += 1
        if nd_up == 0:
            names = [name for name in names if name != "z"] or ["v"]
        self.learn(names)
        found = synk.gather(*self.given(names), nd_up=nd_up)
        for name, result in zip(names, found if len(names) > 1 else [found]):
            values = self.variables[name].values
            if len({value.shape[1 - nd_up :] for value in values}) > 1:
                assert isinstance(result, list) and len(result) == self.n
                for one, value in zip(result, values):
                    assert_same(one, value, name)
            else:
                assert_same(result, np.stack(values) if nd_up else np.concatenate(values), name)

    @precondition(is_open)
    @rule(names=SOME_WITH_ROWS)
    def all_gather(self, names):
        self.learn(names)
        if sum(len(value) for name in names for value in self.variables[name].values) > 60:
            return  # it would double with each call
        done["all_gather"] += 1
        synk.all_gather(*self.given(names))
        for name in names:
            variable = self.variables[name]
            variable.values = [np.concatenate(variable.values)] * self.n

    @precondition(is_open)
    @rule(
        names=SOME,
        op=st.sampled_from(["avg", "sum", "prod", "min", "max"]),
        verb=st.sampled_from(["reduce", "reduce to new", "all_reduce"]),
    )
    def reduce(self, names, op, verb):
        self.learn(names)
        all_values = [self.variables[name].values for name in names]
        if op == "prod" and max(np.abs(v).max(initial=0) for vs in all_values for v in vs) > 100:
            return  # it would not be exact
        done[verb] += 1
        call = synk.all_reduce if verb == "all_reduce" else synk.reduce
        keywords = {"in_place": False} if verb == "reduce to new" else {}
        is_unequal = any(len({value.shape for value in values}) > 1 for values in all_values)
        if is_unequal or (op == "avg" and "k" in names):
            done[f"{verb} refused"] += 1
            with pytest.raises(REFUSED):
                call(*self.given(names), op=op, **keywords)
            return
        result = call(*self.given(names), op=op, **keywords)
        for i, (name, values) in enumerate(zip(names, all_values)):
            expected = reduced(op, values, [1] * self.n)
            if verb == "reduce to new":
                one = result[i] if len(names) > 1 else result
                assert_same(one, expected, name, exactly=op != "avg")
                continue
            if op == "avg":
                rounded = synk.get_value(self.master, self.variables[name].shared)
                assert_same(rounded, expected, name, exactly=False)
                expected = rounded
            if verb == "all_reduce":
                self.variables[name].values = [expected] * self.n
            else:
                self.variables[name].values[self.master] = expected
        self.replace_large()

    @precondition(is_open)
    @rule(data=st.data(), names=SOME, rank=st.integers(0, 3))
    def set_value(self, data, names, rank):
        done["set_value"] += 1
        self.learn(names)
        values = [self.new_value(data, name) for name in names]
        synk.set_value(rank % self.n, *self.given(names, values))
        for name, value in zip(names, values):
            self.variables[name].values[rank % self.n] = value

    @precondition(is_open)
    @rule(names=SOME, rank=st.integers(0, 3))
    def get_value(self, names, rank):
        done["get_value"] += 1
        self.learn(names)
        found = synk.get_value(rank % self.n, *self.given(names))
        for name, result in zip(names, found if len(names) > 1 else [found]):
            assert_same(result, self.variables[name].values[rank % self.n], name)

    @precondition(is_open)
    @rule(names=SOME_WITH_ROWS)
    def get_shapes(self, names):
        done["get_shapes, get_lengths"] += 1
        self.learn(names)
        shapes, lengths = synk.get_shapes(*self.given(names)), synk.get_lengths(*self.given(names))
        if len(names) == 1:
            shapes, lengths = [shapes], [lengths]
        for name, of_ranks, firsts in zip(names, shapes, lengths):
            assert of_ranks == [value.shape for value in self.variables[name].values]
            assert firsts == [shape[0] for shape in of_ranks]

    def given(self, names, values=None):
        """Return arguments: the variables, and values if there are some; bare where it is one."""
        variables = [self.variables[name].shared for name in names]
        if len(names) == 1:
            variables, values = variables[0], None if values is None else values[0]
        return (variables,) if values is None else (variables, values)

    def new_value(self, data, name, rows=None):
        like = self.variables[name].values[0]
        if rows is None:
            rows = data.draw(st.integers(0, 5))
        return numbers(data, (rows, *like.shape[1:])[: like.ndim]).astype(like.dtype)

    # Mistakes.

    @precondition(lambda self: any(made.name == "raising" for made in self.functions))
    @rule(data=st.data(), rows=st.integers(1, 9))
    def raise_on_a_rank(self, data, rows):
        done["errors of ranks"] += 1
        made = next(made for made in self.functions if made.name == "raising")
        x = numbers(data, (rows, 2))
        x[data.draw(st.integers(0, rows - 1)), 1] = BAD
        [rank] = [rank for rank, share in enumerate(shares(x, self.n)) if BAD in share]
        with pytest.raises(WorkerError, match="a bad row") as caught:
            made.call(x, 1.0)
        assert (caught.value.rank, caught.value.remote_type) == (rank, "ArithmeticError")
        self.check_variables()

    @precondition(is_open)
    @rule(name=st.sampled_from("vu"), data=st.data())
    def hold_an_old_value(self, name, data):
        """Keep what Theano hands out when an update in the master replaces a value."""
        done["old values held"] += 1
        variable = self.variables[name]
        self.learn([name])
        synk.get_lengths(variable.shared)
        step = theano.function(
            [],
            variable.shared,
            updates=[(variable.shared, variable.shared + 1)],
            mode="FAST_COMPILE",
        )
        variable.values = list(variable.values)
        own = variable.values[self.master]
        variable.values[self.master] = own + 1
        self.held.append((step(), own.copy()))

    @precondition(is_open)
    @rule(names=SOME_WITH_ROWS, back=st.booleans())
    def broadcast_borrowed(self, names, back):
        """Give each variable the value of the next one, borrowed."""
        done["broadcast of borrowed values"] += 1
        names = [name for name in names if name in "vu"]
        if not names:
            return
        step = -1 if back else 1
        others = names[1:] + names[:1]
        shared = [self.variables[name].shared for name in names]
        values = [self.variables[name].shared.get_value(borrow=True)[::step] for name in others]
        copies = [value.copy() for value in values]
        synk.broadcast(shared, values)
        for name, value in zip(names, copies):
            self.variables[name].is_known = True
            self.variables[name].values = [value] * self.n

    @precondition(is_open)
    @rule()
    def look(self):
        done["look at all values"] += 1
        self.check_variables()

    def teardown(self):
        try:
            if self.is_open():
                self.check_variables()
        finally:
            if _session._Current.session is not None:
                synk.close()


def together(mode, of_slices, counts):
    """Return one value for those of the slices; as it is where there is one slice."""
    return of_slices[0] if len(of_slices) == 1 else reduced(mode, of_slices, counts)


def numbers(data, shape):
    """Draw an array of small integers, as float64."""
    seed = data.draw(st.integers(0, 99))
    return np.random.RandomState(seed).randint(-3, 4, shape).astype("float64")


def assert_same(found, expected, what, exactly=True):
    found = np.asarray(found)
    assert found.dtype == np.asarray(expected).dtype, what
    if exactly:
        np.testing.assert_array_equal(found, expected, err_msg=what)
    else:
        assert found.shape == np.shape(expected), what
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=what)


def test_a_few_sequences_of_calls(no_session):
    done.clear()
    run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=5))
    assert len(done) > 10


@pytest.mark.slow("makes 2,400 calls, and compares all variables of all ranks")
def test_any_sequence_of_calls(request, no_session):
    end_after(TEST_SECONDS * max(1, FUZZ // 60))
    done.clear()
    run_state_machine_as_test(Machine, settings=SETTINGS)
    say(request, f"{sum(done.values())} actions: " + ", ".join(f"{k} {n}" for k, n in done.items()))
    assert set(done) >= ACTIONS | {f"call of {name}" for name in KINDS}
