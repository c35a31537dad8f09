"""Arrays that commands refer to, on several machines: those of the first are fetched when needed.

All commands are made by the master, so all their references are to segments of the first machine.
Its ranks map these. Ranks of other machines ask their carrier for the rows that they need: only
these cross the network, and what several ranks of a machine need whole crosses it once.
"""

from synkhronos.comm import Memory
from synkhronos.comm.mpi.link import Fetcher
from synkhronos.errors import SessionError


class MachinesMemory(Memory):
    """Memory of the ranks of several machines."""

    def __init__(self, base, gate):
        self._base, self._gate = base, gate
        self._fetcher = Fetcher(gate.link.name)
        if gate.layout.machine == 0:
            self.fetch = base.fetch

    @property
    def is_near(self):
        """Whether `fetch` returns views of the arrays themselves."""
        return self._gate.layout.machine == 0

    def create(self, nbytes):
        """Make a zero-filled block on this machine."""
        return self._base.create(nbytes)

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return the array, or some of its rows: a copy, valid until the end of the command."""
        place = reference.segment, reference.dtype, reference.shape, 0
        return self.fetched((*self._fetcher.fetch(0, place, rows, axis), None))

    def fetch_from(self, rank, reference):
        """Return, on the master, a copy of an array that a rank has made."""
        gate = self._gate
        place = reference.segment, reference.dtype, reference.shape, 0
        number = gate.link.fetch(gate.layout.machine_of(rank), place)
        return self.fetched(gate.wait_for_answer(number, in_call=False)).copy()

    def fetched(self, answer):
        """Return a view of an array that the carrier has fetched, valid until the next command."""
        segment, dtype, shape, problem = answer
        if problem is not None:
            raise SessionError(f"An array of another machine did not come: {problem}.")
        return self._base.attach(segment).array(dtype, shape)

    def forget(self, references):
        """Drop the maps of segments that the master has released."""
        references = list(references)
        self._base.forget(references)
        if self.is_near and self._gate.is_leader and references:
            self._gate.link.forget([getattr(each, "segment", each) for each in references])

    def holds(self, array):
        """Return whether an array is a view of a segment."""
        return self._base.holds(array)

    def mapped_by(self, pid):
        """Return the bytes of each segment that a process of this machine has mapped."""
        return self._base.mapped_by(pid)

    def close(self):
        """Close the connection with the carrier."""
        self._fetcher.close()
