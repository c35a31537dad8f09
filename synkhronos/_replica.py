"""One rank's copy of one function: select the rows, run, hand the outputs over."""

from synkhronos import _partition, _theano


class Replica:
    """The compiled Theano functions of one synkhronos function, on one rank."""

    def __init__(self, key, function):
        self._key = key
        self.function = function

    def run(self, worker, request):
        """Compute this rank's part of a request; see `RunFunction` for what it says.

        Returns
        -------
        tuple or None
            On a worker, what `comm.deposit` wants the master to know.
        """
        rows = request.rows
        if rows is None:
            start = stop = None
            computed = 1
        else:
            start, stop = _partition.share(rows, worker.n_ranks, worker.rank)
            computed = stop - start
            if rows == 0 and worker.rank == request.source:
                computed = 1  # of no rows at all, one rank computes what serial Theano would
            if computed == 0:
                worker.gate.report_rows(-1)
                return None
        arrays = map(worker.segments.array, request.inputs)
        arguments = [
            array[start:stop] if split else array for array, split in zip(arrays, request.split)
        ]
        outputs = _theano.run(self.function, arguments, request.output_subset)
        worker.gate.report_rows(computed)
        if worker.is_master:
            return worker.comm.keep(outputs)
        parts = outputs
        if worker.rank != request.source:
            parts = [outputs[position] for position in request.reduced]
        return worker.comm.deposit(self._key, parts) if parts else None
