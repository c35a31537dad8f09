"""Outputs of functions cross from the workers to the master through shared memory.

Each worker has an outbox for each function: a segment of its own, laid out for the dtypes and
shapes of the last call. While they stay the same a deposit is a copy and nothing is said; when they
change, the worker announces the new layout with its answer. The master reads the outboxes after the
finish barrier, so no rank waits for another inside the call.
"""

from typing import NamedTuple, Tuple

import numpy as np

from synkhronos._machine.shared_memory import SegmentRef
from synkhronos.comm import Outputs
from synkhronos.errors import SessionError

_ALIGN = 64


class Layout(NamedTuple):
    """Where the parts of one function's outputs lie in a worker's outbox."""

    key: int
    segment: SegmentRef
    parts: Tuple[Tuple[str, Tuple[int, ...], int], ...]  # dtype, shape, offset


class SharedOutputs(Outputs):
    """One rank's outboxes, and on the master its views of all others."""

    def __init__(self, memory):
        self._memory = memory
        self._outboxes = {}  # key -> (segment, views), of this rank
        self._inboxes = {}  # (key, rank) -> (segment ref, views), on the master

    def deposit(self, key, parts):
        """Copy the parts into the outbox; return the layout if it is a new one."""
        parts = [np.asarray(part) for part in parts]
        segment, views = self._outboxes.get(key, (None, ()))
        layout = None
        if len(views) != len(parts) or any(
            view.shape != part.shape or view.dtype != part.dtype for view, part in zip(views, parts)
        ):
            layout, segment, views = self._lay_out(key, segment, parts)
            self._outboxes[key] = segment, views
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
            # Some room to grow: the last minibatch of an epoch is not the only one of its size.
            segment = self._memory.create(offset + offset // 4)
        layout = Layout(key, segment.ref, tuple(places))
        return layout, segment, _views(segment, layout)

    def hear(self, rank, answer):
        """Note, on the master, where the outputs of a worker lie from now on."""
        if not isinstance(answer, Layout):
            return False
        old = self._inboxes.get((answer.key, rank))
        if old is not None and old[0] != answer.segment:
            self._memory.forget([old[0]])
        segment = self._memory.attach(answer.segment)
        self._inboxes[answer.key, rank] = answer.segment, _views(segment, answer)
        return True

    def collect(self, key, rank):
        """Return the parts that `rank` deposited in the last call: views, valid until the next."""
        try:
            return self._inboxes[key, rank][1]
        except KeyError:
            raise SessionError("The session was closed in the middle of a call.") from None

    def forget(self, key):
        """Drop what belongs to function `key`."""
        self._outboxes.pop(key, None)
        for inbox in [inbox for inbox in self._inboxes if inbox[0] == key]:
            self._memory.forget([self._inboxes.pop(inbox)[0]])

    def close(self):
        """Drop everything."""
        for key in {*self._outboxes, *(key for key, _ in self._inboxes)}:
            self.forget(key)


def _views(segment, layout):
    return [segment.array(*place) for place in layout.parts]
