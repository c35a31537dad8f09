"""Divide the graph of a serial function over the ranks, so that each value stays serial Theano's.

    x (rows) ──▶ dot(x, w) (rows) ──▶ ... ──▶ sum over rows (part) ──▶ / n (part) ──▶ output: "sum"
                                      dot(x.T, delta) (part) ──▶ AllReduce ──▶ update (same)

Each variable of the graph gets a kind, from the inputs to the outputs, by the rule of its
operation. A part is reduced where an operation needs its value. An operation without a rule takes
what is the same on all ranks, and can't take rows: then the function can't be divided.
"""

import inspect
import itertools
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Constant, Variable, io_toposort, tensor
from synkhronos._host.base.dividing import chosen_operations
from synkhronos._host.base.dividing.chosen_operations import all_reduce, is_random_state, scalar
from synkhronos._host.base.functions import is_by, operation_name
from synkhronos._host.base.kinds import LENGTH, PART, POSITIONS, ROWS, SAME, SHAPE, STREAM, UNKNOWN
from synkhronos._host.base.rank_operations import RankOperation
from synkhronos._host.base.rows import Rows, RowsOfRank, TotalRows
from synkhronos._machine.deep_recursion import recurses_deep

MANY = 4  # if more inputs are vectors, all of them have rows, or none

_INSTEAD = (
    "Make it with synkhronos.function, with modes and reductions of your choice, or compute in a "
    "function of its own what needs all rows."
)


class CannotDivide(Exception):
    """A function can't be divided over the ranks; the message says why, without a subject."""

    def __init__(self, reason, instead=_INSTEAD):
        super().__init__(reason)
        self.instead = instead  # what to write to have it divided
        self.variable = None  # the one that can't be computed, if it is known


class Value(NamedTuple):
    """The variable that a rank computes for a variable of the serial graph."""

    variable: Any  # a part of floats may have a wider dtype until it is reduced
    kind: str = SAME
    axis: int = 0  # of the rows; the position of the length in a shape
    exact: bool = False  # whether this axis is as long as the rank has rows, not a multiple of it
    total: Any = None  # the serial value of a length or a shape
    reason: str = ""
    # How often the rows repeat along this axis, if reshaping has merged the axes before into it:
    # (time, rows) becomes all rows of the first time, then of the next, ... There are two
    # expressions of this number, of variables of the serial graph and of the rank's.
    times: Optional[Tuple[Any, Any]] = None


class Divided(NamedTuple):
    """A function for ranks that computes what a serial one computes."""

    inputs: List[Any]  # in place of those of the serial function
    scattered: List[Optional[int]]  # for each input the axis of its rows, which is axis 0 here
    outputs: List[Tuple[Any, Optional[str]]]  # variables with their modes
    axes: List[int]  # the axis of each output that its axis 0 came from
    merged: List[bool]  # whether this axis of an output must be merged with the one before
    dtypes: List[Tuple[int, str]]  # the dtypes of outputs that ranks return in a wider one
    updates: List[Tuple[Any, Any]]
    totals: List[Any]  # expressions of the numbers of rows that are sliced from shared variables
    remainders: List[Any]  # numbers that must be 0 in a call, or ranks can't reshape their rows
    n_rows: Optional[int]  # the number of rows that a call must have; None for any
    draws: bool  # whether it computes with random states, updated or not


@recurses_deep
def divide(inputs, outputs, updates, givens, no_default_updates, optional=()) -> Divided:
    """Divide a function, given by arguments of ``theano.function``, with its default updates.

    `optional` are the positions of inputs that have values, which calls may leave out.
    """
    computed, update_of = rebuilt(inputs, outputs, updates, givens, no_default_updates)
    targets = list(update_of)
    wanted = [*computed, *(update_of[target] for target in targets)]
    failure = None
    for axes in _axes_of_inputs(inputs, wanted, optional):
        try:
            return _divide(inputs, axes, wanted, len(computed), targets)
        except CannotDivide as error:
            failure = failure or error
    raise failure


def rebuilt(inputs, outputs, updates, givens, no_default_updates):
    """Return outputs and a dict of updates, default ones too, with the givens in their places."""
    _, computed, (_, update_of, _, _) = chosen_operations.rebuild_collect_shared(
        list(outputs), list(inputs), givens, updates, True, True, no_default_updates
    )
    return computed, update_of


def _axes_of_inputs(inputs, wanted, optional):
    """Return choices of an axis of rows, or None, for each input, in the order to try them.

    Vectors, and inputs with a value, need not have an item for each row: they may hold weights. If
    there are scans, they may go over axis 0, the time, of arrays with their rows on axis 1.
    """
    nodes = io_toposort(inputs, wanted)
    first_of_matrices = [0, 1] if any(isinstance(node.op, host.Scan) for node in nodes) else [0]
    ways = []
    for first in first_of_matrices:
        axes = [_axis_of_input(each, first) for each in inputs]
        ways.append([None if i in optional else a for i, a in enumerate(axes)])
        vectors = [i for i, a in enumerate(axes) if a is not None and inputs[i].ndim == 1]
        some = range(len(vectors) + 1) if len(vectors) <= MANY else (0, len(vectors))
        for without in (each for n in some for each in itertools.combinations(vectors, n)):
            ways.append([None if i in without else a for i, a in enumerate(axes)])
    return dict.fromkeys(map(tuple, ways))


def _axis_of_input(variable, first):
    """Return the axis that may have rows; None if there is none, or its length is fixed."""
    if not chosen_operations.is_array_variable(variable) or not variable.ndim:
        return None
    axis = first if variable.ndim > 1 else 0
    return axis if chosen_operations.lengths(variable)[axis] is None else None


def _divide(inputs, axes, wanted, n_outputs, targets):
    # Each pass finds parts that a later operation needs reduced: repeat until it finds no more.
    values = {}
    for variable, axis in zip(inputs, axes):
        mine = variable
        if axis:
            order = [axis, *(i for i in range(variable.ndim) if i != axis)]
            mine = variable.dimshuffle(order).type(variable.name)
            mine = mine.dimshuffle([order.index(i) for i in range(variable.ndim)])
        has_rows = axis is not None
        values[variable] = Value(mine, ROWS if has_rows else SAME, axis or 0, exact=has_rows)
    needed, expansions = set(), {}
    while True:
        division = Division(inputs, values, needed, expansions)
        result = division.run(axes, wanted, n_outputs, targets)
        if division.needed <= needed:
            return result
        needed = needed | division.needed


_HELD = Value(None, UNKNOWN, reason="uses a part of what operations compute together")


class Division:
    """The values of the variables of a graph on the ranks, and conditions that calls must meet."""

    NOT_FOR_ROWS = Value(None, UNKNOWN, reason="draws random numbers that are not for each row")

    def __init__(self, inputs, values, needed=(), expansions=None, total=None):
        self.inputs, self.values = inputs, dict(values)
        self.scatters = any(value.kind == ROWS for value in values.values())
        self.needed = set(needed)
        self.expansions = {} if expansions is None else expansions
        # The bounds of the minibatch that is sliced from shared variables, and for each of these
        # the number of rows; a call with different numbers must be serial.
        self.bounds, self.totals = None, [] if total is None else [total]
        self.remainders = []
        self.n_rows = None
        self.loops = {}  # an array of which a scan takes an item in each step -> the scan's node

    def run(self, axes, wanted, n_outputs, targets):
        """Return what a function is on the ranks, for the axes of its inputs' rows."""
        uses_rows = self.walk(self.inputs, wanted)
        if not uses_rows and self.scatters:
            raise CannotDivide("computes nothing from the rows of its inputs")
        if not uses_rows:
            instead = (
                "Pass the minibatch as an input, or slice it: data[i * size : (i + 1) * size]."
            )
            raise CannotDivide("has no input with rows", instead)
        outputs = [self._output(each) for each in wanted[:n_outputs]]
        new = zip(targets, wanted[n_outputs:])
        updates = [(target, self._update(target, each)) for target, each in new]
        pairs = [pair for pair, _, _ in outputs]
        dtypes = [
            (i, serial.dtype)
            for i, ((mine, mode), serial) in enumerate(zip(pairs, wanted))
            if mode == "sum" and mine.dtype != serial.dtype
        ]
        new = [self.values[each].variable for each in self.inputs]
        return Divided(
            [each.owner.inputs[0] if axis else each for each, axis in zip(new, axes)],
            list(axes),
            pairs,
            [axis for _, axis, _ in outputs],
            [is_merged for _, _, is_merged in outputs],
            dtypes,
            updates,
            *with_inferred_lengths(self.inputs, self.totals, self.remainders),
            self.n_rows,
            any(value.kind == STREAM for value in self.values.values()),
        )

    def walk(self, inputs, wanted):
        """Find the value of each variable up to the wanted ones; return whether any has rows."""
        before, nodes = set(self.needed), io_toposort(inputs, wanted)
        self.loops.update(_loops_over(nodes))
        groups = {node: _ENDING[type(node.op)](node) for node in nodes if type(node.op) in _ENDING}
        groups = {node: group for node, group in groups.items() if group is not None}
        held = {each for others, _ in groups.values() for each in others} - {*groups}
        uses_rows = any(self.of(each).kind == ROWS for each in wanted if each.owner is None)
        for node in nodes:
            uses_rows = uses_rows or any(self.of(each).kind == ROWS for each in node.inputs)
            if node in held:
                self.values.update(dict.fromkeys(node.outputs, _HELD))
                continue
            others, of_group = groups.get(node, ((), None))
            values = of_group(self) if of_group else None
            if values is not None:
                self.values.update(values)
                continue
            for each in (*others, node):
                for variable, value in zip(each.outputs, self._apply(each)):
                    self.values[variable] = value
                    if value.kind == PART and variable in before:
                        self.same(variable)
        return uses_rows

    def expand(self, node, expression):
        """Return the values of a node's outputs, from an expression of it in simpler operations."""
        # Made once for all passes, which find the same parts in it.
        if node not in self.expansions:
            self.expansions[node] = expression(node)
        outputs = self.expansions[node]
        self.walk(node.inputs, outputs)
        return [self.of(each) for each in outputs]

    def _apply(self, node):
        if isinstance(node.op, (RankOperation, Rows)):
            raise CannotDivide(f"has {operation_name(node)}, which says by itself what ranks do")
        kind = next((each for each in type(node.op).__mro__ if each in _RULES), None)
        if kind is None:
            return self.unruled(node)
        unknown = unknown_options(type(node.op))
        if unknown:
            options = " and ".join(map(repr, unknown))
            return self.unruled(node, f" with an option that has no rule, {options},")
        if kind in _KNOW_TIMES:
            return _RULES[kind](self, node)
        times = self.times_of(node, node.inputs)
        values = _RULES[kind](self, node)
        if times is None:
            return values
        return [each._replace(times=times) if each.kind in _COUNTED else each for each in values]

    def times_of(self, node, variables):
        """Return the `times` of a node's inputs with rows, which must be the same for all."""
        values = [value for value in map(self.of, variables) if value.kind in _COUNTED]
        if not any(value.times for value in values):
            return None
        rows = [value for value in values if value.kind in (ROWS, POSITIONS)]
        if isinstance(node.op, host.Elemwise):
            values = rows or values[:1]  # beside rows, lengths are just numbers
        first, *others = [value.times for value in values]
        if any((other is None) != (first is None) for other in others):
            self.refuse(node, "rows in different orders")
        for other in others:
            if other is not None and not _equal(first[0], other[0]):
                self.remainders.append(first[0] - other[0])
        return first

    def of(self, variable):
        """Return the value of a variable; constants and shared variables get theirs here."""
        if variable not in self.values:
            is_stream = not isinstance(variable, Constant) and is_random_state(variable)
            self.values[variable] = Value(variable, STREAM if is_stream else SAME)
        return self.values[variable]

    def same(self, variable):
        """Return a variable with the serial value on all ranks; a part is reduced."""
        value = self.of(variable)
        if value.kind == PART:
            self.needed.add(self._before_scaling(variable))
            whole = tensor.cast(all_reduce(value.variable, "sum"), variable.dtype)
            value = self.values[variable] = Value(whole)
        if value.kind == SAME:
            return value.variable
        if value.kind in (LENGTH, SHAPE):
            return value.total
        if value.kind == UNKNOWN:
            raise CannotDivide(value.reason)
        if value.kind == STREAM:
            raise CannotDivide("computes with a random state")
        raise CannotDivide("computes with rows of an input where all ranks need all of them")

    def _before_scaling(self, variable):
        """Return the part that a part is a multiple of: reducing it rounds as serially."""
        while _is_multiple(variable.owner):
            parts = [each for each in variable.owner.inputs if self.of(each).kind == PART]
            if len(parts) != 1:
                break
            [variable] = parts
        return variable

    def given(self, variable, *kinds):
        """Return a variable of one of these kinds as the rank has it, any other as `same` does."""
        value = self.of(variable)
        return value.variable if value.kind in kinds else self.same(variable)

    def measured(self, variable):
        """Return the rank's variable for one, of any kind, of which only the shape is used."""
        value = self.of(variable)
        if value.kind == UNKNOWN:
            raise CannotDivide(value.reason)
        return value.variable

    def unruled(self, node, options=""):
        """Apply an operation to what is the same on all ranks."""
        if any(self.of(each).kind in (ROWS, POSITIONS, STREAM) for each in node.inputs):
            raise CannotDivide(f"computes {operation_name(node)}{options} of rows of its inputs")
        return self.apply(node, [self.same(each) for each in node.inputs])

    def apply(self, node, inputs, kind=SAME, axis=0, exact=False):
        """Apply an operation to new inputs; return values of one kind for all its outputs."""
        new = node.clone_with_new_inputs(list(inputs), strict=False).outputs
        if kind == PART and new[0].dtype in ("float16", "bool"):
            # Serial Theano adds up in a wider dtype: a part may overflow although the sum does not.
            self.refuse(node, f"rows as {new[0].dtype}")
        return [Value(each, kind, axis, exact) for each in new]

    def of_length(self, node, values):
        """Apply an operation with one length or shape twice: to the rank's and the serial one."""
        [old] = [value for value in values if value.kind in (LENGTH, SHAPE)]
        [mine] = self.apply(node, [value.variable for value in values])
        total = [value.total if value is old else value.variable for value in values]
        [total] = self.apply(node, total)
        exact = old.exact and len(values) == 1
        return [old._replace(variable=mine.variable, total=total.variable, exact=exact)]

    def refuse(self, node, what="rows of its inputs in a way that has no rule", instead=_INSTEAD):
        raise CannotDivide(f"computes {operation_name(node)} of {what}", instead)

    def refuse_steps(self, node):
        """Refuse a scan over rows."""
        instead = (
            "Compute it for all rows at once, without a scan, or scan over the time of arrays "
            "(time, rows, ...): x.dimshuffle(1, 0, 2)."
        )
        self.refuse(node, "rows, one in each step: its steps must be along another axis", instead)

    def refuse_length(self, node, variable, axis):
        """Refuse a variable, used beside rows, with another length than 1 along their axis."""
        if axis >= 0 and not variable.type.broadcastable[axis]:
            self.refuse(node, f"rows and {variable}, which has a fixed number of rows")

    def length(self, value):
        """Return the number of rows of a value with rows: the rank's, and that of all ranks."""
        mine, exact = host.Shape_i(value.axis)(value.variable), value.exact
        if not exact:
            total = all_reduce(mine, "sum")
        elif self.totals:
            total = self.totals[0]
        elif value.times is None:
            total = TotalRows()(mine)
        else:
            total = TotalRows()(mine // tensor.maximum(value.times[1], 1))
        if exact and value.times is not None:
            total = total * value.times[1]
        return Value(mine, LENGTH, exact=exact, total=total, times=value.times)

    def serial_rows(self):
        """Return the number of rows of a call, as the serial function has it."""
        if self.totals:
            return self.totals[0]
        rows = (each for each in self.inputs if self.of(each).kind == ROWS)
        first = next(rows)
        return host.Shape_i(self.of(first).axis)(first)

    def require(self, n_rows):
        """Let only calls with this number of rows be divided."""
        if self.n_rows not in (None, n_rows):
            raise CannotDivide(f"has fixed numbers of rows, {self.n_rows} and {n_rows}")
        self.n_rows = n_rows

    def require_images(self, n_images, value, images):
        """Let only calls be divided that have as many images as an operation was made for."""
        if value.exact and value.times is None:
            self.require(n_images)
        else:
            self.remainders.append(host.Shape_i(value.axis)(images) - n_images)

    def keep_equal(self, variables, lengths=()):
        """Let only calls be divided in which arrays have equally many rows, as many as `lengths`.

        In others a rank may repeat its only row where serial Theano raises an error.
        """
        values = list(map(self.of, variables))
        rows = [(v, each) for v, each in zip(values, variables) if v.kind in (ROWS, POSITIONS)]
        used = [v for v, _ in rows] + list(map(self.of, lengths))
        if all(value.exact for value in used):
            return
        first, *others = [*(host.Shape_i(v.axis)(each) for v, each in rows), *lengths]
        self.remainders += [other - first for other in others]

    def rows_of(self, start, stop, variable):
        """Return the bounds of this rank's part of a slice of an array that all ranks have."""
        if self.bounds is None:
            self.bounds = start, stop
        elif not all(map(_equal, (start, stop), self.bounds)):
            raise CannotDivide("slices its shared variables in several ways")
        new = [self.same(each) if isinstance(each, Variable) else each for each in (start, stop)]
        begin, end, total = RowsOfRank()(*new, host.Shape_i(0)(variable))
        self.totals.append(total)
        return begin, end

    def _output(self, variable):
        """Return a variable with its mode, the axis that axis 0 came from, and if it was merged."""
        value = self.of(variable)
        if value.kind == PART and np.dtype(value.variable.dtype).kind in "iufc":
            return (value.variable, "sum"), 0, False
        if value.kind == ROWS:
            mine, axis, is_merged = value.variable, value.axis, value.times is not None
            if is_merged:
                shape = [mine.shape[i] for i in range(mine.ndim)]
                times = value.times[1]
                shape[axis : axis + 1] = times, shape[axis] // tensor.maximum(times, 1)
                mine, axis = mine.reshape(shape), axis + 1
            axes = [axis, *(i for i in range(mine.ndim) if i != axis)]
            return (mine.dimshuffle(axes) if axis else mine, "gather"), axis, is_merged
        return (self.same(variable), None), 0, False

    def _update(self, target, variable):
        value = self.of(variable)
        if is_random_state(target):
            if value.kind != STREAM:
                raise CannotDivide(f"sets the random state {target}")
            return value.variable
        if value.kind == ROWS:
            instead = "Return the rows as an output, and pass them as an input of the next call."
            raise CannotDivide(f"updates {target} with rows of its inputs", instead)
        return self.same(variable)


def _loops_over(nodes):
    """Return array -> the scan that takes an item of it, or of a slice of it, in each step."""
    loops = {}
    for node in nodes:
        if isinstance(node.op, host.Scan):
            for each in node.op.outer_seqs(node.inputs):
                while each is not None:
                    loops[each] = node
                    each = each.owner.inputs[0] if is_by(each, host.Subtensor) else None
    return loops


def _is_multiple(node):
    op = getattr(getattr(node, "op", None), "scalar_op", None)
    return isinstance(op, (scalar.TrueDiv, scalar.Mul))


def with_inferred_lengths(inputs, *counted):
    """Return lists of expressions with ``shape`` for `Shape_i`, so that no call computes arrays."""
    new = {}
    for node in io_toposort(inputs, [each for some in counted for each in some]):
        inputs_now = [new.get(each, each) for each in node.inputs]
        if isinstance(node.op, host.Shape_i):
            new[node.outputs[0]] = inputs_now[0].shape[node.op.i]
        elif inputs_now != node.inputs:
            new.update(zip(node.outputs, node.clone_with_new_inputs(inputs_now, False).outputs))
    return [[new.get(each, each) for each in some] for some in counted]


def _equal(one, other):
    if isinstance(one, Variable) and isinstance(other, Variable):
        return one is other or host.equal_computations([one], [other])
    return one == other


_RULES, _KNOW_TIMES, _ENDING = {}, set(), {}
_COUNTED = (ROWS, LENGTH, SHAPE, POSITIONS)  # kinds of values that depend on the rows along an axis


def rule(*classes, knows_times=False):
    """Return a decorator that makes a function the rule of these classes of operations.

    A rule takes the division and a node, and returns a `Value` for each output of the node. It
    raises `CannotDivide` where the outputs would not be those of serial Theano. Unless a rule
    `knows_times`, all its inputs with rows must have the same `times`, which its outputs get.
    """

    def add(function):
        _RULES.update(dict.fromkeys(classes, function))
        if knows_times:
            _KNOW_TIMES.update(classes)
        return function

    return add


# A rule is written for the options that its operations have, such as the axis of a sum. A new
# release of the host library may bring another one, which changes what an operation does to rows.
# So an operation that has an option beside those in `OPTIONS` takes no rows.
_ANY = "*"  # in place of names: the rule divides the graph that the options are about


def unknown_options(kind):
    """Return the options of a class of operations that no rule knows, in order."""
    known = {
        name
        for each in kind.__mro__
        for name in chosen_operations.OPTIONS.get(each.__name__, "").split()
    }
    return [] if _ANY in known else sorted(options_of(kind) - known)


def options_of(kind):
    """Return the options of a class: its `__props__`, else the arguments of its constructor."""
    props = getattr(kind, "__props__", None)
    if props is not None:
        return set(props)
    parameters = inspect.signature(kind).parameters.values()
    return {each.name for each in parameters if each.kind not in _REST}


_REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def ending(op):
    """Return a decorator for a function that finds a group of operations with a common rule.

    The function takes the last node of a group, of the class `op`. It returns the nodes before it
    in order, and the rule, which takes the division and returns the values of variables. Instead
    either may return None: then each node has its own rule.
    """

    def add(function):
        _ENDING[op] = function
        return function

    return add


def keeps_sums(part, after):
    """Return whether parts still add up to the whole when they are cast to another dtype."""
    before, after = np.dtype(part.dtype), np.dtype(after)
    if after in ("float16", "bool"):
        return False
    if before == after:
        return True
    if before.kind in "iu" and _may_wrap(part):
        return after.kind in "iu" and after.itemsize <= before.itemsize
    return before.kind in "iu" or after.kind in "fc"


def _may_wrap(part):
    """Return whether sums of integers may have wrapped around, so that no wider dtype is right."""
    is_sum = is_by(part, host.CAReduce) and isinstance(part.owner.op.scalar_op, scalar.Add)
    return not (is_sum and fits(part.owner.inputs[0].dtype, part.dtype))


def fits(dtype, within):
    """Return whether any sum of integers of a dtype fits into another one."""
    return np.dtype(dtype).itemsize <= 4 and within in ("int64", "uint64")


def vector_length(variable):
    """Return the length of a vector if the graph says it, else None."""
    while is_by(variable, host.Elemwise):
        if len(variable.owner.inputs) > 1:
            return None
        [variable] = variable.owner.inputs
    try:
        return chosen_operations.get_vector_length(variable)
    except ValueError:
        return None
