"""Calls of all sorts, thousands of them: right to the last, and nothing grows.

``SYNKHRONOS_SOAK=100000`` makes so many; a run without ``-n`` shows what each process took.
"""

import gc
import os
from collections import Counter
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, mapped_bytes, say, shares
from support.leaks import names_in_shared_memory
from support.waiting import TEST_SECONDS, end_after

import synkhronos as synk
from synkhronos import WorkerError
from synkhronos import session as _session

CALLS = int(os.environ.get("SYNKHRONOS_SOAK", 10_000))
SAMPLES = 20
LIFE = 500  # calls until functions and shared variables are made anew; samples come right after
ROWS = 3000  # at most, in an input
MEGABYTE = 1 << 20
BAD = 1e6  # a row that makes the rank that has it raise


class Use(NamedTuple):
    """What one process takes."""

    resident: int  # bytes
    mapped: int  # bytes of segments
    descriptors: int
    threads: int


# How much more the least of the last quarter may be than that of the second quarter; how many
# segments there are, and so descriptors, is not the same at each sample. Where ranks tell one
# another of their variables, in 2 MiB for each rank, pages are touched one by one.
ALLOWED = Use(resident=6 * MEGABYTE, mapped=MEGABYTE, descriptors=2, threads=0)


def use(pid):
    process = psutil.Process(pid)
    resident = process.memory_info().rss
    return Use(resident, mapped_bytes(pid), process.num_fds(), process.num_threads())


def raise_if_bad(x):
    if BAD in x:
        raise ArithmeticError("a bad row")
    return x


class Load:
    """Random calls; each result is compared with NumPy's, of the same whole numbers.

    Those of functions now and then also with what Theano computes by itself.
    """

    def __init__(self, n):
        self.n = n
        self.random = np.random.RandomState(7)
        self.made, self.counts = 0, Counter()
        self.data = [synk.data(np.zeros(1)) for _ in range(8)]
        self.rare = [self.refuse, self.raise_on_a_rank, self.replace_data, gc.collect]
        self.collectives = [self.scatter, self.gather, self.all_gather, self.broadcast]
        self.collectives += [self.all_reduce, self.reduce, self.set_and_get]
        self.calls = [self.call, self.call, self.call_with_batch, self.call_in_slices, self.train]
        self.renew()

    def renew(self):
        x, w = T.dvector("x"), T.dscalar("w")
        self.s, self.total = theano.shared(np.zeros(3), "s"), theano.shared(0.0, "total")
        self.parts = [np.zeros(3)] * self.n  # of s, on each rank
        self.trained = 0.0
        outputs = [(x * w, "gather"), (x.sum(), "sum"), (x.size, "sum")]
        self.f = function([x], outputs, bcast_inputs=[w])
        step = synk.ops.all_reduce(x.sum(), "sum")
        self.step = function([x], updates=[(self.total, self.total + step)])
        self.pick = function([], [(self.s, "gather")], sliceable_shareds=[self.s])
        self.check = function([x], (Call(raise_if_bad)(x), "gather"))

    def make(self, count):
        """Make so many calls."""
        for _ in range(count):
            self.made += 1
            if self.made % LIFE == 0:
                self.renew()
            kind = self.random.randint(100)
            few = self.rare if kind == 0 else self.collectives if kind < 30 else self.calls
            do = few[self.random.randint(len(few))]
            self.counts[do.__name__] += 1
            do()

    def kinds(self):
        """Return the names of all that there is to do."""
        return {do.__name__ for do in (*self.rare, *self.collectives, *self.calls)}

    def numbers(self, least=0):
        count = self.random.randint(least, ROWS)
        return self.random.randint(-9, 10, count).astype("float64")

    def argument(self, least=0):
        """Return an input, an array or a Data, and its value."""
        chosen = self.random.randint(2 * len(self.data))
        if chosen >= len(self.data):
            value = self.numbers(least)
            return value, value
        held = self.data[chosen]
        if len(held) < least or self.random.randint(2):
            held.set_value(self.numbers(least))
        return held, np.array(held)

    # Functions.

    def call(self):
        argument, value = self.argument()
        self.compare(self.f(argument, 3.0), value)

    def call_with_batch(self):
        argument, value = self.argument(1)
        batch = self.random.randint(0, len(value), self.random.randint(1, 50))
        self.compare(self.f(argument, 3.0, batch=batch), value[batch])

    def call_in_slices(self):
        argument, value = self.argument()
        self.compare(self.f(argument, 3.0, num_slices=self.random.randint(2, 5)), value)

    def compare(self, found, value):
        all_expected = [(3 * value, value.sum(), len(value))]
        if not self.random.randint(10):
            self.counts["compare with Theano"] += 1
            all_expected.append(self.f.as_theano(value, 3.0))
        for expected in all_expected:
            for result, wanted in zip(found, expected):
                np.testing.assert_array_equal(result, wanted)

    def train(self):
        argument, value = self.argument(self.n)
        self.step(argument)
        self.trained += value.sum()
        assert self.total.get_value() == self.trained

    # Collectives.

    def scatter(self):
        argument, value = self.argument()
        synk.scatter(self.s, argument)
        self.parts = shares(value, self.n)
        batch_s = slice(0, min(map(len, self.parts)), 2)
        [found] = self.pick(batch_s=batch_s)
        np.testing.assert_array_equal(found, np.concatenate([p[batch_s] for p in self.parts]))

    def gather(self):
        np.testing.assert_array_equal(synk.gather(self.s, nd_up=0), np.concatenate(self.parts))
        assert synk.get_lengths(self.s) == [len(part) for part in self.parts]

    def all_gather(self):
        if sum(map(len, self.parts)) > ROWS:  # it grows each time
            return self.broadcast()
        synk.all_gather(self.s)
        self.parts = [np.concatenate(self.parts)] * self.n
        return self.gather()

    def broadcast(self):
        argument, value = self.argument()
        synk.broadcast(self.s, argument)
        self.parts = [value] * self.n

    def set_and_get(self):
        rank, value = self.random.randint(self.n), self.numbers()
        synk.set_value(rank, self.s, value)
        self.parts = [value if r == rank else part for r, part in enumerate(self.parts)]
        for r, part in enumerate(self.parts):
            np.testing.assert_array_equal(synk.get_value(r, self.s), part)

    def all_reduce(self):
        if len(set(map(len, self.parts))) > 1:
            with pytest.raises(ValueError, match="same shape"):
                synk.all_reduce(self.s, "max")
            self.broadcast()
        synk.all_reduce(self.s, "max")
        self.parts = [np.max(self.parts, 0)] * self.n
        np.testing.assert_array_equal(synk.get_value(self.n - 1, self.s), self.parts[0])

    def reduce(self):
        if len(set(map(len, self.parts))) > 1:
            self.broadcast()
        found = synk.reduce(self.s, "sum", in_place=False)
        np.testing.assert_array_equal(found, np.sum(self.parts, 0))

    # What is rare.

    def refuse(self):
        with pytest.raises(ValueError):
            self.f(self.numbers(1), 3.0, batch=[ROWS])
        with pytest.raises(TypeError):
            self.f("no array", 3.0)

    def raise_on_a_rank(self):
        value = self.numbers(1)
        value[self.random.randint(len(value))] = BAD
        with pytest.raises(WorkerError, match="a bad row"):
            self.check(value)
        value[value == BAD] = 0
        np.testing.assert_array_equal(self.check(value), self.check.as_theano(value))

    def replace_data(self):
        self.data[self.random.randint(len(self.data))] = synk.data(self.numbers())


def test_a_thousand_calls_are_right(no_session):
    synk.fork(2)
    load = Load(2)
    load.make(1000)
    for do in load.rare:
        do()
    assert load.kinds() - {do.__name__ for do in load.rare} <= set(load.counts)


@pytest.mark.slow("makes 10,000 calls in each layout")
@pytest.mark.parametrize("n, master", [(2, 0), (3, 1)])
def test_nothing_grows(request, no_session, n, master):
    end_after(TEST_SECONDS * max(1, CALLS // 10_000))
    names = names_in_shared_memory()
    synk.fork(n, master_rank=master)
    pids = [os.getpid(), *_session._Current.session.worker_pids]
    load, samples = Load(n), []
    for _ in range(SAMPLES):
        load.make(CALLS // SAMPLES)
        gc.collect()
        load.call()  # carries what was released to the workers
        samples.append([use(pid) for pid in pids])
    assert names_in_shared_memory() <= names
    quarter = SAMPLES // 4
    for number, pid in enumerate(pids):
        uses = [sample[number] for sample in samples]
        second = Use(*map(min, zip(*uses[quarter : 2 * quarter])))
        last = Use(*map(min, zip(*uses[-quarter:])))
        who = "worker" if number else "master"
        say(request, f"{who} in the second quarter: {second}, in the last: {last}")
        for what, was, now, more in zip(Use._fields, second, last, ALLOWED):
            assert now - was <= more, f"{what} of the {who}, process {pid}: {was} to {now}"
    say(request, f"{load.made} calls: {dict(load.counts)}")
    assert set(load.counts) == {*load.kinds(), "compare with Theano"}
