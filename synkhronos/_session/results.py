"""The outputs of a call: each rank hands over its own, and the master combines them to results.

    every rank   hand_over   workers deposit parts with the communicator, the master keeps its own
    the master   combine     after the finish barrier

Each output that a call asks for is one of three kinds:

=========  =====================================================================================
reduced    the ranks have reduced it on their devices; the master keeps the result
combined   the master combines the parts of all ranks, by the mode of the output
own        its mode is None: the value of the rank that the request names as its source
=========  =====================================================================================
"""

from synkhronos._arithmetic import reduction
from synkhronos._wording import sentence


class Results:
    """One rank's way to hand over its outputs, and the master's to combine those of all ranks."""

    def __init__(self, worker):
        self._worker = worker
        self._combine = worker.comm.outputs.combine

    def reduce(self, request, modes, outputs):
        """Reduce over the ranks those outputs that can stay on their devices for it.

        Returns
        -------
        dict
            As `comm.outputs.Outputs.reduce` does.
        """
        worker = self._worker
        if request.output_subset is not None:
            modes = [modes[output] for output in request.output_subset]
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.outputs.reduce(outputs, modes)
        with recorder.span("reduce"):
            return worker.comm.outputs.reduce(outputs, modes)

    def deposit(self, key, request, outputs, reduced):
        """Deposit what the master needs of a worker's outputs: None if it has not run.

        Returns the answer that the master must hear before it can collect them, or None.
        """
        worker = self._worker
        if outputs is None:
            return None
        parts = outputs
        if worker.rank != request.source:
            parts = [outputs[position] for position in _combined(request, reduced)]
        if not parts:
            return None
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.outputs.deposit(key, parts)
        with recorder.span("reduce") as span:
            answer = worker.comm.outputs.deposit(key, parts)
            span.moved(*parts)
            return answer

    def combine(self, request, own, modes, dtypes, what):
        """Return the results of a call, on the master, after the finish barrier.

        Parameters
        ----------
        request : RunFunction
        own : tuple
            What the master's `Replica.run` has returned.
        modes, dtypes : list
            The mode of each output of the function, and the dtype of its result.
        what : Function
            Named in error messages.
        """
        worker, source, key = self._worker, request.source, request.function
        own, reduced = own
        collect, combined = worker.comm.outputs.collect, _combined(request, reduced)
        chosen = request.output_subset
        if chosen is None:
            chosen = range(len(modes))
        weights, everyone = [], []  # of the ranks that have run, in rank order
        for rank, computed in enumerate(worker.gate.rows()):
            if computed >= 0 and combined:
                parts = own if rank == worker.rank else collect(key, rank)
                if rank in (source, worker.rank):  # the others have deposited just these
                    parts = [parts[position] for position in combined]
                weights.append(computed)
                everyone.append(parts)
        columns = dict(zip(combined, zip(*everyone)))
        results = []
        for position, output in enumerate(chosen):
            if position in reduced:
                results.append(reduced[position])
                continue
            parts = columns.get(position)
            if parts is None:
                parts = [(own if source == worker.rank else collect(key, source))[position]]
            try:
                result = self._combine(modes[output], parts, weights, dtypes[output])
            except ValueError as error:
                raise ValueError(f"Output {output} of {what} {sentence(error)}") from None
            # Copy a part that is a view of memory that later calls overwrite: a worker's part, or a
            # shared variable's old value, which an update has replaced.
            is_part = len(parts) == 1 and result is parts[0]
            if is_part and (source != worker.rank or worker.comm.memory.holds(result)):
                result = result.copy()
            results.append(result)
        return results


def outputs_of_machine(worker, request):
    """Return, on a leader, what the master gets of the outputs of its machine's ranks.

    That is one part for the machine, of its first rank, where parts can be combined without the
    master: see `MachinesOutputs.of_machine`.

    Parameters
    ----------
    request : RunFunction
    """
    outputs, key, chosen = worker.comm.outputs, request.function, request.output_subset
    modes = worker.replicas[key].description.output_modes
    if chosen is not None:
        modes = [modes[output] for output in chosen]
    found, weights = {}, []
    for rank, computed in zip(worker.gate.layout.ranks(), worker.gate.rows()):
        n_parts = len(modes) if rank == request.source else len(request.combined)
        if computed >= 0 and n_parts:  # as in `hand_over`
            found[rank] = outputs.collect(key, rank)
            weights.append(computed)
    combined = {rank: list(parts) for rank, parts in found.items()}
    if len(found) > 1 and request.source not in found:
        for number, position in enumerate(request.combined):
            parts = [parts[number] for parts in found.values()]
            partial = reduction.combine_some(modes[position], parts, weights)
            if partial is not None:
                for place, each in enumerate(combined.values()):
                    each[number] = None if place else partial
    return outputs.of_machine(key, combined)


def _combined(request, reduced):
    """Return the positions of the outputs that the master combines: workers deposit these parts."""
    if not reduced:
        return request.combined
    return tuple([position for position in request.combined if position not in reduced])
