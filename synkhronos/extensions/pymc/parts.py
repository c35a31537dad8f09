"""The shared memory of evaluations: the values that all ranks read, and a part that each computes.

    values   lengths of axes that the graph leaves open, all parameters, a direction for products
    part     the log-likelihood of each term, and its gradients for this rank's rows

The total is the sum of the parts; gradients for rows of a parameter are in the first part alone,
where each rank writes those of its own rows.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from synkhronos._arithmetic.partition import share
from synkhronos.comm.mpi.job import MachineLayout
from synkhronos.extensions.pymc.runs import (
    Evaluation,
    TermEvaluation,
    along,
    floats,
    number_of_blocks,
    own_value,
)
from synkhronos.extensions.pymc.terms import RowData, Term, is_float

_LINE = 8  # numbers in a cache line: no two ranks write to one


def open_axes(terms: Sequence[Term]) -> list[tuple[int, int]]:
    """Return (number of a parameter, axis) for each length that the graph leaves open."""
    parameters = [each for term in terms for each in term.parameters]
    return [
        (i, axis)
        for i, parameter in enumerate(parameters)
        for axis, length in enumerate(parameter.type.shape)
        if length is None
    ]


def rows_before(layout: MachineLayout, machine: int, length: int) -> int:
    """Return how many of `length` rows the machines before one have."""
    return share(length, layout.n_ranks, layout.first(machine))[0]


class Parts:
    """The memory of the ranks of this machine, for some terms and lengths of their parameters.

    `values` begin with the lengths of `open_axes`. ``make(nbytes)`` makes or maps the memory.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        layout: MachineLayout,
        values: np.ndarray,
        make: Callable[[int], Any],
    ):
        self._terms, self._layout = terms, layout
        parameters = [each for term in terms for each in term.parameters]
        shapes = [list(each.type.shape) for each in parameters]
        unknown = open_axes(terms)
        for (i, axis), length in zip(unknown, values):
            shapes[i][axis] = int(length)
        self._shapes = dict(zip(parameters, shapes))
        self.begins: list[int] = []  # of the terms in a part
        self._whole: list[slice] = []  # places in the parts that are summed; ranks share the rest
        width = 0
        for term in terms:
            self.begins.append(width)
            self._whole.append(slice(width, width := width + 1))
            for parameter, axis in zip(term.parameters, term.axes):
                size = math.prod(self._shapes[parameter]) * is_float(parameter)
                if axis is None:
                    self._whole[-1:] = _joined(self._whole[-1], slice(width, width + size))
                width += size
        # Each rank's part begins in a cache line of its own.
        stride = -(-width // _LINE) * _LINE
        n_directions = width - len(terms)
        size = len(unknown) + sum(map(math.prod, shapes)) + n_directions
        n_ranks = len(layout.ranks())
        self.memory = make(8 * (n_ranks * stride + size))
        self._parts = list(self.memory.array("float64", (n_ranks, stride))[:, :width])
        self.values = self.memory.array("float64", (size,), 8 * n_ranks * stride)
        self.values[: values.size] = values
        self._place = len(unknown)
        self._parameters = [[self._placed(each) for each in term.parameters] for term in terms]
        self._directions = [[self._placed(each) for each in floats(term)] for term in terms]

    def _placed(self, parameter):
        shape = self._shapes[parameter]
        begin, self._place = self._place, self._place + math.prod(shape)
        return self.values[begin : self._place].reshape(shape)

    def total(self) -> np.ndarray:
        """Return the sum of the parts, in the order of the ranks."""
        total = self._parts[0].copy()
        for whole in self._whole:
            for part in self._parts[1:]:
                total[whole] += part[whole]
        return total

    def evaluations(
        self, rank: int, kind: str, functions: Sequence, data: Sequence, arranged: dict
    ) -> Iterator[Evaluation]:
        """Yield the evaluations of a rank's rows; `arranged` keeps arrays for other kinds.

        `data` are the number of rows of each term, on all machines, and its arrays.
        """
        layout = self._layout
        for term, function, parameters, directions, (length, arrays), begin in zip(
            self._terms, functions, self._parameters, self._directions, data, self.begins
        ):
            for parameter, value, axis in zip(term.parameters, parameters, term.axes):
                _check_rows(term, parameter, value, axis, length)
            axes_of = dict(zip(term.parameters, term.axes))
            width = sum(v.size for v, axis in zip(parameters, term.axes) if axis is None)
            inputs = [*zip(term.parameters, parameters)]
            if kind == "products":
                inputs += zip(floats(term), directions)
            first, last = share(length, layout.n_ranks, layout.first() + rank)
            before = rows_before(layout, layout.machine, length)
            n_blocks = self.number_of_blocks(last - first, term.rows, arrays, width)
            for block in range(n_blocks):
                begins, ends = (first + each for each in share(last - first, n_blocks, block))
                chosen, there = slice(begins, ends), slice(begins - before, ends - before)
                arguments, copies = [], []
                for parameter, value in inputs:
                    own = along(value, axes_of[parameter], chosen)
                    arguments.append(own_value(own, parameter, copies))
                for rows, array in zip(term.rows, arrays):
                    key = rows, chosen.start, chosen.stop
                    if key not in arranged:
                        arranged[key] = self.arranged(rows, along(array, rows.axis, there))
                    arguments.append(arranged[key])
                sizes = [] if kind == "value" else [*zip(term.parameters, parameters)]
                outs = self._outs_of(rank, begin, sizes, axes_of, chosen, block > 0)
                yield self.evaluation(function, arguments, copies, outs, n_blocks == 1)

    def _outs_of(self, rank, start, parameters, axes_of, chosen, adds):
        """Return the places for the result of a `TermEvaluation`, in as few pieces as possible."""
        outs, begin, at = [], start, start + 1
        for parameter, value in parameters:
            if not is_float(parameter):
                continue
            end, axis = at + value.size, axes_of[parameter]
            if axis is not None:
                outs.append((self._parts[rank][begin:at], adds))
                # These are gradients for this rank's rows, to which no other rank writes.
                of_all = self._parts[0][at:end].reshape(value.shape)
                outs.append((along(of_all, axis, chosen), False))
                begin = end
            at = end
        return [*outs, (self._parts[rank][begin:at], adds)]

    # What ranks on devices do otherwise:

    def number_of_blocks(self, n_rows: int, rows: Sequence, arrays: Sequence, width: int) -> int:
        """Return into how many parts the rows of a rank are cut."""
        return number_of_blocks(n_rows, rows, arrays, width)

    def evaluation(self, *arguments: Any) -> Evaluation:
        """Return the evaluation of some rows."""
        return TermEvaluation(*arguments)

    def arranged(self, rows: RowData, array: np.ndarray):
        """Return rows as functions take them."""
        return rows.arranged(array)


def _joined(one, other):
    return [slice(one.start, other.stop)] if one.stop == other.start else [one, other]


def _check_rows(term, parameter, value, axis, length):
    if axis is not None and value.shape[axis] != length:
        raise ValueError(
            f"The data of {term.name!r} have {length} rows, but {parameter.name!r} has "
            f"{value.shape[axis]}: one for each row of the data that the model was made with."
        )
