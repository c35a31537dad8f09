"""Reductions and copies between machines, as a carrier keeps track of them."""

import numpy as np

from synkhronos.comm.mpi.all_reduce import AllReduce, reduce_all

GIVEN_UP = "given up"  # the answer about a reduction that not all machines have begun
SMALL = 1 << 15  # bytes that travel in the message that announces them
_PART = 1 << 20  # bytes of an array in one message
_REDUCE, _TAGS = 1 << 12, 1 << 13  # the first tag of all-reduces, and half their number


class Spread:
    """Arrays that one machine sends to all others, and the places of them here.

    On another machine than the sender's, the arrays or their places may be known first. What comes
    before the places is received elsewhere, because the next message from that machine must not be
    taken for it.
    """

    def __init__(self):
        self._places = self._received = None
        self.answer = self.then = None
        self.left = 0  # parts of arrays that have not come, or have not been sent

    def send(self, places):
        """Take the places of the arrays on the machine that sends them."""
        self._places = self._received = places
        self.answer = lambda: None

    def give(self, places, answer):
        """Take the places of the arrays, and what to call when they are filled."""
        self._places, self.answer = places, answer

    def announce(self, sizes):
        """Return arrays to receive into, of these numbers of bytes."""
        self._received = self._places
        if self._places is None:
            self._received = [np.empty(nbytes, np.uint8) for nbytes in sizes]
        return self._received

    def one_less(self):
        """Take note that a part has come."""
        self.left -= 1
        self.then()

    @property
    def is_open(self):
        """Whether arrays are on their way into memory of the ranks, or from there."""
        return bool(self.left) and self._received is self._places

    @property
    def is_complete(self):
        """Whether all has come and its places are known; then they are filled."""
        if self._received is None or self._places is None or self.left:
            return False
        for place, array in zip(self._places, self._received):
            if place is not array:
                bytes_of(place)[...] = bytes_of(array)
        return True


class Round:
    """An all-reduce, from its announcement to its answer.

    `answer` is called at its end: with None, with the layouts of all machines if these differ, or
    with GIVEN_UP.
    """

    def __init__(self, carrier, owner, id, arrays, ops, divisor, layout, compress, answer):
        self._carrier, self._owner, self._id, self._answer = carrier, owner, id, answer
        self._arrays, self._ops, self._divisor = arrays, ops, divisor
        self._layout, self._compress = layout, compress
        nbytes = sum(array.nbytes for array in arrays)
        self.inline = [array.copy() for array in arrays] if nbytes <= SMALL else None
        self._work = None

    @property
    def has_started(self):
        """Whether arrays may be under way already."""
        return self._work is not None

    def progress(self):
        """Do what can be done now; return whether the round has ended."""
        if self._work is not None:
            if not self._work.progress():
                return False
            self.end(None)
            return True
        carrier, others = self._carrier, self._owner.announcements(self._id)
        if len(others) < carrier.n_machines - 1:
            return False
        layouts = [
            self._layout if machine == carrier.machine else others[machine][0]
            for machine in range(carrier.n_machines)
        ]
        # Machines may have "unequal" layouts that are alike, or there is one machine.
        if self._layout[0] == "unequal" or any(layout != self._layout for layout in layouts):
            self.end(layouts)
            return True
        if self.inline is not None:
            sources = [
                self.inline if machine == carrier.machine else others[machine][1]
                for machine in range(carrier.n_machines)
            ]
            reduce_all(sources, self._ops, self._divisor, self._compress, self._arrays)
            self.end(None)
            return True
        _, sequence, number = self._id
        tag = _REDUCE + 2 * ((31 * sequence + number) % _TAGS)
        self._work = AllReduce(
            carrier,
            carrier.machine,
            carrier.n_machines,
            self._arrays,
            self._ops,
            self._divisor,
            tag,
            self._compress,
        )
        return False

    def end(self, layouts):
        """Answer."""
        self._owner.forget_announcements(self._id)
        self._answer(layouts)


def bytes_of(array):
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def parts(array):
    """Yield the bytes of an array in pieces of one message each."""
    flat = bytes_of(array)
    for begin in range(0, len(flat), _PART):
        yield flat[begin : begin + _PART]
