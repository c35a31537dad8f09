"""Divide the serial function of a training step, whose caller says which variables have rows.

    a rank's own value ── makes up the serial one in some mode ──▶ stays, with this mode
                       └─ else ──▶ divided: the ranks reduce inside

So a step whose loss is a mean over rows stays as it was written, with gradients that all ranks
average. Other losses, and statistics of all rows, are divided.
"""

from typing import Any, List, NamedTuple, Optional, Tuple

from synkhronos._host.base.chosen_library import ancestors
from synkhronos._host.base.dividing.alone import Alone, WrittenForRanks, values_of
from synkhronos._host.base.dividing.chosen_operations import is_random_state
from synkhronos._host.base.dividing.division import CannotDivide, rebuilt, with_inferred_lengths
from synkhronos._host.base.kinds import POSITIONS, ROWS
from synkhronos._host.base.rank_operations import RankWeight
from synkhronos._machine.deep_recursion import recurses_deep

AS_SERIAL = "as serial"  # the mode of an output that is to have the serial value


class Step(NamedTuple):
    """A function for ranks that computes what a serial one does, on the inputs of its user."""

    outputs: List[Tuple[Any, Optional[str]]]  # variables with their modes
    axes: List[int]  # of the rows of each output that has rows, else 0
    updates: List[Tuple[Any, Any]]  # all of them, default updates too
    is_divided: bool  # whether the ranks reduce anything that the user has not reduced
    n_rows: Optional[int]  # the number of rows that a call must have; None for any
    remainders: List[Any]  # numbers that must be 0 in a call


@recurses_deep
def divide_step(
    rows, inputs, outputs, updates, givens, no_default_updates, draws_all=False
) -> Step:
    """Divide a function, given by arguments of ``theano.function``.

    `rows` has the axis of rows of each variable of which ranks have different rows: inputs, and
    shared variables. Outputs are pairs (variable, mode). One stays as it is if its mode is another
    than `AS_SERIAL`, and asks for something else than the serial value, such as the largest of the
    ranks' means.
    """
    variables = [variable for variable, _ in outputs]
    computed, update_of = rebuilt(inputs, variables, list(updates), givens, no_default_updates)
    wanted = [*computed, *update_of.values()]
    values = values_of(rows, inputs, wanted)
    alone = Alone(values, draws_all)
    alone.walk(alone.inputs, wanted)
    # A graph for a fixed number of rows, or with a rank's weight, can't stay as it is.
    nodes = (each.owner for each in ancestors(wanted, blockers=list(values)) if each.owner)
    is_weighted = any(isinstance(node.op, RankWeight) for node in nodes)
    stays = alone.n_rows is None and not is_weighted
    chosen = [_as_it_is(alone, each, mode, stays) for each, (_, mode) in zip(computed, outputs)]
    outputs_left = [each for each, choice in zip(computed, chosen) if choice is None]
    updates_left = [pair for pair in update_of.items() if not (stays and _may_stay(alone, *pair))]
    is_divided = bool(outputs_left or updates_left)
    asked, new_updates = alone, {}
    if is_divided:
        asked, new_outputs, new_updates = _divided(values, outputs_left, updates_left, draws_all)
        new_outputs = iter(new_outputs)
        chosen = [next(new_outputs) if choice is None else choice for choice in chosen]
    remainders = [*alone.remainders, *(asked.remainders if is_divided else ())]
    [remainders] = with_inferred_lengths(list(values), remainders)
    return Step(
        [(variable, mode) for variable, mode, _ in chosen],
        [axis for _, _, axis in chosen],
        [(target, new_updates.get(target, each)) for target, each in update_of.items()],
        is_divided,
        asked.n_rows,
        remainders,
    )


def _as_it_is(alone, variable, mode, stays):
    """Return an output as it is, the right mode and the axis of its rows; None if no mode is."""
    value, relation = alone.of(variable), alone.relation(variable)
    has_rows = value.kind == ROWS
    if mode is not None and (not stays or value.kind == POSITIONS):
        return None
    is_of_no_mode = not has_rows and relation.right_mode is None and mode not in (None, "gather")
    if not (mode in (AS_SERIAL, "avg") or is_of_no_mode or (has_rows and mode == "gather")):
        return variable, mode, 0
    if has_rows:
        is_whole = relation.is_equal and value.times is None
        return (variable, "gather", value.axis) if is_whole else None
    if relation.is_equal:
        is_float = getattr(variable.type, "dtype", "").startswith("float")
        return variable, "avg" if is_float else None, 0
    return (variable, relation.right_mode, 0) if relation.right_mode else None


def _may_stay(alone, target, value):
    has_rows = alone.of(value).kind in (ROWS, POSITIONS)
    return (alone.relation(value).is_equal and not has_rows) or is_random_state(target)


def _divided(values, outputs, updates, draws_all):
    """Return a division, and what it makes of outputs and updates."""
    wanted = [*outputs, *(value for _, value in updates)]
    needed, expansions = set(), {}
    while True:
        division = WrittenForRanks(values, draws_all, needed=needed, expansions=expansions)
        division.walk(division.inputs, wanted)
        new_outputs = [_output(division, each) for each in outputs]
        new_updates = {target: division._update(target, each) for target, each in updates}
        if division.needed <= needed:
            return division, new_outputs, new_updates
        needed = needed | division.needed


def _output(division, variable):
    value = division.of(variable)
    if value.kind == ROWS:
        if value.times is not None:
            raise CannotDivide("returns rows that it merges with another axis")
        return value.variable, "gather", value.axis
    (new, mode), _, _ = division._output(variable)
    if mode == "sum" and new.dtype != variable.dtype:
        return division.same(variable), None, 0
    return new, mode, 0
