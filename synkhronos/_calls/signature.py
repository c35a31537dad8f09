"""The arguments of `function`, checked: inputs, outputs with their modes, updates."""

from collections import OrderedDict

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import reduction
from synkhronos._rank.replica import PLAIN, SLICED
from synkhronos._wording import MAX_DIMENSIONS, count, shown, whole_number


class Outputs:
    """The outputs of a function: variables, their reduce modes, and whether they were a list."""

    def __init__(self, outputs):
        self.is_list = isinstance(outputs, list)
        given = outputs if self.is_list else [] if outputs is None else [outputs]
        self.is_none = outputs is None
        pairs = [_check_output(position, output) for position, output in enumerate(given)]
        self.variables = [variable for variable, _ in pairs]
        self.modes = [reduction.parse_mode(mode) for _, mode in pairs]
        self._by_cpu = [str(mode).startswith("c_") for _, mode in pairs]
        # The user gets an array on the device only for an expression that ends on the device. A
        # shared variable is on the device without being asked for, so the user gets a copy.
        self._given_on_device = [
            _host.lives_on_device(variable) and not isinstance(variable, _host.SharedVariable)
            for variable in self.variables
        ]

    def keep_on_device(self, wanted):
        """Move outputs to the device if ``wanted(dtype, ndim, mode)``, to be reduced there."""
        self.variables = [
            _host.on_device(v)
            if hasattr(v, "dtype") and not by_cpu and wanted(v.dtype, v.ndim, mode)
            else v
            for v, mode, by_cpu in zip(self.variables, self.modes, self._by_cpu)
        ]

    @property
    def on_device(self):
        """Whether each output is computed on the device."""
        return [_host.lives_on_device(variable) for variable in self.variables]

    def gather_along(self, variable, axis):
        """Gather a variable along this axis; return whether it is an output that is gathered."""
        gathered = [
            i
            for i, (each, mode) in enumerate(zip(self.variables, self.modes))
            if each is variable and mode == "gather"
        ]
        for i in gathered:
            self.modes[i] = reduction.Gather(axis=axis)
        return bool(gathered)

    def unpack(self, results):
        """Return what `pack` has returned as a list."""
        return results if self.is_list or self.is_none else [results]

    def pack(self, values, subset=None):
        """Return the values of all outputs, or a subset: a list for a list, else one value."""
        if any(self.on_device):
            chosen = range(len(self.variables)) if subset is None else subset
            values = [
                _host.to_device(value) if self._given_on_device[output] else _host.to_host(value)
                for output, value in zip(chosen, values)
            ]
        if self.is_list or self.is_none or not values:
            return list(values)
        return values[0]


def _check_output(position, output):
    mode = "avg"
    if isinstance(output, tuple):
        if len(output) != 2:
            raise TypeError(
                f"Output {position} must be a variable or a pair (variable, mode), got a tuple of "
                f"length {len(output)}."
            )
        output, mode = output
    if not isinstance(output, _host.Variable):
        raise TypeError(
            f"Output {position} must be a Theano variable or a pair (variable, mode), got "
            f"{output!r}. Several outputs are given as a list."
        )
    if reduction.parse_mode(mode) is not None and not _host.is_array_variable(output):
        raise TypeError(
            f"Output {position} of type {output.type} can't be reduced. Give it as "
            "(variable, None): the master's own result."
        )
    return output, mode


def check_updates(updates):
    """Return the updates as Theano takes them, and their modes."""
    if updates is None:
        return [], []
    if isinstance(updates, OrderedDict):
        updates = list(updates.items())
    if not isinstance(updates, (list, tuple)):
        raise TypeError(
            "updates must be a list of (shared variable, expression) or (shared variable, "
            f"expression, mode), or an OrderedDict, got a {type(updates).__name__}."
        )
    pairs, modes = [], []
    for position, update in enumerate(updates):
        if not isinstance(update, (list, tuple)) or len(update) not in (2, 3):
            raise TypeError(
                f"updates[{position}] must be (shared variable, expression) or (shared variable, "
                f"expression, mode), got {update!r}."
            )
        if not isinstance(update[0], _host.SharedVariable):
            raise TypeError(
                f"updates[{position}] must update a shared variable, got {update[0]!r}."
            )
        if _host.is_array_variable(update[0]) and not _is_expression(update[1]):
            raise TypeError(
                f"updates[{position}] must give {update[0]} an expression, got {shown(update[1])}."
            )
        if any(update[0] is target for target, _ in pairs):
            raise ValueError(f"updates[{position}] updates {update[0]} a second time.")
        pairs.append(tuple(update[:2]))
        modes.append(reduction.parse_mode(update[2] if len(update) == 3 else "avg"))
    return pairs, modes


def _is_expression(value):
    return isinstance(value, _host.Variable) or np.asarray(value).dtype.kind in "biufc"


def check_givens(givens):
    """Return the givens; raise TypeError unless they are pairs (variable, replacement)."""
    if givens is not None and not isinstance(givens, (dict, list, tuple)):
        raise TypeError(
            f"givens must be a dict or a list of pairs (variable, replacement), got {givens!r}."
        )
    pairs = givens.items() if isinstance(givens, dict) else givens or ()
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(
                f"givens must be pairs (variable, replacement), got {shown(pair)} among them."
            )
        if not isinstance(pair[0], _host.Variable):
            raise TypeError(f"givens must replace variables, got {shown(pair[0])} among them.")
    return givens


def check_mode(mode):
    """Raise TypeError or ValueError for a mode that ``theano.function`` does not take."""
    if mode is not None and not isinstance(mode, (str, _host.Mode)):
        raise TypeError(f"mode must be a Theano mode or the name of one, got {shown(mode)}.")
    if isinstance(mode, str) and not _host.is_mode(mode):
        raise ValueError(
            f"mode must be a Theano mode or the name of one, such as 'FAST_RUN', got {mode!r}."
        )


def check_inputs(name, inputs):
    """Return a list of tensor variables; raise TypeError for anything else."""
    if not isinstance(inputs, list):
        raise TypeError(f"{name} must be a list of Theano variables, got {inputs!r}.")
    for position, variable in enumerate(inputs):
        if not isinstance(variable, _host.Variable) or not _host.is_array_variable(variable):
            raise TypeError(
                f"{name}[{position}] must be a Theano tensor variable, got {variable!r}."
            )
        if isinstance(variable, _host.Constant):
            raise TypeError(
                f"{name}[{position}] is the constant {variable}: it has its value already, so it "
                "can't be an input."
            )
        if isinstance(variable, _host.SharedVariable):
            raise TypeError(
                f"{name}[{position}] is the shared variable {variable}: it is used without being "
                "an input."
            )
    return inputs


def describe_value(value):
    """Return the type of a value and what it holds, in a few words, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}, shape {value.shape}"
    return f"{type(value).__name__} {str(value)[:60]}"


def check_subset(output_subset, n_outputs, function):
    """Return the positions of the selected outputs, in ascending order; None for all."""
    if output_subset is None:
        return None
    if not isinstance(output_subset, (list, tuple)) or not all(
        isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in output_subset
    ):
        raise TypeError(f"output_subset must be a list of integers, got {output_subset!r}.")
    if any(not 0 <= i < n_outputs for i in output_subset):
        raise ValueError(
            f"output_subset must hold numbers from 0 to {n_outputs - 1}, the outputs of {function}"
            f", got {output_subset!r}."
        )
    return tuple(sorted({int(i) for i in output_subset}))


def check_axes(axes, inputs, whole, outputs, sliceables):
    """Return the axis of rows of each input, if one is not 0; note in `outputs` where to gather."""
    if axes is None:
        return ()
    if not isinstance(axes, dict):
        raise TypeError(
            "axes must be a dict of variables with their axis of rows, such as {x: 1}, got "
            f"{shown(axes)}."
        )
    axis_of = [0] * len(inputs + whole)
    for variable, axis in axes.items():
        if not isinstance(variable, _host.Variable) or not _host.is_array_variable(variable):
            raise TypeError(f"axes must name tensor variables, got {shown(variable)}.")
        if any(variable is other for other in sliceables or ()):
            raise ValueError(
                f"axes names {variable}, one of sliceable_shareds: their rows are on axis 0. "
                f"Transpose the variable, {variable}.dimshuffle(...) in the graph."
            )
        axis = whole_number(f"The axis of {variable} in axes", axis, -MAX_DIMENSIONS)
        if not -variable.ndim <= axis < variable.ndim:
            raise ValueError(
                f"axes names axis {axis} of {variable}, which has "
                f"{count(variable.ndim, 'dimension')}."
            )
        axis %= variable.ndim
        is_known = outputs.gather_along(variable, axis)
        for position, other in enumerate(inputs):
            if other is variable:
                axis_of[position], is_known = axis, True
        if not is_known:
            raise ValueError(
                f"axes names {variable}, which is neither one of the inputs that are scattered nor "
                "an output of mode 'gather'."
            )
    return tuple(axis_of) if any(axis_of) else ()


def check_sliceables(sliceables, used, updated):
    """Return the sliceable shared variables, each once, as a list."""
    if not sliceables:
        return []
    if not isinstance(sliceables, list):
        raise TypeError(
            f"sliceable_shareds must be a list of shared variables, got {sliceables!r}."
        )
    for variable in sliceables:
        if not isinstance(variable, _host.SharedVariable):
            raise TypeError(f"sliceable_shareds must hold shared variables, got {variable!r}.")
        if not any(variable is other for other in used):
            raise ValueError(f"sliceable_shareds has {variable}, which the function does not use.")
        if variable.ndim == 0:
            raise ValueError(f"sliceable_shareds has {variable}, which has no axis 0.")
        if any(variable is target for target in updated):
            raise ValueError(
                f"sliceable_shareds has {variable}, which the function updates: it can't be both."
            )
    # Deduplicate: a second selection would index rows that are already selected.
    return list(dict.fromkeys(sliceables))


class Recipe:
    """Arguments from which the variants of a function are compiled.

    The plain variant is the function that ``theano.function`` makes. The sliced variant returns the
    values of the updates after the outputs; it updates random states only, at every slice.
    """

    def __init__(self, inputs, outputs, updates, update_modes, kwargs, row_numbers=()):
        # Inputs come from shared memory, so they are variables on the host. An input on a device
        # is given as its transfer from there.
        self.inputs = [_host.on_host(variable) for variable in inputs]
        self.row_numbers = row_numbers  # inputs that the master computes, after the user's
        self.inputs += [each.variable for each in row_numbers]
        moved = [(v, new) for v, new in zip(inputs, self.inputs) if v is not new]
        givens = kwargs.get("givens") or ()
        if moved:
            givens = [*(givens.items() if hasattr(givens, "items") else givens), *moved]
        self._outputs, self._kwargs = outputs, {**kwargs, "givens": givens}
        self.updates, self.update_modes = updates, update_modes
        self._default_updates = []
        self.sliceables = []
        self.draws_all = False  # whether each rank draws the random numbers of all rows
        self.axes = ()  # the axis of rows of each input, if there is one that is not 0
        self.divides_nothing = False  # whether all inputs are numbers that the ranks get whole
        self._compiled = {}  # variant -> (outputs, updates, keyword arguments)
        self.allow_downcast = kwargs.get("allow_input_downcast")

    @property
    def accumulated(self):
        """The updates that are accumulated over slices: pairs (shared variable, mode)."""
        given = [
            (target, mode)
            for (target, _), mode in zip(self.updates, self.update_modes)
            if not _host.is_random_state(target)
        ]
        return given + [(target, "avg") for target, _ in self._default_updates]

    @property
    def updated(self):
        """The shared variables that are updated, but for random states with default updates."""
        return [target for target, _ in self.updates + self._default_updates]

    def sliced_by_inputs(self):
        """Return the shared variables of which the function slices rows that its inputs name.

        Not those that it updates: it may keep its own results there.
        """
        if self.sliceables:
            return []
        givens = self._kwargs["givens"] or ()
        pairs = givens.items() if hasattr(givens, "items") else givens
        expressions = [*self._outputs.variables, *(value for _, value in self.updates)]
        expressions += [value for _, value in pairs]
        sliced = _host.sliced_by_inputs(expressions, self.inputs)
        return [variable for variable in sliced if variable not in self.updated]

    def compile_plain(self):
        """Compile the function as it was given."""
        compiled = self._compile(PLAIN, self._outputs.variables, self.updates, self._kwargs)
        self._default_updates = [
            (variable, expression)
            for variable, expression in _host.default_updates(compiled, self.updates)
            if not _host.is_random_state(variable)
        ]
        return compiled

    def compile_sliced(self):
        """Compile the function with its updates as outputs."""
        states = [pair for pair in self.updates if _host.is_random_state(pair[0])]
        values = [
            _host.as_update(target, value)
            for target, value in self.updates + self._default_updates
            if not _host.is_random_state(target)
        ]
        defaults = [variable for variable, _ in self._default_updates]
        kwargs = _host.without_default_updates(self._kwargs, defaults)
        return self._compile(SLICED, self._outputs.variables + values, states, kwargs)

    def _compile(self, variant, outputs, updates, kwargs):
        self._compiled[variant] = outputs, updates, kwargs
        return _host.compile_function(self.inputs, outputs, updates=updates, **kwargs)

    def expression(self, variant, compiled):
        """Return the expression of a variant, for ranks on another kind of device."""
        return _host.expression_of(compiled, self.inputs, *self._compiled[variant])
