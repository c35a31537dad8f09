"""Arrays that were handed out keep their values: collectives write to memory nothing else holds."""

import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.layouts import ON_DEVICES, Layout, forked

import synkhronos as synk

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="values on devices are copied"),
    pytest.mark.usefixtures("compiled_if_thorough"),
]
LAYOUTS = pytest.mark.parametrize(
    "n, master", [(1, 0), (2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)]
)


def collectives(n, s):
    """Write to a variable in every way, with values of the same length and of others."""
    for length in (len(s.get_value()), 2, 5):
        synk.broadcast(s, np.full(length, 7.0))
        synk.all_reduce(s, "sum")
        synk.reduce(s, "max")
        for rank in range(n):
            synk.set_value(rank, s, np.full(length, 8.0))
        synk.scatter(s, np.full(length * n, 9.0))
        synk.all_gather(s)
        synk.all_gather(s)


HANDED_OUT = {
    "the old array": lambda s: s,
    "a view of it": lambda s: s[1:],
    "its reverse": lambda s: s[::-1],
    "in another shape": lambda s: s.reshape((2, 2)),
}


@LAYOUTS
@pytest.mark.parametrize("what", HANDED_OUT)
@pytest.mark.parametrize("by", ["synk", "theano", "one row"])
def test_outputs_of_the_step_that_replaces_them(n, master, what, by):
    with forked(Layout(n, master)):
        s = theano.shared(np.arange(4.0), "s")
        synk.broadcast(s)
        output, x = HANDED_OUT[what](s), T.dvector("x")
        expected = theano.function([], output)()
        if by == "synk":
            result = synk.function([], (output, None), updates=[(s, s + 1)])()
        elif by == "theano":
            result = theano.function([], output, updates=[(s, s + 1)])()
        else:
            # Only the last rank has a row, so the average is its own part.
            result = synk.function([x], output, updates=[(s, s + x.sum())])([1.0])
        kept = result.copy()
        np.testing.assert_array_equal(kept, expected)
        collectives(n, s)
        np.testing.assert_array_equal(result, kept)
        del result  # it keeps its memory


@LAYOUTS
@pytest.mark.parametrize("tails", [[], [4], [4, 4], [3, 2]])
def test_updates_that_swap_variables(n, master, tails):
    """An update ``a[-k:]`` stores a view; a swap then puts each value in the other's memory."""
    with forked(Layout(n, master)):
        a, b, k = theano.shared(np.zeros(4), "a"), theano.shared(np.zeros(4), "b"), T.iscalar("k")
        tail = synk.function([], updates=[(a, a[-k:])], bcast_inputs=[k])
        swap = synk.function([], updates=[(a, b), (b, a)])
        for write in (synk.broadcast, synk.all_gather, lambda s: synk.set_value(n - 1, s, [5.0])):
            own_a, own_b = np.arange(4.0), np.arange(10.0, 14.0)
            synk.broadcast([a, b], [own_a, own_b])
            for length in tails:
                for rank in range(n):  # a collective sees the view before the next one is made
                    assert synk.get_value(rank, a).tolist() == own_a.tolist()
                tail(length)
                own_a = own_a[-length:]
            swap()
            write(a)  # a has the value of b now
            for rank in range(n):
                _, value = synk.get_value(rank, [a, b])
                np.testing.assert_array_equal(value, own_a)
            synk.broadcast(b, np.full(4, -1.0))
            if write is synk.broadcast:
                np.testing.assert_array_equal(synk.gather(a), [own_b] * n)


@LAYOUTS
@pytest.mark.parametrize("how", ["broadcast", "set_value", "set_value, rows", "scatter"])
def test_values_are_read_before_anything_is_written(n, master, how):
    with forked(Layout(n, master)):
        a, b = theano.shared(np.arange(6.0), "a"), theano.shared(np.arange(10.0, 16.0), "b")
        synk.broadcast([a, b])
        for of_a, of_b in [
            (lambda v: v, lambda v: v),
            (lambda v: v[::-1], lambda v: v[::-1]),
            (lambda v: v[:4], lambda v: v[2:]),
        ]:
            synk.broadcast([a, b], [np.arange(6.0), np.arange(10.0, 16.0)])
            values = [of_b(b.get_value(borrow=True)), of_a(a.get_value(borrow=True))]
            copies = [value.copy() for value in values]
            if how == "broadcast":
                synk.broadcast([a, b], values)
            elif how == "set_value":
                synk.set_value(master, [a, b], values)
            elif how == "set_value, rows":
                synk.set_value(master, [a, b], values, batch=[3, 0, 1, 2])
                copies = [value[[3, 0, 1, 2]] for value in copies]
            else:
                synk.scatter([a, b], values)
                copies = [np.concatenate([value]) for value in copies]
                joined = synk.gather([a, b], nd_up=0)
                np.testing.assert_array_equal(joined[0], copies[0])
                np.testing.assert_array_equal(joined[1], copies[1])
                continue
            np.testing.assert_array_equal(a.get_value(), copies[0])
            np.testing.assert_array_equal(b.get_value(), copies[1])
        del values


@LAYOUTS
def test_memory_is_used_again_when_nothing_holds_it(n, master):
    """A loop that drops its results must not take a new segment in each round."""
    with forked(Layout(n, master)):
        s = theano.shared(np.zeros(1000), "s")
        step = synk.function([], (s, None), updates=[(s, s * 2 + 1)])
        places = set()
        for _ in range(20):
            step()
            synk.all_reduce(s)
            places.add(s.get_value(borrow=True).__array_interface__["data"][0])
        assert len(places) <= (20 if n == 1 else 2)


@LAYOUTS
def test_a_random_state_that_is_given_stays_the_scripts(n, master):
    with forked(Layout(n, master)):
        streams = T.shared_randomstreams.RandomStreams(1)
        draw = synk.function([], (streams.uniform((2,)), "gather"))
        [state] = [v for v in draw.get_shared() if v.type == streams.state_updates[0][0].type]
        own = host_library.random_state(5)
        before = pickle.dumps(own)
        synk.broadcast(state, own)
        draw()
        state.get_value(borrow=True).uniform()
        assert pickle.dumps(own) == before
