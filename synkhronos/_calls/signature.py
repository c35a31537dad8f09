"""Check the arguments of `function` except its inputs: outputs with their modes, updates, axes."""

import copy
import warnings
from collections import OrderedDict

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import reduction
from synkhronos._arithmetic.operations import OPERATIONS, check_kind, divides
from synkhronos._host.choice import advice
from synkhronos._wording import MAX_DIMENSIONS, count, is_bool, line_of_user, shown, whole_number


def require(what, value, kinds):
    """Raise TypeError, with `what` is required and the value, unless it is of one of the kinds."""
    if not isinstance(value, kinds):
        raise TypeError(f"{what}, got {shown(value)}.{advice(value, _host.title)}")


class OutputSignature:
    """The outputs of a function: variables, their modes, and the form in which they were given.

    The outputs of a dict are in the order of its keys, sorted as Theano sorts them.
    """

    def __init__(self, outputs):
        self.keys = None
        if isinstance(outputs, dict):
            for key in outputs:
                require("The keys of a dict of outputs must be str", key, str)
            self.keys = sorted(outputs)
            outputs = [outputs[key] for key in self.keys]
        outputs = [] if outputs is None else outputs
        self.is_list = isinstance(outputs, list) or _is_tuple_of_outputs(outputs)
        output_list = outputs if self.is_list else [outputs]
        pairs = [_check_output(position, output) for position, output in enumerate(output_list)]
        self.asked_modes = [reduction.parse_mode(mode) for _, mode in pairs]
        self._sparse = {}  # position -> variable of a sparse output, computed as several arrays
        self._first = []  # the first position of each output among those that are computed
        computed = []
        for position, (variable, mode) in enumerate(pairs):
            self._first.append(len(computed))
            if _host.sparse_format(variable):
                self._sparse[position] = variable
                computed += [(part, mode) for part in _host.decomposed(variable)]
            else:
                computed.append((variable, mode))
        self._first.append(len(computed))
        self.variables = [variable for variable, _ in computed]
        self.modes = [reduction.parse_mode(mode) for _, mode in computed]
        self._by_cpu = [str(mode).startswith("c_") for _, mode in computed]
        # The user gets an array on the device only for an expression that ends on the device, and
        # an array on the host for a shared variable, which is on the device unasked.
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
        self._is_on_device = any(self.on_device)

    @property
    def on_device(self):
        return [_host.lives_on_device(variable) for variable in self.variables]

    @property
    def is_plain_list(self):
        """Whether `pack` returns a list of values as it is."""
        return self.is_list and self.keys is None and not self._sparse and not any(self.on_device)

    def gather_along(self, variable, axis):
        """Gather a variable along this axis; return whether it is an output that is gathered."""
        is_gathered = False
        for i, each in enumerate(self.variables):
            if each is variable and self.modes[i] == "gather":
                self.modes[i], is_gathered = reduction.Gather(axis=axis), True
        return is_gathered

    def check_subset(self, output_subset, function):
        """Return the positions of the selected outputs, in ascending order; None for all."""
        if output_subset is None:
            return None
        outputs, what = self.keys, "keys of the outputs"
        is_list = isinstance(output_subset, (list, tuple))
        if outputs is None:
            outputs, what = range(len(self.asked_modes)), "integers"
            is_list = is_list and all(
                isinstance(i, (int, np.integer)) and not is_bool(i) for i in output_subset
            )
        if not is_list:
            raise TypeError(f"output_subset must be a list of {what}, got {output_subset!r}.")
        for each in output_subset:
            if each not in outputs:
                raise ValueError(
                    f"output_subset must hold {what} of {function}, which are "
                    f"{', '.join(map(repr, outputs))}; got {each!r}."
                )
        subset = sorted(map(outputs.index, {*output_subset}))
        if self._sparse:
            subset = [i for each in subset for i in range(*self._first[each : each + 2])]
        return tuple(subset)

    def unpack(self, results, subset=None):
        """Return the values of the computed outputs, given results of `pack`."""
        if self.keys is not None:
            results = list(results.values())
        elif not self.is_list:
            results = [results]
        if not self._sparse:
            return results
        chosen = [i for i, n in enumerate(self._first[:-1]) if subset is None or n in subset]
        unpacked = []
        for output, result in zip(chosen, results):
            if output in self._sparse:
                data, indices, spans, length = _host.take_apart(result)
                unpacked += [data, indices, spans[:, 1] - spans[:, 0], length]
            else:
                unpacked.append(result)
        return unpacked

    def pack(self, values, subset=None):
        """Return the values of all outputs, or a subset, in the form that the user gave."""
        if self._is_on_device:
            chosen = range(len(self.variables)) if subset is None else subset
            values = [
                _host.to_device(value) if self._given_on_device[output] else _host.to_host(value)
                for output, value in zip(chosen, values)
            ]
        if self._sparse:
            values, subset = self._put_together(values, subset)
        if self.keys is not None:
            keys = self.keys if subset is None else [self.keys[output] for output in subset]
            return dict(zip(keys, values))
        return list(values) if self.is_list or not values else values[0]

    def _put_together(self, values, subset):
        """Return the values and the positions of the user's outputs."""
        computed = dict(zip(range(len(self.variables)) if subset is None else subset, values))
        chosen = [i for i in range(len(self.asked_modes)) if self._first[i] in computed]
        whole = []
        for output in chosen:
            parts = [computed[i] for i in range(*self._first[output : output + 2])]
            if output in self._sparse:
                whole.append(_host.put_together(self._sparse[output], *parts))
            else:
                whole += parts
        return whole, chosen


def _is_tuple_of_outputs(outputs):
    """Return whether a tuple is several outputs, as in Theano, and not a pair (variable, mode)."""
    if not isinstance(outputs, tuple):
        return False
    if len(outputs) != 2 or any(isinstance(each, tuple) for each in outputs):
        return True
    return _host.read_output(outputs[1]) is not None


def _check_output(position, output):
    is_pair = isinstance(output, tuple) and len(output) == 2
    given, mode = output if is_pair else (output, "avg")
    output = _host.read_output(given)
    if output is None:
        raise TypeError(
            f"Output {position} must be a {_host.title} variable or a pair (variable, mode), got "
            f"{given!r}. Several outputs are given as a list.{advice(given, _host.title)}"
        )
    form, op = _host.sparse_format(output), reduction.parse_mode(mode)
    if form and op not in (None, "gather" if form == "csr" else None):
        raise TypeError(
            f"Output {position} is a sparse matrix in the format {form}, which can't be reduced "
            f'with the mode {mode!r}. Give it as (variable, None), as (variable, "gather") in the '
            f"format csr, or as {_host.library.__name__}.sparse.dense_from_sparse(variable)."
        )
    if op is not None and not form and not _host.is_array_variable(output):
        raise TypeError(
            f"Output {position} of type {output.type} can't be reduced. Give it as "
            "(variable, None): the master's own result."
        )
    if op in OPERATIONS:
        dtype = reduction.result_dtype(op, output.dtype, "float64")
        check_kind("function()", op, dtype, f"output {position}")
    return output, mode


def check_updates(updates):
    """Return the updates as Theano takes them, and their modes."""
    if updates is None:
        return [], []
    is_plain = isinstance(updates, dict) and not isinstance(updates, OrderedDict)
    if is_plain and len(updates) > 1 and _host.title == "Theano":
        # Theano warns, too, although every Python that this package runs on keeps the order.
        warnings.warn_explicit(
            "updates is a plain dict, about which theano.function warns: it is taken in its "
            "order. A list of pairs or an OrderedDict is taken without a warning.",
            UserWarning,
            *line_of_user(),
        )
    checked = check_pairs("updates", updates, have_modes=True)
    modes = [reduction.parse_mode(mode[0] if mode else "avg") for _, _, *mode in checked]
    for (target, *_), mode in zip(checked, modes):
        # Only calls with slices use the mode; they refuse averages of integers.
        if mode in OPERATIONS and not divides(mode) and _host.is_array_variable(target):
            check_kind("function()", mode, target.dtype, f"the update of {target}")
    return [update[:2] for update in checked], modes


def check_pairs(name, updates, have_modes=False):
    """Return updates as a list of tuples; raise for anything else, and a variable that has two."""
    form, lengths = "pairs (shared variable, expression)", (2,)
    if have_modes:
        form, lengths = f"{form} or triples (shared variable, expression, mode)", (2, 3)
    updates = list(updates.items()) if hasattr(updates, "items") else updates
    require(f"{name} must be {form} in a list", updates, (list, tuple))
    seen = set()
    for update in updates:
        if not isinstance(update, (tuple, list)) or len(update) not in lengths:
            raise TypeError(f"{name} must be {form}, got {update!r} among them.")
        target, value = update[:2]
        require(f"{name} must update shared variables", target, _host.SharedVariable)
        is_constant = _host.is_array_variable(target) and not isinstance(value, _host.Variable)
        if is_constant and np.asarray(value).dtype.kind not in "biufc":
            raise TypeError(
                f"{name} gives {target} the value {shown(value)}, which is no expression."
                f"{advice(value, _host.title)}"
            )
        if target in seen:
            raise ValueError(f"{name} must update each variable once, but {target} comes twice.")
        seen.add(target)
    return list(map(tuple, updates))


def check_givens(givens):
    """Return the givens as a list of pairs (variable, replacement)."""
    givens = [] if givens is None else givens
    form = "pairs (variable, replacement)"
    require(f"givens must be a dict or a list of {form}", givens, (dict, list, tuple))
    pairs = givens.items() if isinstance(givens, dict) else givens
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(f"givens must be {form}, got {shown(pair)} among them.")
        require("givens must replace variables", pair[0], _host.Variable)
    return list(map(tuple, pairs))


def check_mode(mode):
    """Raise TypeError or ValueError for a mode that ``theano.function`` does not take."""
    what = f"mode must be a {_host.title} mode or the name of one"
    require(what, mode, (str, _host.Mode, type(None)))
    if isinstance(mode, str) and not _host.is_mode(mode):
        raise ValueError(f"{what}, such as 'FAST_RUN', got {mode!r}.")


def describe_value(value):
    """Return the type and the contents of a value, in a few words, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype}, shape {value.shape}"
    if hasattr(value, "dtype") and getattr(value, "shape", ()):
        return f"a {type(value).__name__} of dtype {value.dtype}, shape {value.shape}"
    kind = "" if value is None else f"{type(value).__name__} "
    return f"{kind}{str(value)[:60]}"


def check_axes(axes, inputs, outputs, sliceables):
    """Return the inputs, a list of `Input`, with their axes of rows; set those of `outputs`."""
    if axes is None:
        return inputs
    require("axes must be a dict of variables with their axis of rows, as {x: 1}", axes, dict)
    axis_of = {}
    for variable, axis in axes.items():
        if not isinstance(variable, _host.Variable) or not _host.is_array_variable(variable):
            raise TypeError(f"axes must name tensor variables, got {shown(variable)}.")
        if isinstance(sliceables, list) and any(variable is other for other in sliceables):
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
        for each in inputs:
            if each.variable is variable and each.is_scattered and each.storage is None:
                axis_of[variable], is_known = axis, True
        if not is_known:
            raise ValueError(
                f"axes names {variable}, which is neither one of the inputs that are scattered nor "
                "an output of mode 'gather'."
            )
    return [each._replace(axis=axis_of.get(each.variable, 0)) for each in inputs]


def check_lengths(inputs):
    """Raise ValueError for scattered inputs whose type fixes their number of rows."""
    for each in inputs:
        if each.is_scattered:
            _refuse_length(f"The input {each.variable} is scattered", each.variable, each.axis)


def _refuse_length(fact, variable, axis):
    """Raise ValueError if the type of a variable fixes its number of rows."""
    lengths = _host.lengths(variable)
    length = lengths[axis] if lengths else None  # sparse variables of Theano have none
    if length not in (None, 1):
        raise ValueError(
            f"{fact}, but by its type {variable.type} it has always {length} rows, and a rank has "
            f"some of them. Make it with None in place of {length} in its shape."
        )


def check_sliceables(sliceables, used, updated):
    """Return the sliceable shared variables, each once, as a list."""
    if not isinstance(sliceables, _host.Variable) and not sliceables:
        return []
    require("sliceable_shareds must be a list of shared variables", sliceables, list)
    for variable in sliceables:
        require("sliceable_shareds must hold shared variables", variable, _host.SharedVariable)
        if not any(variable is other for other in used):
            raise ValueError(f"sliceable_shareds has {variable}, which the function does not use.")
        if variable.ndim == 0:
            raise ValueError(f"sliceable_shareds has {variable}, which has no axis 0.")
        _refuse_length(f"sliceable_shareds has {variable}", variable, 0)
        if any(variable is target for target in updated):
            raise ValueError(
                f"sliceable_shareds has {variable}, which the function updates: it can't be both."
            )
    # Deduplicate: a second selection would index rows that are already selected.
    return list(dict.fromkeys(sliceables))


def check_swap(swap, used):
    """Return a dict of shared variables of a function to others of their types, checked."""
    swap = {} if swap is None else swap
    require("swap must be a dict of shared variables", swap, dict)
    for old, new in swap.items():
        for variable in (old, new):
            require("swap must hold shared variables", variable, _host.SharedVariable)
        if not any(old is variable for variable in used):
            raise ValueError(f"swap has {old}, which the function does not use.")
        if old.type != new.type:
            raise TypeError(
                f"swap must hold variables of one type, got {old}, of type {old.type}, and {new}, "
                f"of type {new.type}."
            )
    return swap


def swap_variables(source, swap, defaults):
    """Return a `Source` with other shared variables; `defaults` are its default updates."""

    def swapped(pairs):
        values = _host.swapped([new for _, new in pairs], swap)
        return [(target, value) for (target, _), value in zip(pairs, values)]

    # A default update belongs to the variable that is replaced, so it becomes an explicit one.
    defaults = [pair for pair in defaults if pair[0] in swap]
    updates = swapped([*source.updates, *defaults])
    outputs = copy.copy(source.outputs)
    outputs.variables = _host.swapped(outputs.variables, swap)
    of_inputs = swapped([(each, each.update) for each in source.inputs])
    return source._replace(
        inputs=[each._replace(update=update) for each, update in of_inputs],
        outputs=outputs,
        updates=[(swap.get(target, target), value) for target, value in updates],
        update_modes=[*source.update_modes, *("avg" for _ in defaults)],
        sliceables=[swap.get(each, each) for each in source.sliceables or ()],
        keywords={**source.keywords, "givens": swapped(source.keywords["givens"])},
    )
