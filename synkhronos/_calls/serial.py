"""Run a call serially in the master, and find the mode in which the ranks' parts give its outputs.

    whole inputs ──▶ the master's compiled function, on copies of the variables ──▶ expected
    rows of each rank ──▶ the same function ──▶ parts ── in which mode? ──▶ expected

Run by the master alone, the compiled function is that of ``theano.function``. A mode can be right
for one call by chance: the larger of two medians is often the median of all. So it is tried on
other numbers, too, made of the rows of the call, and suggested only if it is right for all.
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition, reduction
from synkhronos._arithmetic.operations import OPERATIONS, check_kind
from synkhronos._arithmetic.selection import select_each
from synkhronos._calls.arguments import selected
from synkhronos._calls.function_warnings import about_idle_ranks
from synkhronos._machine.interrupts import raised_here
from synkhronos._session import commands

_TRIED = ("gather", "sum", "avg")
# The number of cases (see `Serial`) of each kind.
_OTHERS = 3  # with other numbers
_ORDERS = 3  # with the same rows in another order
_NUDGES = 2  # with inputs and variables that differ in their last bit
_AMPLIFIED = 100  # more than so many times the difference by a last bit isn't rounding
_COUNTED = 1 << 16  # labels are counted in inputs of at most so many items
# Relative to the largest expected value. Ranks sum in another order than one process does.
_TOLERANCES = {"float16": 2e-2, "float32": 1e-3, "complex64": 1e-3}
_TOLERANCE = 1e-7  # for all other dtypes
_BLOCK = 1 << 16  # items that are scaled at a time
ABOUT_OPS = (
    "Its ops.all_reduce must take what each rank computes of its own rows, with the op that makes "
    "the value of all rows: 'avg' for means over the rows, 'sum' for sums."
)


def _kept(method):
    """Keep the results of a method, by its arguments."""

    def keeping(self, *arguments):
        key = method.__name__, *arguments
        if key not in self._results:
            self._results[key] = method(self, *arguments)
        return self._results[key]

    return keeping


class Serial:
    """Serial runs of one call, case 0, and of other cases, with numbers made of its rows.

    A `place` is a position among `outputs`, the numbers of the outputs that the call computes.
    """

    def __init__(self, session, definition, subset, values, batch):
        self._session, self.subset = session, subset
        self._compiled, self._inputs, outputs, self._recipe, _ = definition
        self.outputs = range(len(outputs.modes)) if subset is None else subset
        self.modes = [outputs.modes[output] for output in self.outputs]
        self._variables = list(self._compiled.get_shared())
        self._lent = {}
        self.apart = set(self._recipe.sliceables)  # variables that may differ between ranks
        self.targets = [v for v in self._recipe.updated if _host.is_array_variable(v)]
        self._results = {}  # of methods
        self._last = None, None  # a case, and its arrays
        self._as_parts = set()  # places for which `are_parts` was true
        axes = self._inputs.axes_of_rows
        self._scattered = list(axes)
        self._arrays = selected(self._inputs, values, batch, axes)

    def read_variables(self, batch_s, are_equal=False):
        """Read the variables before the call, on all ranks unless `are_equal`."""
        sliceables = self._recipe.sliceables
        if sliceables:
            everyone = [self.values_of_all_ranks(variable) for variable in sliceables]
            lengths = [min(map(len, each)) for each in zip(*everyone)]
            picks = select_each("batch_s", batch_s, lengths)
            for variable, values in zip(sliceables, everyone):
                self._lent[variable] = np.concatenate(
                    [partition.take_rows(value, rows) for value, rows in zip(values, picks)]
                )
        self.before = {v: np.array(_host.to_host(_host.peek(v))) for v in self.targets}
        # Parts are computed after the call, so with values restored from before it: on the host.
        on_host = [v for v in self.targets if isinstance(_host.peek(v), np.ndarray)]
        self._restored = {v: self.before[v] for v in on_host}
        self._differ = [
            variable
            for variable in ([] if are_equal else self._variables)
            if variable not in self.apart
            and _host.is_array_variable(variable)
            and not _host.is_random_state(variable)
            and not self.are_equal_on_ranks([variable])
        ]

    def nbytes(self):
        """Return the bytes of the inputs, and of the variables."""
        values = [_host.peek(variable) for variable in self._variables]
        return sum(each.nbytes for each in self._arrays), sum(each.nbytes for each in values)

    def take_first(self, n_rows):
        self._arrays = self._with_rows(lambda length: range(min(n_rows, length)))

    def _with_rows(self, choose):
        """Return the inputs, with the rows ``choose(length)`` of each scattered one."""
        arrays = list(self._arrays)
        for i in self._scattered:
            axis = self._inputs.axes[i]
            arrays[i] = partition.take_rows(arrays[i], choose(arrays[i].shape[axis]), axis=axis)
        return arrays

    def are_equal_on_ranks(self, variables=None):
        """Return whether all ranks have the same values of variables, or of all."""
        hashes = self._session.ask_of_each(commands.Hashes, variables or self._variables)
        return all(len({*of_ranks}) == 1 for of_ranks in hashes)

    def rows(self):
        """Return the number of rows of the call; None if nothing is scattered."""
        lengths = {self._arrays[i].shape[self._inputs.axes[i]] for i in self._scattered}
        return min(lengths, default=None)

    def values_of_all_ranks(self, variable):
        """Return copies of a variable's values on all ranks, in rank order."""
        [key] = self._session.registry.keys_of([variable])
        self._session.run(commands.Expose((key,)))
        return [np.array(value) for value in self._session.comm.variables.values(key)]

    def _run(self, arrays, values=()):
        """Return the outputs, and the updated values, for these inputs and values of variables."""
        # Updates may write to the values.
        copies = {v: np.array(value) for v, value in {**self._restored, **dict(values)}.items()}
        changed = filter(_host.is_random_state, self._variables)
        changed = {*changed, *self.targets, *self._lent, *copies}
        with _host.on_copies(changed, {**self._lent, **copies}):
            outputs = _host.run(self._compiled, arrays, self.subset)
            outputs = [np.array(_host.to_host(output)) for output in outputs]
            return outputs, {v: np.array(_host.to_host(_host.peek(v))) for v in self.targets}

    def largest_change(self, updated):
        """Return the largest change that an update makes to an array with axes (not a counter)."""
        changes = [
            change_of(expected, self.before[variable])
            for variable, expected in updated.items()
            if expected.ndim
            and expected.dtype.kind in "fc"
            and expected.shape == self.before[variable].shape
        ]
        return max(changes, default=0)

    def is_rounding(self, what, found, expected, case=0):
        """Return whether rounding explains a difference: inputs changed in their last bit make one.

        `what` is the place of an output, or an updated variable.
        """
        random = np.random.RandomState(0)
        of_result = 0 if isinstance(what, int) else 1  # (outputs, updated values)
        plain = self.whole(case)[of_result][what]
        largest = 0
        for _ in range(_NUDGES):
            values = {
                v: nudged(self._restored[v] if v in self._restored else _host.peek(v), random)
                for v in self._variables
                if _host.is_array_variable(v) and _host.peek(v).dtype.kind in "fc"
            }
            moved = self._run([nudged(each, random) for each in self._case(case)], values)
            largest = max(largest, distance(moved[of_result][what], plain))
        return distance(found, expected) <= _AMPLIFIED * largest

    def is_of_division(self, place, found):
        """Return whether the division alone makes an output differ: the ranks' parts explain it."""
        if not self.are_parts(place, found):
            return False
        whole = self.whole(0)[0][place]
        parts = [outputs[place] for outputs, _ in self._parts(0, None)[0]]
        return any(difference(part, whole) is not None for part in parts)

    def likeness(self):
        """Return the number of rows, of labels and of items in masks, by which calls are alike."""
        likeness = [self.rows()]
        for i in self._scattered:
            array = np.moveaxis(self._arrays[i], self._inputs.axes[i], 0)
            if array.size <= _COUNTED and _counts(array):
                edges = partition.edges(len(array), self._session.n_ranks)
                parts = [array[a:b] for a, b in zip(edges, edges[1:])]
                likeness += [np.sort(part, axis=None).tobytes() for part in parts]
        return tuple(likeness)

    def difference_in_other_orders(self, place, found):
        """Return by how much an equal output differs with its rows in another order; else None."""
        if not self.are_parts(place, found):
            return None
        for case in range(1 + _OTHERS, 1 + _OTHERS + _ORDERS):
            whole, combined = self.whole(case), self.combined(case, place)
            if whole is None or combined is None:
                continue
            how = difference(combined, whole[0][place])
            if how and not self.is_rounding(place, combined, whole[0][place], case):
                return f"with these rows in another order {how}"
        return None

    def are_parts(self, place, found):
        """Return whether the master gets the ranks' output `found` from the rows of each rank."""
        combined = self.combined(0, place)
        if combined is None or difference(combined, found) is not None:
            return False  # ranks have other values of a variable, or reduce inside the function
        self._as_parts.add(place)
        return True

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
        if not any(map(_host.is_random_state, self._variables)):
            return None
        return "It draws random numbers: each rank draws from a stream of its own."

    def cause_in_idle_ranks(self, differences):
        """Return a sentence if only ranks without rows have differences, else None."""
        if not self._scattered or _host.communicates(self._compiled):
            return None
        rows, n_ranks = self.rows(), self._session.n_ranks
        idle = [mine == 0 for mine in partition.counts(rows, n_ranks)]
        if idle != [how is not None for how in differences]:
            return None
        return about_idle_ranks(rows, n_ranks)

    def cause_in_mode(self, place):
        """Return a sentence if another mode or axis gives the expected output, else None."""
        mode, n_axes = self.modes[place], self.whole(0)[0][place].ndim
        if _host.communicates(self._compiled) and place not in self._as_parts:
            return None
        if not self._scattered:
            if self._recipe.sliceables or mode not in ("gather", "sum", "prod"):
                return None
            return "Nothing is scattered: each rank computes the whole. Write (output, None)."
        all_modes = dict.fromkeys((*_TRIED, "max", "min", *OPERATIONS))
        # Only these modes along axis 1: another, as the larger of two columns, fits by chance.
        for axis, modes in ((None, all_modes), (1, _TRIED)):
            gathers = [reduction.Gather(axis=along) for along in range(1, n_axes)]
            for tried in (*modes, *gathers):
                along = reduction.axis_of(tried)
                if axis is None and tried == mode and along == reduction.axis_of(mode):
                    continue
                cases = range(1 + _OTHERS)
                if all(self._is_made(case, place, tried, axis) for case in cases):
                    return self._advice(axis, tried, along)
        return None

    def cause_in_parts(self):
        if _host.communicates(self._compiled):
            return ABOUT_OPS
        names = [self._inputs.name_of(i) for i in self._scattered]
        sentence = "The ranks' parts do not make up the serial result in any mode."
        if not names:
            return sentence
        return (
            f"{sentence} Write (output, None) in a function with bcast_inputs=[{', '.join(names)}] "
            "in place of inputs: each rank computes the whole."
        )

    def cause_in_order(self, place):
        """Return the sentence for an output that depends on the order of the rows, else None."""
        turned = self._with_rows(lambda length: np.arange(length)[::-1])
        forth, back = self.whole(0)[0][place], self._run(turned)[0][place]
        if forth.shape[:1] == (self.rows(),):
            back = back[::-1]
        if difference(back, forth) is None:
            return None
        return (
            "It depends on the order of the rows, as of a scan that carries a state over them, and "
            "starts anew on each rank. Give such inputs in bcast_inputs, or name the axis of "
            "independent sequences with axes={input: axis}."
        )

    def _advice(self, axis, mode, along):
        """Return the remedy: rows along an axis (None: that of each input), a mode and its axis."""
        if axis:
            name = self._inputs.name_of(self._scattered[0])
            output = f", output: {along}" if along else ""
            return (
                f"Divided along axis {axis}, as sequences are, the inputs give it: write "
                f"axes={{{name}: {axis}{output}}} in function(), with the mode {str(mode)!r}."
            )
        if along:
            return (
                f"Write (output, 'gather') and axes={{output: {along}}} in function(): its axis "
                f"{along} has a row for each row of the inputs."
            )
        what = "its axis 0 has a row for each row of the inputs"
        if mode in OPERATIONS:
            what = f"it is a {OPERATIONS[mode].title} over the rows"
        return f"Write (output, {mode!r}) in place of the output: {what}."

    def _is_made(self, case, place, mode, axis):
        """Return whether a mode gives the whole output of a case, or serial Theano refuses it."""
        whole = self.whole(case)
        if whole is None:
            return True
        combined = self._put_together(case, place, mode, axis)
        return combined is not None and difference(combined, whole[0][place]) is None

    def combined(self, case, place):
        """Return an output of a case, combined by its mode; None if this fails."""
        return self._put_together(case, place, self.modes[place], None)

    def _put_together(self, case, place, mode, axis):
        """Return the parts of an output, combined by a mode; None if this fails."""
        results = self._parts(case, axis)
        if results is None:
            return None
        parts, counts = [outputs[place] for outputs, _ in results[0]], results[1]
        try:
            dtype = reduction.result_dtype(mode, parts[0].dtype, _host.library.config.floatX)
            if mode in OPERATIONS:
                check_kind("function()", mode, dtype, "output")
            combined = reduction.combine(mode, parts, counts, dtype)
        except (TypeError, ValueError):
            return None
        return combined if isinstance(combined, np.ndarray) else None

    def _case(self, case):
        """Return the inputs of a case, and keep those of the last case only: they take memory."""
        if case == 0:
            return self._arrays
        if case != self._last[0]:
            self._last = None, None  # freed before the new arrays are made
            self._last = case, self._other_arrays(case)
        return self._last[1]

    def _other_arrays(self, case):
        """Return drawn rows, scaled by 1/2 to 1; of later cases, all rows in another order."""
        if case > _OTHERS:
            return self._with_rows(lambda length: self._order(case - _OTHERS - 1, length))
        random, picks = np.random.RandomState(case), {}
        arrays = self._with_rows(
            lambda length: picks.setdefault(length, random.randint(max(length, 1), size=length))
        )
        for i in self._scattered:
            scale_items(arrays[i], lambda n: random.uniform(0.5, 1, n))
        return arrays

    def _order(self, number, length):
        """Return the row numbers, sorted by the first input (0) or the last (1), or shuffled."""
        if number > 1:
            return np.random.RandomState(number).permutation(length)
        i = self._scattered[-number]
        rows = np.moveaxis(self._arrays[i], self._inputs.axes[i], 0)
        return np.argsort(rows.sum(axis=tuple(range(1, rows.ndim))), kind="stable")

    @_kept
    def whole(self, case):
        """Return the outputs and updated values of a case; None if a case but the call raises."""
        try:
            return self._run(self._case(case))
        except raised_here(Exception):
            if case == 0:
                raise
        return None

    @_kept
    def _parts(self, case, axis):
        """Return the results and the number of rows of each rank with rows; None if one raises."""
        everything = self._case(case)
        axes = self._inputs.axes if axis is None else [axis] * len(everything)
        chosen = [i for i in self._scattered if everything[i].ndim > axes[i]]
        lengths = {everything[i].shape[axes[i]] for i in chosen}
        if len(lengths) != 1:
            return None
        edges = partition.edges(lengths.pop(), self._session.n_ranks)
        parts, counts = [], []
        for first, last in zip(edges, edges[1:]):
            if first == last:
                continue
            arrays = list(everything)
            for i in chosen:
                arrays[i] = partition.take_rows(arrays[i], range(first, last), axis=axes[i])
            try:
                parts.append(self._run(arrays))
            except raised_here(Exception):
                # Along another axis a part of the rows may be no valid input.
                return None
            counts.append(last - first)
        return (parts, counts) if parts else None


def _counts(array):
    """Return whether an array holds labels, or a mask of 0 and 1."""
    is_mask = array.dtype.kind == "f" and not ((array != 0) & (array != 1)).any()
    return array.dtype.kind in "biu" or is_mask


def difference(found, expected, before=None, beside=0):
    """Return by how much two arrays differ, in words; None if only by rounding.

    With the value `before` an update, the tolerance is relative to the change. `beside` is the
    largest change of all updates of the call, of which the rounding is allowed, too.
    """
    if isinstance(found, list):
        return f"a list of {len(found)} arrays, serially one of shape {expected.shape}"
    found, expected = np.asarray(_host.to_host(found)), np.asarray(_host.to_host(expected))
    if found.shape != expected.shape:
        return f"its shape is {found.shape}, serially {expected.shape}"
    if np.array_equal(found, expected):
        return None
    wide = _wide(expected)
    scale = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    relative = max(_TOLERANCES.get(str(each.dtype), _TOLERANCE) for each in (found, expected))
    tolerance = relative * scale
    if before is not None and before.shape == wide.shape:
        rounding = 64 * max(_rounding(each.dtype) for each in (found, expected))
        tolerance = min(tolerance, 10 * relative * change_of(wide, before) + rounding * scale)
        tolerance = max(tolerance, rounding * beside)
    largest = _largest_distance(found, expected)
    if largest <= tolerance:
        return None
    return f"the largest difference is {largest:.3g}, where the largest value is {scale:.3g}"


def nudged(array, random):
    """Return a copy of an array of floats, each item changed in its last bit; else the array."""
    if array.dtype.kind not in "fc":
        return array
    step, array = _rounding(array.dtype), np.array(array, order="C")
    scale_items(array, lambda n: random.choice([1 - step, 1 + step], n))
    return array


def scale_items(array, factors):
    """Multiply an array of floats in place by random factors: ``factors(n)`` returns n of them."""
    if array.dtype.kind in "fc":
        flat = array.reshape(-1)
        for at in range(0, flat.size, _BLOCK):
            block = flat[at : at + _BLOCK]
            block *= factors(block.size).astype(array.dtype)


def distance(one, other):
    """Return the largest difference of two arrays; infinite if they have different shapes."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return np.inf
    return np.nan_to_num(_largest_distance(one, other), nan=np.inf)


def _wide(array):
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _largest_distance(one, other):
    """Return the largest distance of two items: of two NaNs it is 0, of one it is NaN."""
    one, other = _wide(one), _wide(other)
    with np.errstate(all="ignore"):
        same = (one == other) | ((one != one) & (other != other))
        return np.abs(np.where(same, 0, one - other)).max(initial=0)


def change_of(array, before):
    """Return the largest finite change of an item."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.abs(array - before), posinf=0).max(initial=0)


def _rounding(dtype):
    return np.finfo(dtype).eps if dtype.kind in "fc" else 0
