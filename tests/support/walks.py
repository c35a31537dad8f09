"""Random walks of shared variables: updates, borrowed values and collectives, beside a NumPy model.

The model has one array for each rank and variable, and a copy of each result that the script still
holds. After each step all results must be as they were when they were handed out. After each walk
all variables are compared, on all ranks.
"""

import collections

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk

LENGTH = 4  # of the variables at the beginning of a walk


def _functions(make, a, b, c):
    """Return functions, and what each does to the values: (outputs, new values by name)."""
    k = T.iscalar("k")
    updates = {
        "step a": ([a], [(a, a + 1)], lambda v, k: ([v["a"]], {"a": v["a"] + 1})),
        "step b, tail": (
            [b[1:], b.sum()],
            [(b, 2 * b)],
            lambda v, k: ([v["b"][1:], v["b"].sum()], {"b": 2 * v["b"]}),
        ),
        "swap": ([], [(a, b), (b, a)], lambda v, k: ([], {"a": v["b"], "b": v["a"]})),
        "swap, return": (
            [a, b[::-1]],
            [(a, b), (b, a)],
            lambda v, k: ([v["a"], v["b"][::-1]], {"a": v["b"], "b": v["a"]}),
        ),
        "turn": (
            [c],
            [(a, b), (b, c), (c, a)],
            lambda v, k: ([v["c"]], {"a": v["b"], "b": v["c"], "c": v["a"]}),
        ),
        "tail of a": ([], [(a, a[-k:])], lambda v, k: ([], {"a": v["a"][-k:]})),
        "heads": (
            [a],
            [(a, b[:k]), (b, a[:k])],
            lambda v, k: ([v["a"]], {"a": v["b"][:k], "b": v["a"][:k]}),
        ),
        "reverse c": ([c[:k]], [(c, c[::-1])], lambda v, k: ([v["c"][:k]], {"c": v["c"][::-1]})),
        "copy": ([b], [(b, a)], lambda v, k: ([v["b"]], {"b": v["a"]})),
        "view of other": (
            [],
            [(c, a[::-1]), (a, a * 2)],
            lambda v, k: ([], {"c": v["a"][::-1], "a": v["a"] * 2}),
        ),
        "set row": (
            [c],
            [(c, T.set_subtensor(c[0], -7.0))],
            lambda v, k: ([v["c"]], {"c": np.r_[-7.0, v["c"][1:]]}),
        ),
    }
    for name, (outputs, pairs, model) in updates.items():
        yield name, make([k], outputs, pairs), model


class Walk:
    """Variables of one session, functions that use them, and the walks of a random generator."""

    def __init__(self, n, master):
        self.n, self.master = n, master
        self.variables = {name: theano.shared(np.zeros(LENGTH), name) for name in "abc"}
        shared = self.variables.values()
        options = {"on_unused_input": "ignore"}
        self.on_ranks = list(
            _functions(
                lambda inputs, outputs, updates: synk.function(
                    [], [(output, None) for output in outputs], inputs, updates, **options
                ),
                *shared,
            )
        )
        self.in_master = list(
            _functions(
                lambda inputs, outputs, updates: theano.function(
                    inputs, outputs, updates=updates, **options
                ),
                *shared,
            )
        )
        x = T.dvector("x")
        a = self.variables["a"]
        # Only the last rank has a row, so the average is this rank's part alone.
        self.of_one_rank = synk.function(
            [x], [a, (a[1:], "sum")], updates=[(a, a + x.sum())], name="one row"
        )
        self.done = collections.Counter()

    def run(self, seed, steps):
        """Walk from equal values; raise AssertionError, with the steps, where the model differs."""
        self.random = np.random.RandomState(seed)
        self.trail, self.held = [], []
        names = sorted(self.variables)
        values = [self.random.randint(-3, 4, LENGTH).astype("float64") for _ in names]
        synk.broadcast([self.variables[name] for name in names], values)
        self.model = [dict(zip(names, values)) for _ in range(self.n)]
        actions = [
            self.call_on_ranks,
            self.call_on_ranks,
            self.call_in_master,
            self.call_one_row,
            self.borrow,
            self.broadcast,
            self.broadcast_values,
            self.set_value,
            self.set_in_master,
            self.scatter,
            self.all_reduce,
            self.reduce,
            self.all_gather,
            self.forget,
        ]
        for _ in range(steps):
            action = actions[self.random.randint(len(actions))]
            self.done[action.__name__] += 1
            action()
            self.check_held()
            self.shrink()
        self.check_variables()
        self.held.clear()  # what is held keeps shared memory after the session

    def pick(self, most=3):
        names = self.random.permutation(sorted(self.variables))[: self.random.randint(1, most + 1)]
        return list(names), [self.variables[name] for name in names]

    def hold(self, results):
        for result in results:
            if self.random.randint(3):
                self.held.append((result, np.array(result), len(self.trail)))

    def lengths_agree(self, names):
        return all(len({len(v[name]) for v in self.model}) == 1 for name in names)

    def compute(self, model, values, k):
        outputs, new = model(values, k)
        values.update({name: np.array(value) for name, value in new.items()})
        return outputs

    def call_on_ranks(self):
        name, function, model = self.on_ranks[self.random.randint(len(self.on_ranks))]
        k = self.random.randint(1, 4)
        self.trail.append(("call", name, k))
        expected = [self.compute(model, values, k) for values in self.model][self.master]
        self.compare(function(k), expected)

    def call_in_master(self):
        name, function, model = self.in_master[self.random.randint(len(self.in_master))]
        k = self.random.randint(1, 4)
        self.trail.append(("call in master", name, k))
        expected = self.compute(model, self.model[self.master], k)
        self.compare(function(k), expected)

    def compare(self, results, expected):
        for result, value in zip(results, expected):
            np.testing.assert_array_equal(result, value, str(self.trail))
        self.hold(results)

    def call_one_row(self):
        self.trail.append("one row")
        values = self.model[-1]
        expected = [values["a"], values["a"][1:]]
        values["a"] = values["a"] + 1
        self.compare(self.of_one_rank([1.0]), expected)

    def values_for(self, names):
        """Return a value for each name: borrowed, views, or new arrays; and copies of them."""
        values = []
        for _ in names:
            other = self.variables[self.random.choice(sorted(self.variables))]
            borrowed = other.get_value(borrow=True)
            kind = self.random.randint(5)
            if kind == 0:
                value = borrowed
            elif kind == 1:
                value = borrowed[::-1]
            elif kind == 2:
                value = borrowed[: self.random.randint(1, len(borrowed) + 1)]
            elif kind == 3 and self.held:
                value = self.held[self.random.randint(len(self.held))][0]
                value = value if value.ndim and len(value) else np.ones(LENGTH)
            else:
                value = self.random.randint(-3, 4, self.random.randint(1, 6)).astype("float64")
            values.append(value)
        return values, [np.array(value) for value in values]

    def borrow(self):
        names, variables = self.pick(1)
        self.trail.append(("set borrowed", *names))
        # An array of the script's own, which it does not use again.
        own = self.random.randint(-3, 4, LENGTH).astype("float64")
        self.model[self.master][names[0]] = own.copy()
        variables[0].set_value(own, borrow=True)

    def broadcast(self):
        names, variables = self.pick()
        self.trail.append(("broadcast", *names))
        synk.broadcast(variables)
        for values in self.model:
            values.update({name: self.model[self.master][name].copy() for name in names})

    def broadcast_values(self):
        names, variables = self.pick()
        given, copies = self.values_for(names)
        self.trail.append(("broadcast values", *names, [c.tolist() for c in copies]))
        synk.broadcast(variables, given)
        for values in self.model:
            values.update({name: value.copy() for name, value in zip(names, copies)})

    def set_value(self):
        names, variables = self.pick()
        rank = self.random.randint(self.n)
        given, copies = self.values_for(names)
        self.trail.append(("set_value", rank, *names, [c.tolist() for c in copies]))
        synk.set_value(rank, variables, given)
        self.model[rank].update(zip(names, copies))

    def set_in_master(self):
        names, variables = self.pick(1)
        [given], [value] = self.values_for(names)
        self.trail.append(("set", *names, value.tolist()))
        variables[0].set_value(given)
        self.model[self.master][names[0]] = value

    def scatter(self):
        names, variables = self.pick()
        rows = self.random.randint(self.n, 3 * self.n + 1)
        borrowed = self.variables["b"].get_value(borrow=True)
        given = [np.resize(borrowed, rows) if self.random.randint(2) else borrowed for _ in names]
        given = [value if len(value) >= self.n else np.arange(float(rows)) for value in given]
        copies = [np.array(value) for value in given]
        self.trail.append(("scatter", *names, [c.tolist() for c in copies]))
        synk.scatter(variables, given)
        for name, value in zip(names, copies):
            for rank, values in enumerate(self.model):
                first, last = (len(value) * r // self.n for r in (rank, rank + 1))
                values[name] = value[first:last].copy()

    def all_reduce(self):
        names, variables = self.pick()
        if self.lengths_agree(names):
            self.trail.append(("all_reduce", *names))
            synk.all_reduce(variables, "sum")
            for name in names:
                total = sum(values[name] for values in self.model)
                for values in self.model:
                    values[name] = total.copy()

    def reduce(self):
        names, variables = self.pick()
        if self.lengths_agree(names):
            self.trail.append(("reduce", *names))
            synk.reduce(variables, "max")
            for name in names:
                largest = np.max([values[name] for values in self.model], axis=0)
                self.model[self.master][name] = largest

    def all_gather(self):
        names, variables = self.pick()
        self.trail.append(("all_gather", *names))
        synk.all_gather(variables)
        for name in names:
            joined = np.concatenate([values[name] for values in self.model])
            for values in self.model:
                values[name] = joined.copy()

    def forget(self):
        if self.held:
            self.trail.append("drop a result")
            self.held.pop(self.random.randint(len(self.held)))

    def shrink(self):
        """Replace what has grown long, large or empty."""
        for name in sorted(self.variables):
            arrays = [values[name] for values in self.model]
            if any(not 0 < len(v) <= 12 or np.abs(v).max() > 1e9 for v in arrays):
                self.trail.append(("shrink", name))
                synk.broadcast(self.variables[name], np.ones(LENGTH))
                for values in self.model:
                    values[name] = np.ones(LENGTH)

    def check_held(self):
        for result, value, step in self.held:
            np.testing.assert_array_equal(result, value, f"of step {step}: {self.trail}")

    def check_variables(self):
        for name, variable in self.variables.items():
            for rank, values in enumerate(self.model):
                found = synk.get_value(rank, variable)
                np.testing.assert_array_equal(
                    found, values[name], f"{name} on rank {rank}: {self.trail}"
                )
