"""The outputs of a call: each rank hands over its own, and the master combines them.

    every rank   deposit   workers hand parts to the communicator, the master keeps its own
    the master   combine   after the finish barrier

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
    """Hand over the outputs of this rank; on the master, combine those of all ranks."""

    def __init__(self, worker):
        self._worker = worker
        self._combine = worker.comm.outputs.combine

    def reduce(self, request, modes, outputs):
        """Reduce outputs over the ranks' devices, where they can be: position -> result."""
        worker = self._worker
        if request.output_subset is not None:
            modes = [modes[output] for output in request.output_subset]
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.outputs.reduce(outputs, modes)
        with recorder.span("reduce"):
            return worker.comm.outputs.reduce(outputs, modes)

    def deposit(self, key, request, outputs, reduced):
        """Deposit what the master needs of a worker's outputs; return the answer to collect it."""
        worker = self._worker
        if outputs is None:
            return None
        parts = outputs
        if worker.rank != request.source:
            combined = _combined(request, reduced) if reduced else request.combined
            parts = [outputs[position] for position in combined]
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

        `own` is the result of the master's `Replica.run`; `modes` and `dtypes` have the mode of
        each output of the function and the dtype of its result; error messages name `what`.
        """
        worker, source, key = self._worker, request.source, request.function
        own_outputs, reduced = own
        collect = worker.comm.outputs.collect
        combined = _combined(request, reduced) if reduced else request.combined
        chosen = request.output_subset
        if chosen is None:
            chosen = range(len(modes))
        weights, everyone = [], []  # of the ranks that have run, in rank order
        for rank, computed in enumerate(worker.gate.rows()):
            if computed >= 0 and combined:
                parts = own_outputs if rank == worker.rank else collect(key, rank)
                if len(parts) > len(combined):  # of the master, and of the source of others
                    parts = [parts[position] for position in combined]
                weights.append(computed)
                everyone.append(parts)
        columns = zip(*everyone)  # the parts of each combined output, in their order
        results = []
        for position, output in enumerate(chosen):
            if position in reduced:
                results.append(reduced[position])
                continue
            if position in combined:
                parts = next(columns)
            else:
                parts = [(own_outputs if source == worker.rank else collect(key, source))[position]]
            try:
                result = self._combine(modes[output], parts, weights, dtypes[output])
            except ValueError as error:
                raise ValueError(f"Output {output} of {what} {sentence(error)}") from None
            # Copy a part if later calls overwrite its memory: it is a worker's part, or the old
            # value of a shared variable that was updated.
            is_part = len(parts) == 1 and result is parts[0]
            if is_part and (source != worker.rank or worker.comm.memory.holds(result)):
                result = result.copy()
            results.append(result)
        return results


def outputs_of_machine(worker, request):
    """Return, on a leader, the parts of its machine's ranks for the master.

    Where the parts of an output can be combined without the master, only the first rank has one:
    see `MachinesOutputs.of_machine`.
    """
    outputs, key, chosen = worker.comm.outputs, request.function, request.output_subset
    modes = worker.replicas[key].description.output_modes
    if chosen is not None:
        modes = [modes[output] for output in chosen]
    parts_of_ranks, weights = {}, []
    for rank, computed in zip(worker.gate.layout.ranks(), worker.gate.rows()):
        n_parts = len(modes) if rank == request.source else len(request.combined)
        if computed >= 0 and n_parts:  # the condition of `deposit`
            parts_of_ranks[rank] = outputs.collect(key, rank)
            weights.append(computed)
    combined = {rank: list(parts) for rank, parts in parts_of_ranks.items()}
    if len(parts_of_ranks) > 1 and request.source not in parts_of_ranks:
        for number, position in enumerate(request.combined):
            parts = [parts[number] for parts in parts_of_ranks.values()]
            partial = reduction.combine_some(modes[position], parts, weights)
            if partial is not None:
                for place, each in enumerate(combined.values()):
                    each[number] = None if place else partial
    return outputs.of_machine(key, combined)


def _combined(request, reduced):
    """Return the positions of the outputs that the master combines: all but the reduced ones."""
    return tuple([position for position in request.combined if position not in reduced])
