"""Arrays that commands refer to, on several machines.

The master makes all commands, so all their references are to segments of the first machine, which
its ranks map. Small ones come to other leaders with the command. Else ranks of other machines ask
their carrier for the rows that they need: only these cross the network. An array that several ranks
of a machine need whole crosses it once.
"""

import contextlib

from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm.shared.memory import SharedMemory
from synkhronos.errors import WorkerDied


class MachinesMemory(SharedMemory):
    """Memory of the ranks of several machines."""

    def __init__(self, gate, on_release):
        super().__init__(on_release, lambda: gate.check_alive(milliseconds=1000))
        self._gate = gate
        self._arena = {}  # the carrier's segments in which this rank's arrays are
        self.is_near = gate.layout.machine == 0
        if self.is_near:
            self.fetch = gate.read = super().fetch

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return the array, or some of its rows: a copy, valid until the end of the command."""
        array = self._gate.given.get(reference)
        if array is not None:
            return array if rows is None else take_rows(array, rows, axis=axis)
        link, call = self._gate.link, self._gate.call_number
        return self._view(*link.wait_for(link.ask("fetch", call, 0, tuple(reference), rows, axis)))

    def fetch_from(self, rank, reference):
        """Return, on the master, a copy of an array that a rank has made."""
        [array] = self.fetch_all(rank, [tuple(reference)], in_call=False)
        return array.copy()

    def fetch_all(self, rank, places, in_call=True):
        """Return, on the master, views of a rank's arrays elsewhere, until the next command."""
        gate = self._gate
        machine = gate.layout.machine_of(rank)
        asked = gate.call_number, machine
        ids = [gate.link.ask("fetch", *asked, place, None, 0) for place in places]
        return [self._view(*gate.wait_for_answer(id, in_call)) for id in ids]

    def _view(self, ref, dtype, shape, offset):
        segment = self._arena.get(ref)
        if segment is None:
            self._arena = {ref: each for ref, each in self._arena.items() if not each.is_freed}
            segment = self._arena[ref] = self.open(ref)
        return segment.array(dtype, shape, offset)

    def leave(self):
        """Leave memory to the carrier, which may be using it, at the end of the session.

        The carrier drops its maps when nothing is under way any more.
        """
        super().leave()
        with contextlib.suppress(WorkerDied):  # the job may be over, too
            self._gate.link.send("leave", self._gate.session)

    def close(self):
        """Drop the maps of the carrier's memory."""
        self._arena.clear()
