"""Outputs of functions, copied from the workers to the master through memory that both use.

Each worker has a buffer for each function: a segment of its own, laid out for the dtypes and shapes
of the last call. While these stay the same, the worker only copies its outputs there. If they
change, it also sends the new layout with its answer. The master reads the buffers after the finish
barrier, so no rank waits for another inside of the call.

A worker writes to a buffer in calls of its function only, so the master's views are valid until the
next such call. The worker owns the segment: it drops it when the function is forgotten, or replaces
it if outputs need a larger one. The master then drops its map.
"""

from typing import Hashable, NamedTuple, Tuple

import numpy as np

from synkhronos._arithmetic import reduction
from synkhronos.errors import SessionError

_ALIGN = 64


class OutputLayout(NamedTuple):
    """The places of the parts of one function's outputs in a worker's buffer."""

    key: int
    segment: Hashable  # stands for it in messages
    parts: Tuple[Tuple[str, Tuple[int, ...], int], ...]  # dtype, shape, offset


class Outputs:
    """One rank's buffers for outputs, and on the master views of all other ranks' buffers."""

    combine = staticmethod(reduction.combine)  # of the parts that all ranks have of an output

    def __init__(self, memory, devices=None):
        self._memory, self._devices = memory, devices
        self._buffers = {}  # key -> (segment, views), of this rank
        self._received = {}  # (key, rank) -> (segment ref, views, places), on the master

    def reduces(self, dtype, ndim, mode):
        """Return whether `reduce` can take outputs of this kind, so that they stay on devices."""
        return self._devices is not None and self._devices.reduces(dtype, ndim, mode)

    def reduce(self, outputs, modes):
        """Reduce over the ranks those outputs that can stay on their devices for it.

        `outputs` is None on a rank that has not run. Returns a dict: position -> the reduced array
        on the master, None on workers. The master combines the outputs that are not in it.
        """
        return {} if self._devices is None else self._devices.reduce_outputs(outputs, modes)

    def deposit(self, key, parts):
        """Copy a worker's parts of the outputs of function `key` into its buffer.

        Returns the buffer's layout if it is new, which the master must `hear` before it can
        `collect` them; else None.
        """
        segment, views = self._buffers.get(key, (None, ()))
        if len(views) == len(parts):
            for view, part in zip(views, parts):
                if view.shape != part.shape or view.dtype != part.dtype:
                    break
                view[...] = part
            else:
                return None
        parts = [np.asarray(part) for part in parts]
        layout, segment, views = self._lay_out(key, segment, parts)
        self._buffers[key] = segment, views
        for view, part in zip(views, parts):
            view[...] = part
        return layout

    def _lay_out(self, key, segment, parts):
        offset, places = 0, []
        for part in parts:
            if part.dtype.hasobject:
                raise TypeError(
                    f"An output of dtype {part.dtype} can't be reduced: only numbers and bools can."
                )
            places.append((part.dtype.str, part.shape, offset))
            offset += -(-part.nbytes // _ALIGN) * _ALIGN
        if segment is None or segment.ref.nbytes < offset:
            # Room to grow: outputs of the next calls may be a little larger, and a new segment
            # takes time. No rank reads the old one now: the master has ended the call before.
            segment = self._memory.create(offset + offset // 4)
        layout = OutputLayout(key, segment.ref, tuple(places))
        return layout, segment, [segment.array(*place) for place in places]

    def hear(self, rank, answer):
        """Take a worker's answer, on the master; return whether it came from `deposit`."""
        if not isinstance(answer, OutputLayout):
            return False
        old = self._received.get((answer.key, rank))
        if old is not None and old[0] != answer.segment:
            # The worker has dropped the old segment already.
            self._memory.forget([old[0]])
        segment = self._memory.attach(answer.segment)
        views = [segment.array(*place) for place in answer.parts]
        self._received[answer.key, rank] = answer.segment, views, answer.parts
        return True

    def collect(self, key, rank):
        """Return views, valid until the next call, of what `rank` deposited for function `key`."""
        try:
            return self._received[key, rank][1]
        except KeyError:
            raise SessionError("The session was closed in the middle of a call.") from None

    def places(self, key, rank):
        """Return the places of these parts: (segment, dtype, shape, offset) each."""
        segment, _, parts = self._received[key, rank]
        return [(segment, *part) for part in parts]

    def forget(self, key):
        """Drop the memory and the views that belong to function `key`."""
        self._buffers.pop(key, None)
        for place in [place for place in self._received if place[0] == key]:
            self._memory.forget([self._received.pop(place)[0]])

    def close(self):
        """Drop all memory and views."""
        for key in {*self._buffers, *(key for key, _ in self._received)}:
            self.forget(key)
