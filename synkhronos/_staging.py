"""Shared memory that is kept for plain arrays, from one call to the next."""

from synkhronos._shm import GrowingArray


class StagedInput:
    """Shared memory that a function keeps for plain arrays given for one of its inputs."""

    def __init__(self, session, dtype, ndim):
        self._worker = session.worker
        self._store = GrowingArray(session.segments, dtype, ndim)

    @property
    def nbytes(self):
        """The size of the memory that it keeps."""
        return self._store.allocated * self._store.array.itemsize

    def put(self, array):
        """Copy the array in; return what stands for it on other ranks."""
        recorder = self._worker.recorder
        if recorder is None:
            return self._copy(array)
        with recorder.span("stage") as span:
            ref = self._copy(array)
            span.moved(array)
            return ref

    def _copy(self, array):
        store = self._store
        if store.ref is None or store.array.shape != array.shape:
            store.resize(array.shape, keep=False)
        store.array[...] = array
        return store.ref
