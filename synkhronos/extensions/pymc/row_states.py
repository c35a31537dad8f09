"""States of the variables that depend on rows, in the graph of a log-likelihood.

The rules in `row_axes` and `row_shapes` find the state of an operation's outputs from the states of
its inputs. A variable that does not depend on rows has None.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytensor.graph.basic import Constant
from pytensor.tensor.elemwise import DimShuffle


class Mixed(ValueError):
    """An operation computes something from several rows."""


class Kind(enum.Enum):
    """A state that needs no axis."""

    TOTAL = "a sum over rows"
    ALL = "whether something holds for all rows"
    COUNTED = "computed from the number of rows"


TOTAL, ALL, COUNTED = Kind


@dataclass(frozen=True)
class Along:
    """Rows lie along an axis; `is_number` says that they are the numbers of rows, from 0 on."""

    axis: int
    is_number: bool = False


@dataclass(frozen=True)
class Lengths:
    """A length, or a vector of lengths: for each one, whether it is the number of rows."""

    flags: tuple[bool, ...]


Rule = Callable[[Any, Any, list], Any]
RULES: dict[type, Rule] = {}


def mixed(node, why=None) -> Mixed:
    """Return the exception for an operation without a rule."""
    name = str(node.op).partition("{")[0]
    return Mixed(why or f"{name} in its log-likelihood may compute something from several rows")


def rule(*kinds):
    """Register a function (op, node, states) as the rule for kinds of operations."""

    def register(function):
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


def only(states, *allowed) -> bool:
    """Return whether all inputs that depend on rows have one of these states."""
    return all(state is None or state in allowed for state in states)


def are_lengths(states) -> bool:
    """Return whether all inputs that depend on rows depend on their number alone."""
    return all(state is None or state is COUNTED or isinstance(state, Lengths) for state in states)


def constant(variable):
    """Return the number that a variable holds, if it is a constant."""
    while variable.owner and isinstance(variable.owner.op, DimShuffle):
        [variable] = variable.owner.inputs
    return (
        variable.data.item() if isinstance(variable, Constant) and variable.data.size == 1 else None
    )
