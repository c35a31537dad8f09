"""Collectives of many variables take few descriptors, and give each variable its value."""

import os

import numpy as np
import pytest
import theano

import synkhronos as synk
from synkhronos import session as _session
from synkhronos._session import commands

MANY = 70


def used():
    """Return the number of descriptors of each rank."""
    pids = [os.getpid(), *_session._Current.session.worker_pids]
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def variables():
    rows = [5 + number % 3 for number in range(MANY)]
    return [theano.shared(np.full(n, float(i)), f"v{i}") for i, n in enumerate(rows)]


def others(more=0):
    return [np.arange(9.0 + number % 2 + more) + number for number in range(MANY)]


def scatter(all_shared):
    synk.scatter(all_shared, others(), batch=np.arange(9)[::-1])
    parts = [each[:9][::-1] for each in others()]
    return [[part[:3], part[3:6], part[6:]] for part in parts]


def set_one(all_shared):
    before = [each.get_value() for each in all_shared]
    synk.broadcast(all_shared)
    synk.set_value(2, all_shared, others(1))
    return [[value, value, new] for value, new in zip(before, others(1))]


def set_masters(all_shared):
    before = [each.get_value() for each in all_shared]
    synk.broadcast(all_shared)
    synk.set_value(1, all_shared, others(1))
    return [[value, new, value] for value, new in zip(before, others(1))]


def broadcast(all_shared):
    synk.broadcast(all_shared)
    return [[each.get_value()] * 3 for each in all_shared]


def broadcast_values(all_shared):
    synk.broadcast(all_shared, others())
    return [[value] * 3 for value in others()]


def all_gather(all_shared):
    before = [each.get_value() for each in all_shared]
    synk.broadcast(all_shared)
    synk.all_gather(all_shared)
    return [[np.concatenate([value] * 3)] * 3 for value in before]


@pytest.mark.parametrize(
    "collective", [broadcast, broadcast_values, scatter, set_one, set_masters, all_gather]
)
def test_many_variables_take_few_descriptors(no_session, collective):
    synk.fork(3, master_rank=1)
    all_shared = variables()
    before = used()
    for _ in range(2):
        expected = collective(all_shared)
        for rank in range(3):
            for value, each in zip(synk.get_value(rank, all_shared), expected):
                np.testing.assert_array_equal(value, each[rank])
        # They took two in the owner, and one in each other rank, for each variable.
        assert max(now - was for now, was in zip(used(), before)) < MANY // 3
        all_shared = all_shared[::-1]
        synk.broadcast(all_shared, [np.zeros(2)] * MANY)  # smaller, then larger again
        for number, each in enumerate(all_shared):
            each.set_value(np.full(11 + number % 4, float(number)))
    synk.close()


def test_held_values_stay_as_they_are_where_many_are_replaced(no_session):
    synk.fork(2)
    all_shared = variables()
    synk.broadcast(all_shared)
    held = [each.get_value(borrow=True, return_internal_type=True) for each in all_shared]
    kept = [each.copy() for each in held]
    views = [each[1:] for each in held]
    del held
    synk.scatter(all_shared, others(20))  # of other shapes: borrowed arrays are not written to
    synk.all_gather(all_shared)
    for view, each in zip(views, kept):
        np.testing.assert_array_equal(view, each[1:])
    for each, value in zip(all_shared, others(20)):
        np.testing.assert_array_equal(each.get_value(), value)
    synk.close()


def test_hashes_of_thousands_of_variables_fit_into_the_answers_of_workers(no_session):
    """They were one answer, of more than 64 KiB, so `synk.save` failed on several machines."""
    synk.fork(2)
    all_shared = [theano.shared(np.zeros(1)) for _ in range(4000)]
    synk.broadcast(all_shared)
    synk.set_value(1, all_shared[-1], [1.0])
    hashes = _session._Current.session.ask_of_each(commands.Hashes, all_shared)
    assert [len({*each}) for each in hashes] == [1] * 3999 + [2]
    synk.close()
