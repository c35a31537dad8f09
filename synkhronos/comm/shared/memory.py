"""Arrays in segments of shared memory, which ranks of one machine map and use where they are."""

from synkhronos._arithmetic.partition import take_rows
from synkhronos._machine import shared_memory
from synkhronos.comm import Memory


class SharedMemory(shared_memory.Segments, Memory):
    """Segments of shared memory; for their lifetimes see `synkhronos._machine.shared_memory`."""

    holds = staticmethod(shared_memory.is_in_a_segment)
    mapped_by = staticmethod(shared_memory.mapped_by)

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return a view of the array, or some of its rows.

        The segment stays mapped until `forget`. A view is valid until the master releases the
        segment, which it does between commands only.
        """
        segment, dtype, shape, offset = reference
        array = self.attach(segment).array(dtype, shape, offset)
        if rows is None:
            return array
        if axis:
            return take_rows(array, rows, buffer, axis)
        if rows.__class__ is range and rows.step > 0:  # as `take_rows`, without one call more
            return array[rows.start : rows.stop : rows.step]
        return take_rows(array, rows, buffer)

    def forget(self, references):
        """Drop segments that the master has released: references to them, or to arrays in them."""
        super().forget([getattr(each, "segment", each) for each in references])
