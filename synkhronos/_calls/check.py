"""Compare the first calls of a function with serial Theano, and tell what differs.

    whole inputs ──▶ serial Theano, in the master, on copies of the variables ──▶ expected
    the call     ──▶ all ranks                                                ──▶ found
                              each output and update that differs ──▶ a PortingWarning

The master's compiled function is the serial one: alone, it computes what ``theano.function`` would.
It works on copies of the shared variables, so nothing of it is left. For the likely cause of a
difference, the serial function also computes the part of each rank, and these are put together in
other ways, until one gives what is expected.
"""

import os

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition, reduction
from synkhronos._arithmetic.selection import select_each, select_rows
from synkhronos._machine.interrupts import raised_here
from synkhronos._rank import commands
from synkhronos._wording import advise, count, is_bool, sentence, shown, whole_number

CALLS = 3  # that are compared with check=True
VARIABLE = "SYNKHRONOS_CHECK"
# Relative to the largest expected value. Ranks add up in another order than one process does.
_TOLERANCES = {"float16": 2e-2, "float32": 1e-3, "complex64": 1e-3}
_TOLERANCE = 1e-7
_TRIED = ("gather", "sum", "avg", "max", "min", "prod")


def number_of_calls(name, check):
    """Return the number of calls to compare: of a bool, or of a number of calls."""
    if is_bool(check):
        return CALLS if check else 0
    return whole_number(name, check, 0)


def of_environment():
    """Return the number of calls to compare that the environment variable asks for."""
    value = os.environ.get(VARIABLE) or "0"
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} must be 1, or a number of calls, got {shown(value)}.")
    return CALLS if value == "1" else int(value)


class Check:
    """The comparison of one function's first calls with serial Theano.

    Parameters
    ----------
    session, compiled, inputs, outputs, recipe
        Those of the function.
    left : int
        The number of calls to compare.
    owner : str
        The function's name, for messages.
    """

    def __init__(self, session, compiled, inputs, outputs, recipe, left, owner):
        self._session, self._compiled, self._inputs = session, compiled, inputs
        self._outputs, self._recipe, self._owner = outputs, recipe, owner
        self.left = left
        self._told = set()

    def join(self, session):
        """Compare calls in a session from now on."""
        self._session = session

    def run(self, values, subset, batch, batch_s, call):
        """Return the results of a call, after comparing it with serial Theano.

        Parameters
        ----------
        values : list
            The value of each input.
        subset : tuple of int or None
            The outputs that the call computes.
        batch, batch_s
            Those of the call.
        call : callable
            Calls all ranks, and returns the results as the user gets them.
        """
        self.left -= 1
        with self._session.call("check"):
            serial = _Serial(self._session, self._compiled, self._inputs, self._recipe)
            try:
                serial.prepare(values, batch, batch_s)
                expected, updated = serial.run(subset)
            except raised_here(Exception) as error:
                # Wrong arguments raise in the call below too, which the user should see.
                expected, updated, problem = None, {}, sentence(error)
        results = call()
        if expected is None:
            self._tell(
                "serial", f"{self._owner} was not checked: serial {_host.title} raised {problem}"
            )
            return results
        with self._session.call("check"):
            told = [
                *self._differing_outputs(serial, subset, expected, results),
                *self._differing_updates(serial, updated),
            ]
        for what, message in told:
            self._tell(what, message)
        return results

    def _tell(self, what, message):
        if what not in self._told:
            self._told.add(what)
            advise(message)

    def _differing_outputs(self, serial, subset, expected, results):
        """Yield, for each output that differs, its position and a message."""
        modes = self._outputs.modes
        chosen = range(len(modes)) if subset is None else subset
        for place, (output, found) in enumerate(zip(chosen, self._outputs.unpack(results, subset))):
            how = _difference(found, expected[place])
            if how is None or output in self._told:
                continue
            cause = (
                serial.cause_in_variables()
                or serial.cause_in_mode(place, subset, modes[output], expected[place])
                or serial.cause_in_random_numbers()
                or "Its ranks' parts do not make up the serial result in any mode."
            )
            yield (
                output,
                f"Output {output} of {self._owner}, mode {modes[output]!r}, is not what serial "
                f"{_host.title} computes: {how}. {cause}",
            )

    def _differing_updates(self, serial, updated):
        """Yield, for each update that differs, its variable and a message."""
        beside = serial.largest_change(updated)
        for variable, expected in updated.items():
            if variable in serial.apart or _host.is_random_state(variable):
                continue
            if getattr(variable.tag, "is_reduced_after_call", False):
                continue
            found = serial.values_of_all_ranks(variable)
            before = serial.before[variable]
            differences = [
                _difference(value, expected, before=before, beside=beside) for value in found
            ]
            how = next(filter(None, differences), None)
            if how is None:
                continue
            cause = (
                serial.cause_in_variables()
                or serial.cause_in_random_numbers()
                or serial.cause_in_idle_ranks(differences)
            )
            if not cause:
                cause = (
                    "Each rank updates with its own rows: reduce gradients over the ranks with "
                    "synk.ops.all_reduce(g), or take the rule from synkhronos.extensions.updates"
                )
                average = sum(found) / len(found) if len({v.shape for v in found}) == 1 else None
                if average is not None and not _difference(average, expected, before=before):
                    name = variable.name or "variable"
                    cause += f"; or call synk.all_reduce({name}) after each call"
                cause += "."
            yield (
                variable,
                f"The update of {variable} in {self._owner} is not what serial {_host.title} "
                f"computes: {how}. {cause}",
            )


class _Serial:
    """Serial Theano's side of one call."""

    def __init__(self, session, compiled, inputs, recipe):
        self._session, self._compiled = session, compiled
        self._inputs, self._recipe = inputs, recipe
        self._variables = list(_host.shared_variables(compiled))
        self.apart = set()  # variables that are to differ between ranks
        self._targets = [v for v in recipe.updated if _host.is_array_variable(v)]

    def prepare(self, values, batch, batch_s):
        """Select the rows of a call; read the values of the variables on all ranks."""
        arrays = list(map(self._inputs.array, range(len(values)), values))
        scattered = [i for i, split in enumerate(self._inputs.is_scattered) if split]
        whole = [i for i in scattered if not getattr(values[i], "minibatch", False)]
        if scattered and batch is not None:
            axes = self._inputs.axes
            lengths = [arrays[i].shape[axes[i]] for i in whole or scattered]
            rows = select_rows("batch", batch, min(lengths))
            for i in scattered:
                chosen = rows if i in whole else range(len(rows))
                arrays[i] = partition.take_rows(arrays[i], chosen, axis=axes[i])
        self._arrays, self._scattered = arrays, scattered
        self._lent = {}
        sliceables = self._recipe.sliceables
        if sliceables:
            self.apart = set(sliceables)
            everyone = [self.values_of_all_ranks(variable) for variable in sliceables]
            lengths = [min(map(len, each)) for each in zip(*everyone)]
            picks = select_each("batch_s", batch_s, lengths)
            for variable, values in zip(sliceables, everyone):
                self._lent[variable] = np.concatenate(
                    [partition.take_rows(value, rows) for value, rows in zip(values, picks)]
                )
        self.before = {v: np.array(_host.to_host(_host.peek(v))) for v in self._targets}
        self._differ = [
            variable
            for variable in self._variables
            if variable not in self.apart
            and _host.is_array_variable(variable)
            and not _host.is_random_state(variable)
            and _any_differ(self.values_of_all_ranks(variable))
        ]

    def values_of_all_ranks(self, variable):
        """Return copies of a variable's values on all ranks, in rank order."""
        [key] = self._session.registry.keys_of([variable])
        self._session.run(commands.Expose((key,)))
        return [np.array(value) for value in self._session.comm.variables.values(key)]

    def run(self, subset, arrays=None):
        """Return the outputs for the whole inputs, or other arrays, and the updated values."""
        arrays = self._arrays if arrays is None else arrays
        with _host.on_copies(self._variables, self._lent):
            outputs = _host.run(self._compiled, arrays, subset)
            outputs = [_host.to_host(output) for output in outputs]
            return outputs, {v: np.array(_host.to_host(_host.peek(v))) for v in self._targets}

    def largest_change(self, updated):
        """Return the largest change by an update of an array, but for numbers, as counters are."""
        changes = [
            _largest(expected, self.before[variable])
            for variable, expected in updated.items()
            if expected.ndim
            and expected.dtype.kind in "fc"
            and expected.shape == self.before[variable].shape
        ]
        return max(changes, default=0)

    def cause_in_variables(self):
        """Return a sentence if ranks have had different values of a variable, else None."""
        if not self._differ:
            return None
        variable = self._differ[0]
        name = variable.name or "variable"
        return (
            f"Before the call, ranks had different values of {variable}: write "
            f"synk.broadcast({name}) after {name}.set_value(...), or synk.fork(follow=True)."
        )

    def cause_in_random_numbers(self):
        """Return a sentence if the function draws random numbers, else None."""
        if not any(map(_host.is_random_state, self._variables)):
            return None
        return "It draws random numbers: each rank draws from a stream of its own."

    def cause_in_idle_ranks(self, differences):
        """Return a sentence if only ranks without rows have a wrong update, else None.

        `differences` has one item for each rank, None where the update is right.
        """
        if not self._scattered or _host.communicates(self._compiled):
            return None
        first = self._scattered[0]
        edges = partition.edges(
            self._arrays[first].shape[self._inputs.axes[first]], self._session.n_ranks
        )
        idle = [begin == end for begin, end in zip(edges, edges[1:])]
        if idle != [how is not None for how in differences]:
            return None
        return (
            "Ranks without rows do not run, and do not update: the call has "
            f"{count(edges[-1], 'row')} for {count(self._session.n_ranks, 'rank')}. Give it at "
            "least as many rows as there are ranks."
        )

    def cause_in_mode(self, place, subset, mode, expected):
        """Return a sentence if the parts of the ranks make up what is expected in another way."""
        if _host.communicates(self._compiled):
            return None
        if not self._scattered:
            if self._recipe.sliceables or mode not in ("gather", "sum", "prod"):
                return None
            return "Nothing is scattered: each rank computes the whole. Write (output, None)."
        n_ranks = self._session.n_ranks
        for axis in (None, 1):
            parts, counts = self._parts(place, subset, n_ranks, axis)
            if parts is None:
                continue
            gathers = [reduction.Gather(axis=along) for along in range(1, parts[0].ndim)]
            for tried in (*_TRIED, *gathers):
                along = reduction.axis_of(tried)
                if axis is None and tried == mode and along == reduction.axis_of(mode):
                    continue
                try:
                    dtype = reduction.result_dtype(tried, parts[0].dtype, _host.float_dtype())
                    found = reduction.combine(tried, parts, counts, dtype)
                except (TypeError, ValueError):
                    continue
                if isinstance(found, np.ndarray) and _difference(found, expected) is None:
                    return self._advice(axis, tried, along)
        return None

    def _advice(self, axis, mode, along):
        """Return what to write if rows are along an axis, or that of each input if it is None."""
        if axis:
            name = self._inputs.name_of(self._scattered[0])
            output = f", output: {along}" if along else ""
            return (
                f"If rows are along axis {axis}, as in a sequence, write axes={{{name}: {axis}"
                f"{output}}} in function(), with the mode {str(mode)!r}."
            )
        if along:
            return (
                f"Write (output, 'gather') and axes={{output: {along}}} in function(): its axis "
                f"{along} has a row for each row of the inputs."
            )
        return f"Write (output, {mode!r}): {_MEANING[mode]}"

    def _parts(self, place, subset, n_ranks, axis):
        """Return an output of each rank's rows, and the numbers of rows.

        The rows are along an axis, or that of each input if it is None.
        """
        axes = self._inputs.axes if axis is None else [axis] * len(self._arrays)
        chosen = [i for i in self._scattered if self._arrays[i].ndim > axes[i]]
        lengths = {self._arrays[i].shape[axes[i]] for i in chosen}
        if len(lengths) != 1:
            return None, None
        edges = partition.edges(lengths.pop(), n_ranks)
        parts, counts = [], []
        for first, last in zip(edges, edges[1:]):
            if first == last:
                continue
            arrays = list(self._arrays)
            for i in chosen:
                arrays[i] = partition.take_rows(arrays[i], range(first, last), axis=axes[i])
            try:
                outputs, _ = self.run(subset, arrays)
            except raised_here(Exception):
                # A part of the rows need not be a valid input along another axis.
                return None, None
            parts.append(np.array(outputs[place]))
            counts.append(last - first)
        return parts or None, counts


_MEANING = {
    "gather": "its axis 0 has a row for each row of the inputs.",
    "sum": "it is a sum over the rows.",
    "avg": "it is a mean over the rows.",
    "max": "it is a maximum over the rows.",
    "min": "it is a minimum over the rows.",
    "prod": "it is a product over the rows.",
}


def _any_differ(values):
    return any(_difference(value, values[0], exactly=True) for value in values[1:])


def _difference(found, expected, exactly=False, before=None, beside=0):
    """Return by how much two arrays differ, in words; None if only by rounding.

    `before` is what an update has changed: the change is compared, because a small one, as of a
    small learning rate, can be wrong and differ little from the value.
    """
    if isinstance(found, list):
        return f"a list of {len(found)} arrays, serially one of shape {expected.shape}"
    found, expected = np.asarray(_host.to_host(found)), np.asarray(_host.to_host(expected))
    if found.shape != expected.shape:
        return f"its shape is {found.shape}, serially {expected.shape}"
    if found.size == 0:
        return None
    wide = np.complex128 if "c" in (found.dtype.kind, expected.dtype.kind) else np.float64
    one, other = found.astype(wide), expected.astype(wide)
    same = (one == other) | ((one != one) & (other != other))
    if same.all():
        return None
    with np.errstate(all="ignore"):
        apart = np.abs(np.where(same, 0, one - other))
        scale = np.abs(other[np.isfinite(other)]).max(initial=0)
    coarse = max(_TOLERANCES.get(str(each.dtype), 0) for each in (found, expected))
    tolerance = 0 if exactly else (coarse or _TOLERANCE) * scale
    if before is not None and before.shape == other.shape:
        change = _largest(other, before)
        rounding = max(_rounding(each.dtype) for each in (found, expected))
        tolerance = min(tolerance, 10 * (coarse or _TOLERANCE) * change + 64 * rounding * scale)
        tolerance = max(tolerance, 64 * rounding * beside)
    largest = np.nan if np.isnan(apart).any() else apart.max()
    if largest <= tolerance:
        return None
    return f"the largest difference is {largest:.3g}, where the largest value is {scale:.3g}"


def _largest(array, before):
    """Return the largest change of an array's items, of those that are finite."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.abs(array - before), posinf=0).max(initial=0)


def _rounding(dtype):
    return np.finfo(dtype).eps if dtype.kind in "fc" else 0
