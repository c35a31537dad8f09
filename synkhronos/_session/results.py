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

from synkhronos import _host
from synkhronos._arithmetic import reduction
from synkhronos._wording import sentence


class Results:
    """One rank's outputs of the last call, and on the master the results of all ranks."""

    def __init__(self, worker):
        self._worker = worker
        self._combine = worker.comm.outputs.combine
        self.drop()

    def drop(self) -> None:
        """Drop the master's outputs: as views they may keep the user's arrays alive."""
        self._kept, self._reduced = (), {}

    def hand_over(self, key, request, description, outputs):
        """Hand over this rank's outputs of function `key`; `outputs` is None if it has not run.

        Returns the answer that the master must hear before it can collect them, or None. The master
        keeps its own outputs until `combine` or `drop`.
        """
        worker, reduced = self._worker, {}
        if description.on_device:
            reduced = self._reduce(request, description, outputs)
        if outputs is None:
            return None
        if worker.is_master:
            self._kept, self._reduced = outputs, reduced
            return None
        parts = outputs
        if worker.rank != request.source:
            parts = [outputs[i] for i in _combined(request, reduced)]
        return self._deposit(key, parts) if parts else None

    def _reduce(self, request, description, outputs):
        worker, modes = self._worker, description.output_modes
        if request.output_subset is not None:
            modes = [modes[output] for output in request.output_subset]
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.outputs.reduce(outputs, modes)
        with recorder.span("reduce"):
            return worker.comm.outputs.reduce(outputs, modes)

    def _deposit(self, key, parts):
        worker = self._worker
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.outputs.deposit(key, parts)
        with recorder.span("reduce") as span:
            answer = worker.comm.outputs.deposit(key, parts)
            span.moved(*parts)
            return answer

    def combine(self, request, modes, dtypes, what):
        """Return the results of a call, on the master, after the finish barrier.

        Parameters
        ----------
        request : RunFunction
        modes, dtypes : list
            The mode of each output of the function, and the dtype of its result.
        what : Function
            Named in error messages.
        """
        master, rows = self._worker.rank, self._worker.gate.rows()
        ranks, weights = range(len(rows)), rows
        if -1 in rows:
            ranks = [rank for rank, computed in enumerate(rows) if computed >= 0]
            weights = [rows[rank] for rank in ranks]
        chosen = request.output_subset
        if chosen is None:
            chosen = range(len(modes))
        results, combined = [], _combined(request, self._reduced)
        for position, output in enumerate(chosen):
            if position in self._reduced:
                results.append(self._reduced[position])
                continue
            if modes[output] is None:
                parts = [self._part(request, request.source, position, None)]
            else:
                number = combined.index(position)
                parts = [self._part(request, rank, position, number) for rank in ranks]
            try:
                result = self._combine(modes[output], parts, weights, dtypes[output])
            except ValueError as error:
                raise ValueError(f"Output {output} of {what} {sentence(error)}") from None
            # Copy a part that is a view of memory that later calls overwrite: a worker's part, or a
            # shared variable's old value, which an update has replaced.
            is_part = len(parts) == 1 and result is parts[0]
            if is_part and (request.source != master or self._worker.comm.memory.holds(result)):
                result = result.copy()
            results.append(result)
        self.drop()
        return results

    def _part(self, request, rank, position, number):
        """Return one rank's part of the output at `position` of those asked for."""
        worker = self._worker
        if rank == worker.rank:
            return _host.to_host(self._kept[position])
        parts = worker.comm.outputs.collect(request.function, rank)
        return parts[position if rank == request.source else number]


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
