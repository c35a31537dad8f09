"""The all-reduce between machines, with messages that take any time, against sums in NumPy."""

import collections
import random

import numpy as np
import pytest
from support.expected import reduced

from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos.comm.mpi.all_reduce import CHUNK, NetworkAllReduce, reduce_all

SHAPES = [(3,), (100, 100), (300, 700), (), (0,), (CHUNK + 5,), (5, 5)]
DTYPES = ["float32", "float64", "float32", "int64", "float32", "float32", "float16"]


class Wire:
    """Messages between machines that stay on the way for some looks."""

    def __init__(self, seed):
        self._random, self._sent = random.Random(seed), collections.defaultdict(collections.deque)

    def of(self, machine, n_machines):
        return Machine(self, machine, n_machines)

    def send(self, source, target, buffer, tag):
        message = [buffer.copy(), self._random.randrange(4)]
        self._sent[source, target, tag].append(message)
        return Request(lambda: True)

    def receive(self, source, target, buffer, tag):
        queue = self._sent[source, target, tag]

        def has_come():
            if not queue or queue[0][1] > 0:
                for message in list(queue)[:1]:
                    message[1] -= 1
                return False
            buffer[...] = queue.popleft()[0]
            return True

        return Request(has_come)

    @property
    def is_empty(self):
        return not any(self._sent.values())


class Machine:
    def __init__(self, wire, machine, n_machines):
        self._wire, self.machine, self.n_machines = wire, machine, n_machines

    def send(self, machine, buffer, tag):
        return self._wire.send(self.machine, machine, buffer, tag)

    def receive(self, machine, buffer, tag):
        return self._wire.receive(machine, self.machine, buffer, tag)


class Request:
    def __init__(self, test):
        self._test = test

    @property
    def is_done(self):
        return self._test()


def values(seed, n_machines):
    rng = np.random.RandomState(seed)
    return [
        [np.asarray(4 * rng.randn(*shape)).astype(dtype) for shape, dtype in zip(SHAPES, DTYPES)]
        for _ in range(n_machines)
    ]


def run(data, op, divisor, compress=False, seed=0):
    wire = Wire(seed)
    ops = [op if array.dtype.kind == "f" else "sum" for array in data[0]]
    n = len(data)
    works = [NetworkAllReduce(wire.of(m, n), data[m], ops, divisor, 10, compress) for m in range(n)]
    chooser = random.Random(seed)
    for _ in range(100_000):
        if not works:
            break
        work = chooser.choice(works)
        if work.progress():
            works.remove(work)
    assert not works
    assert wire.is_empty


@pytest.mark.parametrize("n_machines", [1, 2, 3, 5])
@pytest.mark.parametrize("op", OPERATIONS)
def test_each_machine_has_the_reduction_in_the_order_of_the_machines(n_machines, op):
    data = values(0, n_machines)
    wanted = [np.empty_like(array) for array in data[0]]
    ops = [op if array.dtype.kind == "f" else "sum" for array in data[0]]
    reduce_all([[a.copy() for a in each] for each in data], ops, n_machines, False, wanted)
    for position, name in enumerate(ops):
        whole = reduced(name, [d[position].astype("f8") for d in data], [1] * n_machines)
        np.testing.assert_allclose(wanted[position], whole, rtol=4e-3, atol=2e-2)
    run(data, op, n_machines)
    for each in data:
        for array, expected in zip(each, wanted):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_messages_changes_no_bit(seed):
    once, again = values(1, 3), values(1, 3)
    run(once, "sum", 1)
    run(again, "sum", 1, seed=seed)
    for one, other in zip(once, again):
        for array, expected in zip(one, other):
            assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n_machines", [1, 2, 3])
def test_compressed_floats_are_rounded_once_on_each_way(n_machines):
    data = values(2, n_machines)
    halves = [[array.astype("f2") for array in each] for each in data]
    run(data, "avg", n_machines, compress=True)
    for position, dtype in enumerate(DTYPES):
        for each in data:
            np.testing.assert_array_equal(each[position], data[0][position])
        if dtype.startswith("f"):
            total = np.sum([half[position].astype("f4") for half in halves], 0, dtype="f4")
            expected = (total / n_machines).astype("f2")
            np.testing.assert_allclose(data[0][position], expected, rtol=1e-3)


@pytest.mark.parametrize("n_machines", [2, 3, 5, 12])
@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 20, (1 << 20) + 8, 3 << 20])
def test_each_machine_sends_as_much_as_the_others(n_machines, nbytes):
    """With chunks of one size the first four of twelve sent 1 MiB 3.5 times, the others once."""
    wire, sent = Wire(0), collections.Counter()
    send = wire.send

    def count(source, target, buffer, tag):
        sent[source] += buffer.nbytes
        return send(source, target, buffer, tag)

    wire.send = count
    data = [[np.ones(nbytes // 8)] for _ in range(n_machines)]
    works = [
        NetworkAllReduce(wire.of(m, n_machines), data[m], ["sum"], 1, 10) for m in range(n_machines)
    ]
    while works:
        works = [work for work in works if not work.progress()]
    assert max(sent.values()) < 1.02 * 2 * (n_machines - 1) / n_machines * nbytes
    assert all((each == n_machines).all() for [each] in data)
