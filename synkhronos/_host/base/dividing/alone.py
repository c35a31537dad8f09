"""Values that each rank computes alone, on its rows, compared with serial ones.

    graph of the user's function ── the rules of `relating` ──▶ a Relation for each variable

A user's function runs on each rank as it is. `Alone` walks through its graph with the rules of the
division, which say along which axis rows lie, and notes how a rank's own value of each variable is
related to that of serial Theano.
"""

from typing import Any, List, NamedTuple

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import ancestors, tensor
from synkhronos._host.base.dividing.chosen_operations import is_random_state, scalar
from synkhronos._host.base.dividing.division import CannotDivide, Division, Value, rebuilt
from synkhronos._host.base.dividing.elementwise import reduced_axes
from synkhronos._host.base.dividing.relating import EQUAL, LENGTHS, Relation, no_rule, related
from synkhronos._host.base.functions import is_by, number
from synkhronos._host.base.kinds import LENGTH, PART, ROWS, SAME, STREAM, UNKNOWN
from synkhronos._host.base.rank_operations import AllReduce, RankOperation, RankWeight
from synkhronos._host.base.rows import Rows
from synkhronos._host.base.serial_random import OwnRows, WholeSize
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here

_OF_ROWS = (Rows, OwnRows, WholeSize, RankWeight)  # made by `function` or its user


class Mistake(NamedTuple):
    """An AllReduce of the user that does not make the serial value."""

    variable: Any  # that is reduced
    op: str
    relation: Relation  # of its input


class WrittenForRanks(Division):
    """The values of a graph whose user has said which inputs are scattered."""

    def __init__(self, values, draws_all=False, **kwargs):
        super().__init__(list(values), values, **kwargs)
        self.scatters = True  # so minibatches that the user slices stay whole
        self.draws_all = draws_all  # whether ranks draw the same numbers, if not for each row

    def _apply(self, node):
        if isinstance(node.op, (Rows, OwnRows)):
            return [Value(node.outputs[0], ROWS, exact=True)]
        if isinstance(node.op, WholeSize):
            return [Value(node.outputs[0])]
        if isinstance(node.op, RankWeight):
            return [Value(tensor.constant(1.0, dtype="float64"))]  # as in serial Theano
        try:
            values = super()._apply(node)
        except CannotDivide as error:
            error.variable = error.variable or node.outputs[0]
            raise
        if self.draws_all and values[-1] is self.NOT_FOR_ROWS:
            numbers = values[0].variable.owner.outputs[1]
            values[-1] = values[-1]._replace(variable=numbers, kind=SAME)
        return values


class Alone(WrittenForRanks):
    """The relations of the variables of a graph that each rank runs as it is."""

    def __init__(self, values, draws_all=False, own_statistics=False):
        super().__init__(values, draws_all)
        # Whether rows that each rank has normalized with its own statistics count as serial ones.
        self.own_statistics = own_statistics
        self.relations = {}
        self.mistakes: List[Mistake] = []

    def require_images(self, n_images, value, images):
        """Refuse an operation that counts more images than a rank has."""
        raise CannotDivide(f"takes {n_images} images for those of a call")

    def relation(self, variable):
        """Return the relation of a variable that `walk` has reached, or of a leaf."""
        if variable not in self.relations:
            is_computed = variable.owner is not None and variable not in self.inputs
            self.relations[variable] = self._of_group(variable) if is_computed else EQUAL
        return self.relations[variable]

    def _of_group(self, variable):
        """Return the relation of a variable that a group of operations computes: see `ending`."""
        known = {*self.relations, *self.inputs}
        computed_from = ancestors([variable], blockers=known)
        leaves = [each for each in computed_from if each in known or each.owner is None]
        are_serial = all(r.is_equal or r.kind == LENGTHS for r in map(self.relation, leaves))
        is_known = are_serial and self.of(variable).kind in (ROWS, STREAM)
        return EQUAL if is_known else no_rule(variable)

    def _apply(self, node):
        before = [self.of(each) for each in node.inputs]
        try:
            values = self._values(node)
        except raised_here(Exception) as error:  # CannotDivide, or a rule's error that it leads to
            values = [Value(None, UNKNOWN, reason=str(error)) for _ in node.outputs]
        self.values.update(zip(node.outputs, values))
        for position, (each, value) in enumerate(zip(node.outputs, values)):
            self.relations[each] = self._related(node, position, before, value)
        return values

    def _values(self, node):
        if isinstance(node.op, AllReduce):
            return [Value(each) for each in node.outputs]
        if isinstance(node.op, host.Print):  # the division has no rule: ranks would print parts
            return [self.of(node.inputs[0])]
        if isinstance(node.op, RankOperation) and not isinstance(node.op, _OF_ROWS):
            raise CannotDivide(f"has {type(node.op).__name__}")
        part = self._half_part(node)
        return super()._apply(node) if part is None else [part]

    def _half_part(self, node):
        """Return a part in half precision, which the division refuses because it may overflow."""
        if getattr(node.outputs[0].type, "dtype", "") != "float16":
            return None
        values = [self.of(each) for each in node.inputs]
        kinds = {each.kind for each in values}
        if isinstance(node.op, host.CAReduce) and isinstance(node.op.scalar_op, scalar.Add):
            is_sum = kinds == {ROWS} and values[0].axis in reduced_axes(node)
            return Value(node.outputs[0], PART) if is_sum or kinds == {PART} else None
        if isinstance(node.op, host.Elemwise) and PART in kinds and kinds <= {PART, SAME, LENGTH}:
            return Value(node.outputs[0], PART)
        return None

    def _related(self, node, position, before, value):
        """Return the relation of an output of a node: `before` are the values of its inputs."""
        op = node.op
        given = [self.relation(each) for each in node.inputs]
        if isinstance(op, AllReduce):
            return self._reduced(node.inputs[position], op.ops[position], given[position])
        if isinstance(op, _OF_ROWS):
            return EQUAL
        if isinstance(op, host.Print):
            return given[0]
        if node in self.expansions:
            return self.relation(self.expansions[node][position])
        return related(self, node, position, before, given, value)

    def _reduced(self, variable, op, relation):
        """Return the relation of what the user reduces; note it if it is not the serial value."""
        if self.of(variable).kind == ROWS or relation.is_open:
            return no_rule(variable)
        if relation.right_mode == op or (relation.is_equal and op in ("max", "min")):
            return EQUAL
        # Not if the user may mean it: a reduction of what all ranks have, or to see if any has NaN.
        if not (relation.is_equal or (relation.is_own and op not in ("avg", "sum"))):
            self.mistakes.append(Mistake(variable, op, relation))
        return no_rule(variable)

    def is_zero(self, variable):
        """Return whether a variable is 0 everywhere, and of the serial shape."""
        return number(variable) == 0 and self.relation(variable).is_equal


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
    computed, update_of = rebuilt(inputs, outputs, updates, givens, no_default_updates)
    wanted = [*computed, *update_of.values()]
    alone = Alone(values_of(rows, inputs, wanted if trusts else ()), **kwargs)
    alone.walk(alone.inputs, wanted)
    return Examined(
        [alone.relation(each) for each in computed],
        [alone.of(each).kind == ROWS for each in computed],
        [(x, alone.relation(new), _differs(alone, new, rows)) for x, new in update_of.items()],
        alone.mistakes,
        alone.n_rows,
        alone.remainders,
    )


def values_of(rows, inputs, wanted):
    """Return the values of inputs, and of the results of AllReduces in `wanted`, all serial."""
    values = {each: Value(each) for each in inputs}
    values.update((each, Value(each, ROWS, axis, exact=True)) for each, axis in rows.items())
    values.update((each, Value(each)) for each in ancestors(wanted) if is_by(each, AllReduce))
    return values


def _differs(alone, value, rows):
    """Return whether ranks get different values of an update; False if they get rows of it."""
    relation = alone.relation(value)
    if alone.of(value).kind == ROWS:
        return False
    if not relation.is_open:
        return not relation.is_equal
    reduced = [each for each in alone.relations if is_by(each, AllReduce)]
    others = [each for each in ancestors([value], blockers=reduced) if each not in reduced]
    return any(each in rows or is_random_state(each) for each in others)
