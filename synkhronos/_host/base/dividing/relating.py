"""How a rank's own value is related to the serial one: a sum, an average, or neither.

    err ** 2 (rows) ──▶ sum (adds up) ──▶ / x.shape[0] (an average of the ranks) ──▶ "avg" is right
    m * err (rows)  ──▶ sum (adds up) ──▶ / m.sum() (neither)                    ──▶ no mode is

With n of N rows, numbers on a rank are often a power of N / n times the serial ones, such as the
gradient of a mean for each row: this power is the degree of a relation.

A rule takes an `Alone`, a node, the values and the relations of its inputs, and the value of the
output. It returns the `Relation` of the output. An operation without a rule has the serial value if
its inputs do.
"""

import functools
from typing import Any, NamedTuple, Optional

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.dividing.chosen_operations import joined, scalar
from synkhronos._host.base.dividing.division import vector_length
from synkhronos._host.base.dividing.elementwise import is_truncated, reduced_axes
from synkhronos._host.base.dividing.shapes import lengths_taken
from synkhronos._host.base.functions import is_by, number
from synkhronos._host.base.kinds import LENGTH, PART, POSITIONS, ROWS, SAME, SHAPE, STREAM, UNKNOWN
from synkhronos._host.base.rank_operations import AllReduce, has_inside

# How a rank's own value is related to the serial one, s; d is the degree.
SCALED = "scaled"  # own = s (N / n) ** d; of rows, for each row
ADDS = "adds"  # the sum of own (n / N) ** d over the ranks is s: a sum for 0, an average for 1
MERGED = "merged"  # s is the largest, or the smallest, of the own values, or their product
LENGTHS = "lengths"  # a shape, whose one item is the number of rows
OWN = "own"  # none of these
OPEN = "open"  # no rule says
MIXED = "mixed"  # the reason of OWN: a sum over rows plus a value that all ranks have


class Relation(NamedTuple):
    """The relation of a rank's own value to the serial one."""

    kind: str
    degree: int = 0
    mode: str = ""  # of what is merged: "max", "min" or "prod"
    axis: int = 0  # the position of the number of rows in a shape, of so many lengths
    n_lengths: Optional[int] = None
    cause: Any = None  # the variable at which a value became the rank's own, or open
    reason: str = ""  # why it is open, or the rank's own
    is_filled: bool = False  # whether all rows have the same value

    @property
    def is_equal(self):
        """Whether each rank has the serial value, or its rows of it."""
        return self.kind == SCALED and self.degree == 0

    @property
    def is_proportional(self):
        """Whether it is the serial value times a power of the rank's share of the rows."""
        return self.kind == SCALED

    @property
    def is_own(self):
        """Whether it is the rank's own, and no reduction makes the serial value of it."""
        return self.kind == OWN

    @property
    def is_mixed(self):
        """Whether ranks add something that all of them have to a sum over their rows."""
        return self.is_own and self.reason == MIXED

    @property
    def is_open(self):
        """Whether no rule says what it is."""
        return self.kind == OPEN

    @property
    def right_mode(self):
        """The mode that makes the serial value, if it is not of rows; None if no mode does."""
        if self.kind == ADDS:
            return {0: "sum", 1: "avg"}.get(self.degree)
        if self.kind == MERGED:
            return self.mode
        if self.kind == SCALED:
            return {0: "avg", -1: "sum"}.get(self.degree)
        return None


EQUAL = Relation(SCALED)


def no_rule(cause=None, reason=""):
    """Return the relation of a variable without a rule; `cause` is the first such variable."""
    return Relation(OPEN, cause=cause, reason=reason)


def worst_of(given):
    """Return the first relation that is the rank's own or open, else None."""
    return next((each for kind in (OPEN, OWN) for each in given if each.kind == kind), None)


def summed(relation):
    """Return the relation of a sum over rows that have a relation."""
    if relation.kind != SCALED:
        return relation
    if relation.is_filled:
        return Relation(SCALED, relation.degree - 1)
    return Relation(ADDS, relation.degree)


def joint(given):
    """Return the relation of a result that is linear in several values together, as a sum is."""
    worst = worst_of(given)
    if worst is not None:
        return worst
    if len(given) > 1 and any(each.kind == MERGED for each in given):
        return Relation(OWN)  # the largest sum is not the sum of the largest
    if any(each.kind == ADDS for each in given):  # values that all ranks have count as parts, too
        given = [Relation(ADDS, r.degree + 1) if r.kind == SCALED else r for r in given]
    first = given[0]._replace(is_filled=all(each.is_filled for each in given))
    if all(each[:3] == first[:3] for each in given):
        return first
    degrees = {each.degree for each in given if each.kind == ADDS}
    return Relation(OWN, reason=MIXED if degrees == {0, 1} else "")


def product(given):
    """Return the relation of a result that is linear in each of several values, as a product is."""
    worst = worst_of(given)
    if worst is not None:
        return worst
    if any(each.kind not in (SCALED, ADDS) for each in given):
        return Relation(OWN)
    degree, n_sums = sum(each.degree for each in given), sum(r.kind == ADDS for r in given)
    if n_sums > 1:
        return Relation(OWN)
    return Relation(ADDS if n_sums else SCALED, degree)


_RULES = {}


def relating(*classes):
    """Return a decorator that makes a function the rule of these classes of operations."""

    def add(function):
        _RULES.update(dict.fromkeys(classes, function))
        return function

    return add


def related(alone, node, position, before, given, value):
    """Return the relation of an output of a node, by the rule of its operation."""
    op, output = node.op, node.outputs[position]
    if value.kind == UNKNOWN:
        return worst_of(given) or no_rule(output, value.reason)
    if isinstance(op, host.IfElse):
        condition, *branches = given
        pair = branches[position], branches[position + op.n_outs]
        return joint(pair) if condition.is_equal else worst_of(given) or Relation(OWN)
    if value.kind in (LENGTH, SHAPE) and not isinstance(op, (host.Shape, host.Shape_i)):
        if not all(map(_is_length_or_equal, before, given)):
            return worst_of(given) or no_rule(output)
        if value.kind == LENGTH:
            return Relation(SCALED, -1)
        return Relation(LENGTHS, axis=value.axis, n_lengths=vector_length(output))
    rules = (_RULES[kind] for kind in type(op).__mro__ if kind in _RULES)
    relation = next(rules, _any)(alone, node, before, given, value)
    if relation.kind in (ADDS, MERGED) and value.kind == ROWS:
        return Relation(OWN, cause=output)
    if relation.kind in (OWN, OPEN) and relation.cause is None:
        return relation._replace(cause=output, reason=relation.reason or value.reason)
    return relation


def _is_length_or_equal(value, relation):
    is_length = value.kind in (LENGTH, SHAPE) and relation.kind in (SCALED, LENGTHS)
    return is_length or relation.is_equal


def linear(*classes, joint=None, place=None, keeps_rows=False):
    """Register operations that are linear: in several inputs together, in one, or in each.

    Those in the inputs at the positions `joint` are linear together, as in a sum. `place` is the
    position of a single input. Without both, operations are linear in each of their inputs, as
    products are. If `keeps_rows` is true, rows that are all the same stay so.
    """
    if joint is not None:
        rule = functools.partial(_linear_together, joint, keeps_rows)
    elif place is not None:
        rule = functools.partial(_linear_in_one, place)
    else:
        rule = _linear_in_each
    relating(*classes)(rule)


def _any(alone, node, before, given, value):
    items = _of_items(before, given, value)
    relations = [relation for _, relation in items]
    if not all(each.is_equal for each in relations):
        worst = worst_of(relations) or no_rule()
        # Integers may determine the shape of the result.
        dtypes = [(getattr(node.inputs[i], "dtype", ""), relation) for i, relation in items]
        is_shaped = any(d.startswith("int") and not each.is_equal for d, each in dtypes)
        return no_rule(worst.cause) if is_shaped else worst
    if value.kind in (ROWS, STREAM, POSITIONS):
        return EQUAL
    if value.kind == PART:
        return Relation(ADDS)
    if any(each.kind in (ROWS, POSITIONS) for each in before):
        mode = _mode_of(value)
        return Relation(MERGED, mode=mode) if mode else no_rule()
    return EQUAL if value.kind == SAME else no_rule()


def _of_items(before, given, value):
    """Return pairs (position, relation) of inputs, without lengths that an array is made with."""
    pairs = list(enumerate(given))
    if value.kind not in (ROWS, STREAM, POSITIONS):
        return pairs
    of_shape = (LENGTH, SHAPE, POSITIONS, STREAM)
    return [
        (i, r)
        for i, r in pairs
        if r.kind != LENGTHS and not (before[i].kind in of_shape and r.kind == SCALED)
    ]


def _mode_of(value):
    """Return the operation of an AllReduce that a rule has put last, cast or not; else ""."""
    variable = value.variable
    while is_by(variable, host.Elemwise) and len(variable.owner.inputs) == 1:
        [variable] = variable.owner.inputs
    return variable.owner.op.ops[0] if is_by(variable, AllReduce) else ""


def _linear_together(places, keeps_rows, alone, node, before, given, value):
    rest = [r for i, r in _of_items(before, given, value) if i not in places]
    if any(not each.is_equal for each in rest):  # it may have another shape, too
        return no_rule((worst_of(rest) or EQUAL).cause)
    # The operation adds up rows, or values that it puts where the index of each row says.
    by_rows = any(each.kind in (ROWS, POSITIONS) for each in before[len(places) :])
    relations = [
        summed(given[i]._replace(is_filled=False))
        if value.kind != ROWS and (before[i].kind == ROWS or (i and by_rows))
        else given[i]
        for i in places
        if not alone.is_zero(node.inputs[i])
    ]
    result = joint(relations) if relations else EQUAL
    return result if keeps_rows else result._replace(is_filled=False)


def _linear_in_each(alone, node, before, given, value):
    arrays = [r for each, r in zip(before, given) if each.kind in (ROWS, PART, SAME, UNKNOWN)]
    result = product(arrays)
    is_sum = value.kind != ROWS and any(each.kind == ROWS for each in before)
    return summed(result) if is_sum else result


def _linear_in_one(place, alone, node, before, given, value):
    rest = [r for i, r in _of_items(before, given, value) if i != place]
    if not all(each.is_equal for each in rest) or given[place].kind == MERGED:
        return _any(alone, node, before, given, value)
    result = given[place]._replace(is_filled=False)
    return summed(result) if value.kind == PART else result


linear(host.DimShuffle, host.Reshape, host.Retype, joint=(0,), keeps_rows=True)
linear(host.ViewOp, host.DeepCopyOp, host.CpuContiguous, joint=(0,), keeps_rows=True)
linear(host.Split, host.RepeatOp, host.Assert, joint=(0,))
linear(host.TensorFromScalar, host.ScalarFromTensor, joint=(0,))
linear(host.IncSubtensor, joint=(0, 1))
linear(host.Dot)


@relating(host.CumOp)
def _running_sum(alone, node, before, given, value):
    if given[0].kind == MERGED:
        return Relation(OWN)
    return _linear_together((0,), False, alone, node, before, given, value)


@relating(host.Elemwise)
def _elemwise(alone, node, before, given, value):
    op, pairs = node.op.scalar_op, list(zip(node.inputs, given))
    if isinstance(op, scalar.Second):
        filling, relation = pairs[1]
        is_filled = alone.of(filling).kind != ROWS or relation.is_filled
        shaped = given[0] if given[0].is_open else relation  # it has the shape of the first
        return shaped._replace(is_filled=value.kind == ROWS and is_filled)
    if alone.own_statistics and value.kind == ROWS:
        given = [
            EQUAL if each.kind in (ADDS, OWN) and not all(variable.type.broadcastable) else each
            for variable, each in pairs  # a statistic of the rows has an item for each column
        ]
    worst = worst_of(given)
    if worst is not None:
        is_kept = isinstance(op, (*_MOVES, scalar.Add, scalar.Sub, scalar.Mul))
        if worst.is_mixed and not (is_kept or worst == given[0]):
            return Relation(OWN, cause=node.outputs[0])
        return worst
    result = EQUAL if all(each.is_equal for each in given) else _number(alone, node, given)
    rows = [r for r, each in zip(given, before) if each.kind == ROWS]
    is_filled = bool(rows) and all(each.is_filled for each in rows)
    return result._replace(is_filled=is_filled) if result.kind == SCALED else result


def _number(alone, node, given):
    """Return the relation of a number that is computed from others, some of them not serial."""
    op, first = node.op.scalar_op, given[0]
    zeros = [alone.is_zero(each) for each in node.inputs]
    nonzero = [r for r, is_zero in zip(given, zeros) if not is_zero] or given
    power = _power(node, given)
    if any(each.kind == LENGTHS for each in given):
        return first if isinstance(op, _MOVES) and len(given) == 1 else no_rule()
    if isinstance(op, scalar.Mul) and any(zeros):
        return EQUAL
    if isinstance(op, scalar.Cast) and is_truncated(node.inputs[0].dtype, node.outputs[0].dtype):
        return first if first.mode in _OPPOSITE else Relation(OWN)
    if first.kind == MERGED and len(given) == 1:
        return _of_merged(op, first)
    if isinstance(op, _MOVES) or power == 1:
        return first
    if isinstance(op, (scalar.Add, scalar.Sub)):
        return joint(nonzero)
    if isinstance(op, scalar.Mul):
        return product(given)
    if isinstance(op, scalar.TrueDiv) and given[1].kind == SCALED:
        return product([first, given[1]._replace(degree=-given[1].degree)])
    if isinstance(op, scalar.Switch) and first.is_equal:
        return joint([r for r, is_zero in zip(given[1:], zeros[1:]) if not is_zero] or given[1:])
    if any(each.kind != SCALED for each in given):
        return Relation(OWN)
    if isinstance(op, (scalar.Maximum, scalar.Minimum)):
        return joint(nonzero)
    if isinstance(op, scalar.Abs):
        return first
    if power is not None:
        return Relation(SCALED, first.degree * power)
    return EQUAL if isinstance(op, _SIGNS) and len(nonzero) == 1 else Relation(OWN)


def _power(node, given):
    """Return the whole power to which an operation raises its input, else None."""
    op = node.op.scalar_op
    if isinstance(op, scalar.Sqr):
        return 2
    if isinstance(op, _INVERSE):
        return -1
    if not isinstance(op, scalar.Pow) or not given[1].is_equal:
        return None
    exponent = number(node.inputs[1])
    return int(exponent) if exponent is not None and float(exponent).is_integer() else None


def _of_merged(op, relation):
    """Return the relation of a function of the largest value, or the smallest, or a product."""
    if isinstance(op, (scalar.Cast, scalar.Identity)):
        return relation
    if isinstance(op, scalar.Neg) and relation.mode in _OPPOSITE:
        return relation._replace(mode=_OPPOSITE[relation.mode])
    is_increasing = isinstance(op, (scalar.Exp, scalar.Tanh))  # and defined for all numbers
    return relation if is_increasing and relation.mode in _OPPOSITE else Relation(OWN)


_OPPOSITE = {"max": "min", "min": "max"}
_MOVES = (scalar.Cast, scalar.Neg, scalar.Identity)
_INVERSE = getattr(scalar, "Inv", None) or scalar.Reciprocal
_SIGN = getattr(scalar, "Sgn", None) or scalar.Sign
_SIGNS = scalar.GT, scalar.LT, scalar.GE, scalar.LE, scalar.EQ, scalar.NEQ, _SIGN


@relating(host.CAReduce)
def _reduce(alone, node, before, given, value):
    op, [relation] = node.op.scalar_op, given
    if relation.is_own or relation.is_open:
        return relation
    if relation.kind == LENGTHS:
        is_product = isinstance(op, scalar.Mul)
        return Relation(SCALED, -1) if is_product else no_rule()
    if before[0].kind == ROWS and before[0].axis in reduced_axes(node):
        if isinstance(op, scalar.Add):
            return summed(relation)
        for kinds, mode in _MERGES.items():
            if isinstance(op, kinds) and relation.is_equal:
                return Relation(MERGED, mode=mode)
        return Relation(OWN)
    is_sum = isinstance(op, scalar.Add) and relation.kind != MERGED
    if is_sum or relation.is_equal:
        return relation
    is_extreme = isinstance(op, (scalar.Maximum, scalar.Minimum))
    return relation if is_extreme and relation.kind == SCALED else Relation(OWN)


_MERGES = {
    (scalar.Maximum, scalar.OR): "max",
    (scalar.Minimum, scalar.AND): "min",
    (scalar.Mul,): "prod",
}


@relating(host.Shape, host.Shape_i)
def _shape(alone, node, before, given, value):
    [measured] = before
    other = no_rule() if given[0].is_open else EQUAL  # the lengths of axes without rows
    if measured.kind not in (ROWS, POSITIONS):
        return other
    if isinstance(node.op, host.Shape_i):
        return Relation(SCALED, -1) if node.op.i == measured.axis else other
    if other.is_open:
        return other
    return Relation(LENGTHS, axis=measured.axis, n_lengths=node.inputs[0].ndim)


@relating(host.MakeVector)
def _vector(alone, node, before, given, value):
    lengths = [i for i, each in enumerate(given) if each == Relation(SCALED, -1)]
    if len(lengths) == 1 and all(each.is_equal for i, each in enumerate(given) if i != lengths[0]):
        return Relation(LENGTHS, axis=lengths[0], n_lengths=len(given))
    return joint(given)


@relating(host.Subtensor)
def _item(alone, node, before, given, value):
    if given[0].kind != LENGTHS:
        return _linear_together((0,), True, alone, node, before, given, value)
    chosen, is_slice = lengths_taken(node, given[0].n_lengths)
    if chosen is None:
        return no_rule()
    if given[0].axis not in chosen:
        return EQUAL
    if not is_slice:
        return Relation(SCALED, -1)
    return Relation(LENGTHS, axis=chosen.index(given[0].axis), n_lengths=len(chosen))


@relating(host.Alloc)
def _filled(alone, node, before, given, value):
    lengths = [
        r
        for each, r in zip(before[1:], given[1:])
        if r.is_open or not (value.kind == ROWS and each.kind == LENGTH)
    ]
    if not all(each.is_equal for each in lengths):
        return no_rule()  # its shape depends on more than the number of rows
    is_filled = before[0].kind != ROWS or given[0].is_filled
    return given[0]._replace(is_filled=value.kind == ROWS and is_filled)


@relating(host.Join)
def _join(alone, node, before, given, value):
    arrays = joined(node)[1]
    relations = [alone.relation(each) for each in arrays]
    if any(each.kind == LENGTHS for each in relations):
        return no_rule()
    return joint([r for r, each in zip(relations, arrays) if not alone.is_zero(each)] or relations)


@relating(host.Scan)
def _scan(alone, node, before, given, value):
    if not all(each.is_equal for each in given):
        return worst_of(given) or no_rule()
    # A step may need the sum of all rows, or divide by their number.
    reduces = has_inside(value.variable.owner.op, AllReduce)
    if reduces or has_inside(node.op, host.Shape, host.Shape_i):
        return no_rule()
    return Relation(ADDS) if value.kind == PART else EQUAL
