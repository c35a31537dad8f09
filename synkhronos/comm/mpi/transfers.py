"""Reductions between machines, as a carrier keeps track of them; arrays in parts."""

import numpy as np

from synkhronos.comm.mpi.all_reduce import AllReduce, reduce_all

GIVEN_UP = "given up"  # the answer about a reduction that not all machines have begun
SMALL = 1 << 15  # bytes that travel in the message that announces them
_PART = 1 << 20  # bytes of an array in one message
_REDUCE, _TAGS = 1 << 12, 1 << 13  # the first tag of all-reduces, and half their number


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
    """Yield the bytes of a contiguous array in pieces of one message each."""
    flat = bytes_of(array)
    for begin in range(0, len(flat), _PART):
        yield flat[begin : begin + _PART]
