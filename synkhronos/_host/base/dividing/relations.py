"""What each rank computes alone, compared with serial values: a sum, an average, or neither.

    err ** 2 (rows) ──▶ sum (adds up) ──▶ / x.shape[0] (an average of the ranks) ──▶ "avg" is right
    m * err (rows)  ──▶ sum (adds up) ──▶ / m.sum() (neither)                    ──▶ no mode is

A user's function runs on each rank as it is, on this rank's rows. `Alone` walks through its graph
with the rules of the division, which say along which axis rows lie, and notes for each variable the
`Relation` of a rank's own value to that of serial Theano. With n of N rows, numbers on a rank are
often a power of N / n times the serial ones, such as the gradient of a mean for each row: this
power is the degree of a relation.
"""

from typing import Any, List, NamedTuple

import numpy as np

from synkhronos._host.base.dividing.division import (
    LENGTH,
    NOT_FOR_ROWS,
    PART,
    POSITIONS,
    ROWS,
    SAME,
    SHAPE,
    STREAM,
    UNKNOWN,
    CannotDivide,
    Division,
    Value,
    number,
    vector_length,
)
from synkhronos._host.base.dividing.library import (
    Alloc,
    Assert,
    CpuContiguous,
    CumOp,
    IfElse,
    IncSubtensor,
    Join,
    RepeatOp,
    Retype,
    Split,
    is_random_state,
    joined,
    rebuild_collect_shared,
    scalar,
)
from synkhronos._host.base.dividing.shapes import constant
from synkhronos._host.base.graph import AllReduce, RankOperation, RankWeight, has_inside
from synkhronos._host.base.library import (
    CAReduce,
    DeepCopyOp,
    DimShuffle,
    Dot,
    Elemwise,
    MakeVector,
    Reshape,
    ScalarFromTensor,
    Scan,
    Shape,
    Shape_i,
    Subtensor,
    TensorFromScalar,
    ViewOp,
    ancestors,
    indices_of,
    tensor,
)
from synkhronos._host.base.rows import Rows
from synkhronos._host.base.serial_random import OwnRows, WholeSize
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here

# How a rank's own value is related to the serial one, s; d is the degree.
SCALED = "scaled"  # own = s (N / n) ** d; of rows, for each row
ADDS = "adds"  # the sum of own (n / N) ** d over the ranks is s: a sum for 0, an average for 1
MERGED = "merged"  # the largest own value is s, or the smallest, or their product
LENGTHS = "lengths"  # a shape, whose one item is the number of rows
OWN = "own"  # none of these
OPEN = "open"  # no rule says
MIXED = "mixed"  # the reason of OWN: a sum over rows and something else were added up


class Relation(NamedTuple):
    """The relation of a rank's own value to the serial one."""

    kind: str
    degree: int = 0
    mode: str = ""  # of what is merged: "max", "min" or "prod"
    axis: int = 0  # the position of the number of rows in a shape, of so many lengths
    n_lengths: int = 0
    cause: Any = None  # the variable at which a value became the rank's own, or open
    reason: str = ""  # why it is open, or the rank's own
    is_filled: bool = False  # whether all rows have the same value

    @property
    def is_equal(self):
        """Whether each rank has the serial value, or its rows of it."""
        return self.kind == SCALED and self.degree == 0

    @property
    def is_mixed(self):
        """Whether ranks add something that all of them have to a sum over their rows."""
        return self.kind == OWN and self.reason == MIXED

    @property
    def is_open(self):
        """Whether no rule says what it is."""
        return self.kind == OPEN

    @property
    def right_mode(self):
        """The mode that makes the serial value of what is no rows; None if there is none."""
        if self.kind == ADDS:
            return {0: "sum", 1: "avg"}.get(self.degree)
        if self.kind == MERGED:
            return self.mode
        if self.kind == SCALED:
            return {0: "avg", -1: "sum"}.get(self.degree)
        return None


EQUAL = Relation(SCALED)


class Mistake(NamedTuple):
    """An AllReduce of the user that does not make the serial value."""

    variable: Any  # that is reduced
    op: str
    relation: Relation  # of its input


class WrittenForRanks(Division):
    """The values of a graph whose user has said what is scattered.

    Attributes
    ----------
    draws_all : bool
        Whether random numbers that are not for each row are the same on all ranks.
    """

    def __init__(self, inputs, values, draws_all=False, **kwargs):
        super().__init__(inputs, values, **kwargs)
        self.scatters = True  # what the user slices by numbers stays whole on each rank
        self.draws_all = draws_all

    def _apply(self, node):
        if isinstance(node.op, (Rows, OwnRows)):
            return [Value(node.outputs[0], ROWS, exact=True)]
        if isinstance(node.op, WholeSize):
            return [Value(node.outputs[0])]
        if isinstance(node.op, RankWeight):
            return [Value(tensor.constant(1.0, dtype="float64"))]  # as serially
        try:
            found = super()._apply(node)
        except CannotDivide as error:
            error.variable = error.variable or node.outputs[0]
            raise
        if self.draws_all and found[-1] is NOT_FOR_ROWS:
            found[-1] = found[-1]._replace(variable=found[0].variable.owner.outputs[1], kind=SAME)
        return found


class Alone(WrittenForRanks):
    """The relations of the variables of one graph, as it is, on the ranks."""

    def __init__(self, inputs, values, draws_all=False, own_statistics=False):
        super().__init__(inputs, values, draws_all)
        # Whether rows that each rank has normalized with its own statistics count as serial ones.
        self.own_statistics = own_statistics
        self.relations = {}
        self.mistakes: List[Mistake] = []

    def require_images(self, n_images, value, images):
        """Refuse an operation that counts more images than a rank has."""
        raise CannotDivide(f"takes {n_images} images for those of a call")

    def relation(self, variable):
        """Return the relation of a variable that was walked to, or of a leaf."""
        if variable not in self.relations:
            is_made = variable.owner is not None and variable not in self.inputs
            self.relations[variable] = self._of_group(variable) if is_made else EQUAL
        return self.relations[variable]

    def _of_group(self, variable):
        """Return the relation of what operations compute together: see `division.ending`."""
        known = {*self.relations, *self.inputs}
        found = ancestors([variable], blockers=known)
        leaves = [each for each in found if each in known or each.owner is None]
        if self.of(variable).kind in (ROWS, STREAM) and all(
            self.relation(each).is_equal or self.relation(each).kind == LENGTHS for each in leaves
        ):
            return EQUAL
        return _open(variable)

    def _apply(self, node):
        before = [self.of(each) for each in node.inputs]
        try:
            found = self._values(node)
        except CannotDivide as error:
            found = [Value(None, UNKNOWN, reason=str(error)) for _ in node.outputs]
        except raised_here(Exception) as error:  # in a rule, of what another one has refused
            found = [Value(None, UNKNOWN, reason=str(error)) for _ in node.outputs]
        self.values.update(zip(node.outputs, found))
        for position, (each, value) in enumerate(zip(node.outputs, found)):
            self.relations[each] = self._related(node, position, before, value)
        return found

    def _values(self, node):
        if isinstance(node.op, AllReduce):
            return [Value(each) for each in node.outputs]
        if isinstance(node.op, RankOperation) and not isinstance(node.op, _OF_ROWS):
            raise CannotDivide(f"has {type(node.op).__name__}")
        part = self._half_part(node) if _is_half(node.outputs[0]) else None
        return super()._apply(node) if part is None else [part]

    def _half_part(self, node):
        """Return a part of half precision, which the division refuses: it may overflow."""
        values = [self.of(each) for each in node.inputs]
        kinds = {each.kind for each in values}
        if isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, scalar.Add):
            is_sum = kinds == {ROWS} and values[0].axis in _axes(node)
            return Value(node.outputs[0], PART) if is_sum or kinds == {PART} else None
        if isinstance(node.op, Elemwise) and PART in kinds and kinds <= {PART, SAME, LENGTH}:
            return Value(node.outputs[0], PART)
        return None

    def _related(self, node, position, before, value):
        """Return the relation of an output of a node: `before` are the values of its inputs."""
        op, output = node.op, node.outputs[position]
        given = [self.relation(each) for each in node.inputs]
        if isinstance(op, AllReduce):
            return self._reduced(node.inputs[position], op.ops[position], given[position])
        if isinstance(op, _OF_ROWS):
            return EQUAL
        if node in self.expansions:
            return self.relation(self.expansions[node][position])
        if value.kind == UNKNOWN:
            return _worst(given) or _open(output, value.reason)
        if isinstance(op, IfElse):
            condition, *branches = given
            pair = branches[position], branches[position + op.n_outs]
            return _joint(pair) if condition.is_equal else _worst(given) or Relation(OWN)
        if value.kind in (LENGTH, SHAPE) and not isinstance(op, (Shape, Shape_i)):
            if not all(map(_is_length_or_equal, before, given)):
                return _worst(given) or _open(output)
            if value.kind == LENGTH:
                return Relation(SCALED, -1)
            return Relation(LENGTHS, axis=value.axis, n_lengths=vector_length(output) or 0)
        for kind, relate in _RELATED.items():
            if isinstance(op, kind):
                found = relate(self, node, before, given, value)
                break
        else:
            found = self._by_table(node, before, given, value)
        if found.kind in (ADDS, MERGED) and value.kind == ROWS:
            return Relation(OWN, cause=output)
        if found.kind in (OWN, OPEN) and found.cause is None:
            return found._replace(cause=output, reason=found.reason or value.reason)
        return found

    def _reduced(self, variable, op, relation):
        """Return the relation of what the user reduces; note it if it is not the serial value."""
        if relation.is_equal and self.of(variable).kind != ROWS and op != "sum":
            return EQUAL
        if relation.kind == OPEN or self.of(variable).kind == ROWS or relation.is_equal:
            return _open(variable)
        if relation.right_mode == op:
            return EQUAL
        if relation.kind == OWN and op in ("max", "min", "prod"):
            return _open(variable)  # as of whether any rank has NaN
        self.mistakes.append(Mistake(variable, op, relation))
        return _open(variable)

    def _by_table(self, node, before, given, value):
        """Return the relation of an operation that a table has, or of any other."""
        op = node.op
        data = _data(node, before, given, value)
        for kind, places in _JOINT.items():
            if isinstance(op, kind):
                rest = [r for i, r in data if i not in places]
                if any(not each.is_equal for each in rest):  # it may have another shape, too
                    return _open((_worst(rest) or EQUAL).cause)
                # Rows, or one value for each row whose index says where it goes, are added up.
                by_rows = any(each.kind in (ROWS, POSITIONS) for each in before[len(places) :])
                own = [
                    _summed(given[i]._replace(is_filled=False))
                    if value.kind != ROWS and (before[i].kind == ROWS or (i and by_rows))
                    else given[i]
                    for i in places
                    if not self.is_zero(node.inputs[i])
                ]
                found = _joint(own) if own else EQUAL
                if isinstance(op, _ADDING) and found.kind == MERGED:
                    return Relation(OWN)
                return found if isinstance(op, _KEEPING) else found._replace(is_filled=False)
        for kind in _PRODUCT:
            if isinstance(op, kind):
                found = _product([given[i] for i in range(len(given)) if before[i].kind in _ARRAYS])
                is_sum = value.kind != ROWS and any(each.kind == ROWS for each in before)
                return _summed(found) if is_sum else found
        for kind, place in _LINEAR.items():
            if isinstance(op, kind):
                rest = [r for i, r in data if i != place % len(given)]
                if all(each.is_equal for each in rest) and given[place].kind != MERGED:
                    found = given[place]._replace(is_filled=False)
                    return _summed(found) if value.kind == PART else found
        return self._any(node, data, before, value)

    def is_zero(self, variable):
        """Return whether a variable is 0 everywhere, and of the serial shape."""
        return number(variable) == 0 and self.relation(variable).is_equal

    def _any(self, node, data, before, value):
        given = [r for _, r in data]
        if not all(each.is_equal for each in given):
            worst = _worst(given) or _open()
            numbers = [r for i, r in data if getattr(node.inputs[i], "dtype", "").startswith("int")]
            # Whole numbers may say which shape it has.
            return worst if all(each.is_equal for each in numbers) else _open(worst.cause)
        if value.kind in (ROWS, STREAM, POSITIONS):
            return EQUAL
        if value.kind == PART:
            return Relation(ADDS)
        if any(each.kind in (ROWS, POSITIONS) for each in before):
            mode = _mode_of(value)
            return Relation(MERGED, mode=mode) if mode else _open()
        return EQUAL if value.kind == SAME else _open()


_OF_ROWS = (Rows, OwnRows, WholeSize, RankWeight)  # what `function` or its user has made of rows
_ARRAYS = (ROWS, PART, SAME, UNKNOWN)


def _data(node, before, given, value):
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


def _is_length_or_equal(value, relation):
    is_length = value.kind in (LENGTH, SHAPE) and relation.kind in (SCALED, LENGTHS)
    return is_length or relation.is_equal


def _open(cause=None, reason=""):
    return Relation(OPEN, cause=cause, reason=reason)


def _worst(given):
    """Return the first relation that is the rank's own or open, else None."""
    for kind in (OPEN, OWN):
        for each in given:
            if each.kind == kind:
                return each
    return None


def _summed(relation):
    """Return the relation of a sum over rows that have a relation."""
    if relation.kind != SCALED:
        return relation
    if relation.is_filled:
        return Relation(SCALED, relation.degree - 1)
    return Relation(ADDS, relation.degree)


def _as_sum(relation):
    """Return a relation of what all ranks have as that of parts of a sum."""
    return Relation(ADDS, relation.degree + 1) if relation.kind == SCALED else relation


def _joint(given):
    """Return the relation of what is linear in several values together, as their sum is."""
    worst = _worst(given)
    if worst is not None:
        return worst
    if len(given) > 1 and any(each.kind == MERGED for each in given):
        return Relation(OWN)  # the largest sum is not the sum of the largest
    if any(each.kind == ADDS for each in given):
        given = [_as_sum(each) for each in given]
    first = given[0]._replace(is_filled=all(each.is_filled for each in given))
    if all(each[:3] == first[:3] for each in given):
        return first
    degrees = {each.degree for each in given if each.kind == ADDS}
    return Relation(OWN, reason=MIXED if degrees == {0, 1} else "")


def _product(given):
    """Return the relation of what is linear in each of several values, as their product is."""
    worst = _worst(given)
    if worst is not None:
        return worst
    if any(each.kind not in (SCALED, ADDS) for each in given):
        return Relation(OWN)
    degree, n_sums = sum(each.degree for each in given), sum(r.kind == ADDS for r in given)
    if n_sums > 1:
        return Relation(OWN)
    return Relation(ADDS if n_sums else SCALED, degree)


def _mode_of(value):
    """Return how ranks reduce what a rule has found, if that is the last thing that they do."""
    variable = value.variable
    while variable is not None and variable.owner is not None:
        if isinstance(variable.owner.op, AllReduce):
            [mode] = variable.owner.op.ops
            return mode
        is_cast = isinstance(variable.owner.op, Elemwise) and len(variable.owner.inputs) == 1
        variable = variable.owner.inputs[0] if is_cast else None
    return ""


def _axes(node):
    return range(node.inputs[0].ndim) if node.op.axis is None else node.op.axis


def _is_half(variable):
    return getattr(variable.type, "dtype", "") == "float16"


def _elemwise(alone, node, before, given, value):
    op, pairs = node.op.scalar_op, list(zip(node.inputs, given))
    if isinstance(op, scalar.Second):
        filling, relation = pairs[1]
        is_filled = alone.of(filling).kind != ROWS or relation.is_filled
        shaped = given[0] if given[0].is_open else relation  # it has the shape of the first
        return shaped._replace(is_filled=value.kind == ROWS and is_filled)
    if alone.own_statistics and value.kind == ROWS:
        given = [EQUAL if _is_statistic(*each) else each[1] for each in pairs]
        pairs = list(zip(node.inputs, given))
    worst = _worst(given)
    if worst is not None:
        is_kept = isinstance(op, (*_MOVES, scalar.Add, scalar.Sub, scalar.Mul))
        if worst.is_mixed and not (is_kept or worst == given[0]):
            return Relation(OWN, cause=node.outputs[0])
        return worst
    rows = [r for r, each in zip(given, before) if each.kind == ROWS]
    is_filled = bool(rows) and all(each.is_filled for each in rows)
    if all(each.is_equal for each in given):
        return EQUAL._replace(is_filled=is_filled)
    if any(each.kind == LENGTHS for each in given):
        return given[0] if isinstance(op, _MOVES) and len(given) == 1 else _open()
    nonzero = [r for each, r in pairs if not alone.is_zero(each)] or given
    sums = [each for each in given if each.kind != SCALED]
    if isinstance(op, scalar.Mul) and any(map(alone.is_zero, node.inputs)):
        return EQUAL
    if isinstance(op, scalar.Cast) and _truncates(node):
        return Relation(MERGED, mode=given[0].mode) if given[0].kind == MERGED else Relation(OWN)
    if given[0].kind == MERGED and len(given) == 1:
        return _of_merged(op, given[0])
    is_itself = isinstance(op, scalar.Pow) and number(node.inputs[1]) == 1
    if isinstance(op, _MOVES) or is_itself:
        return given[0]
    if isinstance(op, (scalar.Add, scalar.Sub)):
        found = _joint(nonzero)
    elif isinstance(op, scalar.Mul):
        found = _product(given)
    elif isinstance(op, scalar.TrueDiv) and given[1].kind == SCALED:
        found = _product([given[0], given[1]._replace(degree=-given[1].degree)])
    elif isinstance(op, scalar.Switch) and given[0].is_equal:
        branches = [r for each, r in pairs[1:] if not alone.is_zero(each)] or given[1:]
        found = _joint(branches)
    elif sums:
        found = Relation(OWN)
    elif isinstance(op, (scalar.Maximum, scalar.Minimum)):
        found = _joint(nonzero)
    elif isinstance(op, scalar.Abs):
        found = given[0]
    elif isinstance(op, scalar.Sqr):
        found = Relation(SCALED, 2 * given[0].degree)
    elif isinstance(op, _INVERSE):
        found = Relation(SCALED, -given[0].degree)
    elif isinstance(op, scalar.Pow) and given[1].is_equal and _is_whole(node.inputs[1]):
        found = Relation(SCALED, given[0].degree * int(number(node.inputs[1])))
    elif isinstance(op, _SIGNS) and len(nonzero) == 1:
        found = EQUAL
    else:
        found = Relation(OWN)
    return found._replace(is_filled=is_filled) if found.kind == SCALED else found


def _of_merged(op, relation):
    """Return the relation of a function of the largest value, or the smallest, or a product."""
    if isinstance(op, (scalar.Cast, scalar.Identity)):
        return relation
    opposite = {"max": "min", "min": "max"}.get(relation.mode)
    if isinstance(op, scalar.Neg) and opposite:
        return relation._replace(mode=opposite)
    is_increasing = isinstance(op, (scalar.Exp, scalar.Tanh))  # and never NaN
    return relation if is_increasing and opposite else Relation(OWN)


def _truncates(node):
    kinds = [np.dtype(each.dtype).kind for each in (node.inputs[0], node.outputs[0])]
    return kinds[0] in "fc" and kinds[1] not in "fc"


def _is_statistic(variable, relation):
    """Return whether a value beside rows is a statistic of them: an item for each column."""
    return relation.kind in (ADDS, OWN) and not all(variable.type.broadcastable)


def _is_whole(variable):
    found = number(variable)
    return found is not None and float(found).is_integer()


_MOVES = (scalar.Cast, scalar.Neg, scalar.Identity)
_INVERSE = getattr(scalar, "Inv", None) or scalar.Reciprocal
_SIGN = getattr(scalar, "Sgn", None) or scalar.Sign
_SIGNS = scalar.GT, scalar.LT, scalar.GE, scalar.LE, scalar.EQ, scalar.NEQ, _SIGN


def _reduce(alone, node, before, given, value):
    op, [relation], axes = node.op.scalar_op, given, _axes(node)
    if relation.kind in (OWN, OPEN):
        return relation
    if relation.kind == LENGTHS:
        is_product = isinstance(op, scalar.Mul)
        return Relation(SCALED, -1) if is_product else _open()
    if before[0].kind == ROWS and before[0].axis in axes:
        if isinstance(op, scalar.Add):
            return _summed(relation)
        for kinds, mode in _MERGES:
            if isinstance(op, kinds) and relation.is_equal:
                return Relation(MERGED, mode=mode)
        return Relation(OWN)
    is_sum = isinstance(op, scalar.Add) and relation.kind != MERGED
    if is_sum or relation.is_equal:
        return relation
    is_extreme = isinstance(op, (scalar.Maximum, scalar.Minimum))
    return relation if is_extreme and relation.kind == SCALED else Relation(OWN)


_MERGES = (
    ((scalar.Maximum, scalar.OR), "max"),
    ((scalar.Minimum, scalar.AND), "min"),
    (scalar.Mul, "prod"),
)


def _shape(alone, node, before, given, value):
    [measured] = before
    other = _open() if given[0].is_open else EQUAL  # the lengths of axes without rows
    if measured.kind not in (ROWS, POSITIONS):
        return other
    if isinstance(node.op, Shape_i):
        return Relation(SCALED, -1) if node.op.i == measured.axis else other
    if other.is_open:
        return other
    return Relation(LENGTHS, axis=measured.axis, n_lengths=node.inputs[0].ndim)


def _vector(alone, node, before, given, value):
    lengths = [i for i, each in enumerate(given) if each == Relation(SCALED, -1)]
    if len(lengths) == 1 and all(each.is_equal for i, each in enumerate(given) if i != lengths[0]):
        return Relation(LENGTHS, axis=lengths[0], n_lengths=len(given))
    return _joint(given)


def _item(alone, node, before, given, value):
    """Take items, also of a shape."""
    if given[0].kind != LENGTHS:
        return alone._by_table(node, before, given, value)
    [index] = indices_of(node)
    length = given[0].n_lengths
    bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else [index]
    known = [each if each is None else constant(each) for each in bounds]
    if not length or any(k is None and b is not None for k, b in zip(known, bounds)):
        return _open()
    places = range(length)
    if not isinstance(index, slice):
        return Relation(SCALED, -1) if places[known[0]] == given[0].axis else EQUAL
    chosen = places[slice(*known)]
    if given[0].axis not in chosen:
        return EQUAL
    return Relation(LENGTHS, axis=chosen.index(given[0].axis), n_lengths=len(chosen))


def _filled(alone, node, before, given, value):
    """Fill a new array."""
    lengths = zip(before[1:], given[1:])
    own = [r for each, r in lengths if not (value.kind == ROWS and each.kind == LENGTH)]
    own += [r for each, r in zip(before[1:], given[1:]) if each.kind == LENGTH and r.is_open]
    if not all(each.is_equal for each in own):
        return _open()  # its shape depends on more than the number of rows
    is_filled = before[0].kind != ROWS or given[0].is_filled
    return given[0]._replace(is_filled=value.kind == ROWS and is_filled)


def _join(alone, node, before, given, value):
    arrays = joined(node)[1]
    relations = [alone.relation(each) for each in arrays]
    if any(each.kind == LENGTHS for each in relations):
        return _open()
    return _joint([r for r, each in zip(relations, arrays) if not alone.is_zero(each)] or relations)


def _scan(alone, node, before, given, value):
    if not all(each.is_equal for each in given):
        return _worst(given) or _open()
    # A step may need the sum of all rows, or divide by their number.
    if has_inside(value.variable.owner.op, AllReduce) or has_inside(node.op, Shape, Shape_i):
        return _open()
    return Relation(ADDS) if value.kind == PART else EQUAL


# Class of operations -> its relation, from (Alone, node, values and relations of inputs, value).
_RELATED = {
    Elemwise: _elemwise,
    CAReduce: _reduce,
    Shape: _shape,
    Shape_i: _shape,
    MakeVector: _vector,
    Subtensor: _item,
    Alloc: _filled,
    Join: _join,
    Scan: _scan,
}
# Operations that are linear in the inputs at these positions together.
_JOINT = {
    (DimShuffle, Reshape, Subtensor, Split, CumOp, RepeatOp): (0,),
    (ViewOp, DeepCopyOp, CpuContiguous, Assert, Retype): (0,),
    (TensorFromScalar, ScalarFromTensor): (0,),
    IncSubtensor: (0, 1),
}
# Those of them that keep all rows the same.
_KEEPING = (DimShuffle, Reshape, Subtensor, ViewOp, DeepCopyOp, CpuContiguous, Retype)
_ADDING = (CumOp,)  # those of them that add items up
_PRODUCT = {Dot}  # linear in each of their inputs
_LINEAR = {}  # linear in the input at a position


def linear(*ops, joint=None, place=None):
    """Note classes of operations that are linear: in several inputs together, in one, or in each.

    `joint` has the positions of inputs whose sum counts, `place` is that of one input; without
    both, operations are linear in each of their inputs, as products are.
    """
    if joint is not None:
        _JOINT[ops] = joint
    elif place is not None:
        _LINEAR[ops] = place
    else:
        _PRODUCT.update(ops)


class Examined(NamedTuple):
    """The relations of what a function computes on each rank to what serial Theano computes."""

    outputs: List[Relation]
    are_rows: List[bool]  # for each output whether a rank has rows of it
    updates: List[Any]  # (shared variable, Relation, whether ranks get different values)
    mistakes: List[Mistake]
    n_rows: Any  # the number of rows that a call must have; None for any
    remainders: List[Any]  # numbers that must be 0 in a call


@recurses_deep
def examine(
    rows, inputs, outputs, updates=(), givens=(), no_default_updates=True, trusts=False, **kwargs
) -> Examined:
    """Return the relations of a function as it is, from arguments of ``theano.function``.

    `rows` has the axis of rows of each variable of which ranks have different rows: inputs, and
    shared variables. If `trusts` is true, each AllReduce is taken to make the serial value. Other
    arguments are those of `Alone`.
    """
    _, computed, (_, update_of, _, _) = rebuild_collect_shared(
        list(outputs), list(inputs), givens, updates, True, True, no_default_updates
    )
    targets = list(update_of)
    wanted = [*computed, *(update_of[target] for target in targets)]
    values = values_of(rows, inputs, wanted if trusts else ())
    alone = Alone(list(values), values, **kwargs)
    alone.walk(list(values), wanted)
    found = [alone.relation(each) for each in wanted]
    return Examined(
        found[: len(computed)],
        [alone.of(each).kind == ROWS for each in computed],
        [
            (target, relation, _differs(alone, update_of[target], relation, rows))
            for target, relation in zip(targets, found[len(computed) :])
        ],
        alone.mistakes,
        alone.n_rows,
        alone.remainders,
    )


def values_of(rows, inputs, wanted):
    """Return the values of inputs, and of what is reduced in some variables, which is serial."""
    values = {each: Value(each) for each in inputs}
    values.update((each, Value(each, ROWS, axis, exact=True)) for each, axis in rows.items())
    values.update((each, Value(each)) for each in ancestors(wanted) if is_reduced(each))
    return values


def _differs(alone, value, relation, rows):
    """Return whether ranks get different values of an update, but for those that keep rows."""
    if alone.of(value).kind == ROWS:
        return False
    if relation.kind != OPEN:
        return not relation.is_equal
    reduced = [each for each in alone.relations if is_reduced(each)]
    found = ancestors([value], blockers=reduced)
    return any(each in rows or is_random_state(each) for each in found if each not in reduced)


def is_reduced(variable):
    """Return whether a variable is the result of an AllReduce."""
    return variable.owner is not None and isinstance(variable.owner.op, AllReduce)
