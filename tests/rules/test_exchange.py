"""Exchanges between the ranks of a rule."""

import os

import numpy as np
import pytest
import theano
from support.groups import run

from synkhronos.rules.bsp import Sums, swap
from synkhronos.rules.variables import Flat


def halves(group):
    """Return what ranks with numbers in 16 and 32 bits have after each exchange."""
    found = []
    for strategy in ("ar", "asa32"):
        w = theano.shared(np.float16([1 if group.rank else 2048, 7]), "w")
        v = theano.shared(np.full(2, group.rank, np.float32), "v")
        Sums(group, strategy, [w, v], [w, v]).compute(1)
        found.append((w.get_value().dtype.name, w.get_value().tolist(), v.get_value().tolist()))
    return found


def test_float16_is_summed_in_float32_and_rounded_once():
    assert run(3, halves) == [[("float16", [2050.0, 21.0], [3.0, 3.0])] * 2] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_swap_their_values(size):
    def exchange(group):
        w = theano.shared(np.full(50_000, group.rank, np.float32), "w")
        swap(group, Flat([w]), group.rank ^ 1)
        return np.unique(w.get_value()).tolist()

    assert run(size, exchange) == [[rank ^ 1] for rank in range(size)]


def test_a_child_of_a_rank_writes_into_its_own_values():
    """A process that a model forks has its own values of the model's variables."""

    def fork(group):
        w = theano.shared(np.zeros(3), "w")
        flat = Flat([w], group.allocate)
        flat.read()
        flat.write()
        pid = os.fork()
        if pid == 0:
            w.get_value(borrow=True)[...] = 1.0
            os._exit(int(w.get_value().sum()))
        return os.waitpid(pid, 0)[1] >> 8, w.get_value().tolist()

    assert run(2, fork) == [(3, [0.0, 0.0, 0.0])] * 2
