"""The likelihood of a PyMC model, cut out of its graph: pure functions on graphs.

    parameters ──▶ frontier ──┬──▶ expressions with rows ──▶ log-likelihood of an observed variable
    (the model's variables)   │
    data with rows ───────────┘

The frontier has the last variables of the graph that are equal on all ranks: for ``a[group]`` it is
``a``, and a rank takes its rows of ``group``. Parameters with rows are part of the frontier, too,
and a rank takes its rows of them. All before the frontier stays in this process, with priors,
transforms and potentials, and PyTensor derives it there. `row_axes` tests that no operation behind
the frontier computes something from several rows, but for the sum at the end.

The graph of random variables is cut before PyMC derives the log-likelihood from it: what PyMC
derives from constants of known length would be fixed to this length.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass, replace
from math import prod
from textwrap import shorten
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.distributions.distribution import PartialObservedRV, SymbolicRandomVariable
from pymc.distributions.timeseries import (
    GARCH11RV,
    AutoRegressiveRV,
    EulerMaruyamaRV,
    RandomWalkRV,
)
from pymc.logprob.abstract import MeasurableOp
from pymc.pytensorf import rewrite_pregrad, rvs_in_graph
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import graph_inputs
from pytensor.scalar import basic as scalar
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Shape, SpecifyShape
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.subtensor import AdvancedIncSubtensor, AdvancedSubtensor, IncSubtensor
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneConst

from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import count
from synkhronos.extensions.pymc import row_axes
from synkhronos.extensions.pymc.row_states import LOOP
from synkhronos.extensions.pymc.selections import Selections

SMALL = 32  # elements
_MANY = 32  # rows of data from which on a potential is divided
_MOST_AXES = 4  # that are tried
_MOST_TRIES = 12  # to give parameters rows; each derives the log-likelihood anew
_FREE = scalar.Neg, scalar.Identity, scalar.Second  # as fast to compute as to read
_SERIES = RandomWalkRV, AutoRegressiveRV, EulerMaruyamaRV, GARCH11RV
_WHY_NO_SERIES = (
    "each of its rows depends on the one before, which should be data: "
    "pm.Normal('y', rho * y[:-1], sigma, observed=y[1:])"
)
_WHY_NOT_IMPUTED = (
    "PyMC imputes its missing values together with the others: leave them out, if nothing "
    "needs them, as in pm.Censored('y', pm.Normal.dist(mu[seen]), 0, 1, observed=y[seen])"
)
AT_ONCE = Mode(linker="py", optimizer=None)  # evaluates without compiling anything


class NotByRows(ValueError):
    """The likelihood of an observed variable can't be computed by parts of its rows."""


class NoRows(NotByRows):
    """A potential has no data of many rows."""


@dataclass(frozen=True)
class RowData:
    """Data with a row for each observation: one input of the function of a rank."""

    data: Variable  # computed from constants and shared variables alone
    variable: Variable  # takes its place in the function of a rank
    axis: int  # of the rows
    is_factor: bool = False  # of matrix products, and used for nothing else

    def arranged(self, array: np.ndarray) -> np.ndarray:
        """Return some rows as the function of a rank takes them: always in one layout.

        numba compiles a function anew for each layout. A matrix with few columns is multiplied with
        a vector in half to three quarters of the time if it lies column by column, from both sides.
        """
        return np.asfortranarray(array) if self.is_factor else np.ascontiguousarray(array)


@dataclass(frozen=True)
class Term:
    """The log-likelihood of one observed variable, as a function of parameters and rows."""

    name: str
    frontier: tuple[Variable, ...]  # of the model's random variables
    parameters: tuple[Variable, ...]  # take their places
    axes: tuple[int | None, ...]  # of the rows of each parameter; None for one without rows
    rows: tuple[RowData, ...]
    logp: Variable
    length: int  # the number of rows when it was cut

    def gradients(self) -> list[Variable | None]:
        """Return the gradient for each parameter, None for those that are no floats."""
        floats = [each for each in self.parameters if is_float(each)]
        found = pytensor.grad(rewrite_pregrad(self.logp), floats, disconnected_inputs="ignore")
        by_parameter = dict(zip(floats, found, strict=True))
        return [by_parameter.get(each) for each in self.parameters]

    def vector(self) -> Variable:
        """Return the log-likelihood and all gradients in one flat vector."""
        parts = [self.logp, *(each for each in self.gradients() if each is not None)]
        return pt.concatenate([each.astype("float64").ravel() for each in parts])


@recurses_deep
def cut(model, observed) -> Term:
    """Cut the log-likelihood of an observed variable, or a potential, out of its model.

    Its rows lie along the longest axis of the data that works. Raise NotByRows if its graph shows
    that it can't be computed by parts of the rows, NoRows for a potential without many rows.
    """
    stand_ins = {rv: rv.type(name=rv.name) for rv in model.free_RVs}
    others = {rv: model.rvs_to_values[rv] for rv in model.observed_RVs if rv is not observed}
    is_potential = observed in model.potentials
    graphs = [observed] if is_potential else [observed, model.rvs_to_values[observed]]
    if not is_potential:
        _check(model, *graphs)
    drawn, *data = replaced(graphs, {**stand_ins, **others})
    drawn = _with_moved_selections(_with_plain_constants(drawn), set(stand_ins.values()))
    cutting = _Cutting(model, observed.name, drawn, data, stand_ins)
    if is_potential:
        found, _ = _data_in([drawn], set(stand_ins.values()))
        lengths = {n for each in values_of(found) for n in np.shape(each) if n >= _MANY}
        if not lengths:
            raise NoRows("it has no data of many rows")
        axes = [(None, length) for length in lengths]
    else:
        axes = list(enumerate(values_of(data)[0].shape))
        op = observed.owner.op
        if isinstance(op, _SERIES):  # PyMC prints a message where it derives parts of one
            axes = axes[: -op.ndim_supp]
            if not axes:
                raise NotByRows(_WHY_NO_SERIES)
    axes = sorted(axes, key=lambda each: each[1], reverse=True)[:_MOST_AXES]
    if axes[0][1] < 2:
        raise NotByRows(f"it has {count(axes[0][1], 'row')}")
    axes = [each for each in axes if each[1] > 1]
    try:
        return _first_that_works(lambda each: cutting.term(*each, {}), axes)
    except NotByRows as refusal:
        if cutting.has_whole:
            cutting.keeps_whole = True
            with contextlib.suppress(NotByRows):
                return _first_that_works(lambda each: cutting.term(*each, {}), axes)
        if _is_by(observed, PartialObservedRV):
            raise NotByRows(_WHY_NOT_IMPUTED) from refusal
        raise


def _first_that_works(function, choices):
    """Return the result for the first choice without NotByRows; else raise the first of these."""
    refusals = []
    for choice in choices:
        try:
            return function(choice)
        except NotByRows as refusal:
            refusals.append(refusal)
    raise refusals[0]


class _Cutting:
    """Cuts terms out of the graphs of an observed variable and its data, or of a potential.

    With `keeps_whole` what has no rows, but is computed from data alone, such as the sum of all
    weights, is computed from all rows. `has_whole` says whether there is such a thing.
    """

    keeps_whole = has_whole = False

    def __init__(self, model, name, drawn, data, stand_ins):
        self._model, self._name, self._drawn, self._data = model, name, drawn, data
        self._stand_ins = set(stand_ins.values())
        self._back = {stand_in: rv for rv, stand_in in stand_ins.items()}
        self._n_left = _MOST_TRIES

    def term(self, axis, length, with_rows) -> Term:
        """Return the term whose rows lie along an axis of the data.

        `with_rows` has the variables of the graph with rows, and their axes. If another variable is
        combined with rows, and has as many elements, these are tried as its rows.
        """
        self._n_left -= 1
        try:
            return self._cut(axis, length, with_rows)
        except _MeetsRows as refusal:
            choices = self._with_more_rows(refusal.sources, length, with_rows)
            if not choices or self._n_left < 0:
                raise
            return _first_that_works(lambda each: self.term(axis, length, each), choices)

    def _cut(self, axis, length, with_rows):
        sliced = {each: _of_unknown_length(each, at) for each, at in with_rows.items()}
        drawn, *data = replaced([self._drawn, *self._data], sliced)
        parameters = {*self._stand_ins, *sliced.values()}
        rows, whole = _find_rows(drawn, data, parameters, axis, length)
        self.has_whole = self.has_whole or bool(whole)
        # What is replaced by itself stays as it is, with all that it is computed from.
        new = {each: each for each in whole} if self.keeps_whole else {}
        new.update((each.data, each.variable) for each in rows)
        drawn, *data = replaced([drawn, *data], new)
        try:
            with _quiet():
                logp = (pm.logp(drawn, *data, warn_rvs=False) if data else drawn).sum()
        except raised_here(Exception) as error:  # of any kind, from the code of the distribution
            raise NotByRows(
                f"PyMC derives no log-likelihood of parts of its rows: {first_line(error)}"
            ) from error
        if rvs_in_graph([logp]):
            loops = [each for each in _inputs_first([drawn]) if _is_by(each, Scan)]
            what = ": ".join(LOOP) if loops else "its log-likelihood draws random numbers"
            raise NotByRows(what)
        frontier, behind = _frontier(
            logp, parameters, {*sliced.values(), *(r.variable for r in rows)}, length
        )
        known = _known_numbers(frontier)
        frontier = [each for each in frontier if each not in known]
        whole = {each: each.type(name=each.name) for each in frontier}
        [logp] = replaced([logp], {**known, **whole})
        logp = _cast(logp, {each.variable for each in rows})
        sliced = {each: stand_in for each, stand_in in sliced.items() if stand_in in behind}
        term = Term(
            self._name,
            tuple(replaced([*frontier, *sliced], self._back)),
            (*whole.values(), *sliced.values()),
            (*[None] * len(whole), *(with_rows[each] for each in sliced)),
            tuple(each for each in rows if each.variable in behind),
            logp,
            length,
        )
        axes = {each.variable: each.axis for each in term.rows}
        axes.update((stand_in, with_rows[each]) for each, stand_in in sliced.items())
        try:
            axes = row_axes.check(logp, axes)
        except row_axes.Mixed as error:
            above = set(_inputs_first([] if error.variable is None else [error.variable]))
            raise _MeetsRows(error, [each for each in frontier if whole[each] in above]) from error
        return _with_factors(_with_group_numbers(_with_computed_rows(term, axes)))

    def _with_more_rows(self, sources, length, with_rows):
        """Return larger choices of `with_rows`: with parameters, or what is computed from them."""
        in_model = set(_inputs_first([self._drawn]))
        above = [each for each in _inputs_first(sources) if each in in_model and _is_array(each)]
        shapes = dict(zip(above, self._shapes(above), strict=True))
        axes = {each: shape.index(length) for each, shape in shapes.items() if length in shape}
        free = {each: axis for each, axis in axes.items() if each in self._stand_ins}
        nearest, stack = {}, list(sources)
        while stack:
            each = stack.pop()
            if each in axes:
                nearest[each] = axes[each]
            elif each.owner:
                stack.extend(each.owner.inputs)
        choices = [{**with_rows, **more} for more in (free, nearest)]
        return [each for i, each in enumerate(choices) if each not in [with_rows, *choices[:i]]]

    def _shapes(self, variables):
        """Return the shapes that variables have at the initial point."""
        variables = [pt.shape(each) for each in replaced(variables, self._back)]
        shapes = self._model.replace_rvs_by_values(variables)
        given = {"mode": AT_ONCE, "on_unused_input": "ignore"}
        found = pytensor.function(self._model.value_vars, shapes, **given)
        return [tuple(each) for each in found(**self._model.initial_point(random_seed=0))]


class _MeetsRows(NotByRows):
    """Variables without rows are combined with rows; they are computed from `sources`."""

    def __init__(self, error, sources):
        super().__init__(str(error))
        self.sources = sources


def _of_unknown_length(variable, axis):
    shape = [None if i == axis else n for i, n in enumerate(variable.type.shape)]
    return TensorType(variable.dtype, tuple(shape))(name=variable.name)


def _with_plain_constants(graph):
    """Replace numbers with added axes by constants, so that PyMC sees that a bound is infinite."""
    found = {}
    for each in _inputs_first([graph]):
        if each.owner and isinstance(each.owner.op, DimShuffle):
            [number] = [found.get(inner, inner) for inner in each.owner.inputs]
            if isinstance(number, Constant) and number.data.size == 1:
                found[each] = pt.constant(number.data.reshape((1,) * each.ndim))
    return replaced([graph], found)[0]


def _with_factors(term) -> Term:
    """Return a term whose data are marked if they are matrices that only products use."""
    others = set()
    for variable in _inputs_first([term.logp]):
        if variable.owner and not _is_product(variable.owner.op):
            others.update(variable.owner.inputs)
    rows = [
        replace(each, is_factor=each.variable.ndim == 2 and each.variable not in others)
        for each in term.rows
    ]
    return replace(term, rows=tuple(rows))


def _with_group_numbers(term) -> Term:
    """Return a term in which constant numbers of groups, as in ``a[group]``, have unsigned dtypes.

    PyTensor does so, too, where it knows them: they are a quarter of the size, and an index that
    is never negative needs no test in the loop.
    """
    others = set()
    for variable in _inputs_first([term.logp]):
        node = variable.owner
        if node:
            others.update(node.inputs[: isinstance(node.op, AdvancedSubtensor) or None])
    new = {}
    for rows in term.rows:
        is_constant = all(isinstance(each, Constant) for each in graph_inputs([rows.data]))
        if is_constant and rows.variable not in others and rows.variable.dtype.startswith("int"):
            [numbers] = values_of([rows.data])
            if numbers.min() >= 0:
                dtype = str(np.min_scalar_type(numbers.max()))
                stand_in = rows.variable.type.clone(dtype=dtype)(name=rows.variable.name)
                new[rows] = replace(rows, data=pt.cast(rows.data, dtype), variable=stand_in)
    [logp] = replaced([term.logp], {old.variable: each.variable for old, each in new.items()})
    return replace(term, logp=logp, rows=tuple(new.get(each, each) for each in term.rows))


def _is_product(op):
    return isinstance(op.core_op if isinstance(op, Blockwise) else op, Dot)


def _cast(logp, rows) -> Variable:
    """Cast data of integers where floats are computed from them, so that the floats are data."""
    new = {}
    for variable in _inputs_first([logp]):
        node = variable.owner
        if node is None:
            continue
        inputs = [new.get(each, each) for each in node.inputs]
        if isinstance(node.op, Elemwise) and variable.dtype == "float64":
            begin = 1 if isinstance(node.op.scalar_op, scalar.Switch) else 0
            for at, each in enumerate(inputs[begin:], begin):
                if each in rows and each.dtype.startswith(("int", "uint")):
                    inputs[at] = pt.cast(each, "float64")
        if inputs != node.inputs:
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
            new.update(zip(node.outputs, outputs, strict=True))
    return new.get(logp, logp)


def _with_computed_rows(term, axes) -> Term:
    """Return a term in which functions of the data alone are data, such as log(y!).

    PyTensor computes them once, too, where data are constants.
    """
    # These variables differ from one evaluation to the next.
    moving = _computed_from(
        [term.logp], lambda each: each in term.parameters or isinstance(each, TensorSharedVariable)
    )
    costly = _computed_from([term.logp], _takes_time)
    back = {rows.variable: rows.data for rows in term.rows}
    found, seen, stack = [], set(), [term.logp]
    while stack:
        variable = stack.pop()
        if variable in seen or variable.owner is None:
            continue
        seen.add(variable)
        if variable in axes and variable in costly and variable not in moving:
            found.append(variable)
        else:
            stack.extend(variable.owner.inputs)
    computed = [
        RowData(data, variable.type(name=variable.name), axes[variable])
        for variable, data in zip(found, replaced(found, back), strict=True)
    ]
    [logp] = replaced(
        [term.logp], {each: rows.variable for each, rows in zip(found, computed, strict=True)}
    )
    left = set(_inputs_first([logp]))
    rows = [each for each in term.rows if each.variable in left]
    return replace(term, logp=logp, rows=(*rows, *computed))


def _takes_time(variable):
    op = variable.owner.op if variable.owner else None
    return isinstance(op, Elemwise) and not isinstance(op.scalar_op, _FREE)


@contextlib.contextmanager
def _quiet():
    """Keep PyTensor from printing a message or the traceback of each rewrite that fails."""
    logger = logging.getLogger("pytensor.graph")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _check(model, observed, data):
    if isinstance(observed.owner.op, MinibatchRandomVariable) or rvs_in_graph([data]):
        raise NotByRows("it is computed from minibatches (total_size, pm.Minibatch)")
    if model.rvs_to_transforms.get(observed) is not None:
        raise NotByRows("its data are transformed")
    if not isinstance(data.type, TensorType):
        raise NotByRows("its data are no dense array")
    if data.ndim == 0:
        raise NotByRows("it has no rows: its data are one number")


def _with_moved_selections(graph, stand_ins):
    selections = Selections(
        _depending(lambda each: each in stand_ins or not _is_data(each)),
        _depending(
            lambda each: each.owner is None and _is_data(each) and np.size(_value(each)) > 1
        ),
        values_of,
    )
    moved = {each: selections.moved(each) for each in _inputs_first([graph])}
    return replaced([graph], {old: new for old, new in moved.items() if new is not None})[0]


def _depending(is_source):
    """Return a function that says whether a variable is a source, or computed from one."""
    known: dict[Variable, bool] = {}

    def depends(variable):
        for each in _inputs_first([variable], known):
            if each not in known:
                inputs = each.owner.inputs if each.owner else ()
                known[each] = is_source(each) or any(known[one] for one in inputs)
        return known[variable]

    return depends


def _find_rows(drawn, data, parameters, axis, length) -> tuple[list[RowData], list[Variable]]:
    """Return the largest parts of the graphs that are data with `length` rows.

    Also return the largest parts that are computed from data alone, and have no rows.
    """
    found = []
    with_rows, whole = _data_in([drawn, *data], parameters, length)
    for variable in with_rows:
        [value] = values_of([variable])
        shape = np.shape(value)
        is_alike = axis is not None and len(shape) == data[0].ndim and shape[axis] == length
        own = axis if is_alike else shape.index(length)
        found.append(RowData(variable, _of_unknown_length(variable, own), own))
    return found, whole


def _data_in(graphs, parameters, length=None) -> tuple[list[Variable], list[Variable]]:
    """Return the largest parts of graphs that are data with this length; and those without."""
    not_data = _computed_from(graphs, lambda each: each in parameters or not _is_data(each))
    found, whole, seen, stack = [], [], set(), list(graphs)
    while stack:
        variable = stack.pop()
        if variable in seen:
            continue
        seen.add(variable)
        inputs = variable.owner.inputs if variable.owner else ()
        if variable in not_data:
            # The master computes all of an array that it puts together, such as imputed values.
            is_set = inputs and isinstance(variable.owner.op, IncSubtensor | AdvancedIncSubtensor)
            stack.extend(() if is_set else inputs)
        elif length is None or length in np.shape(values_of([variable])[0]):
            found.append(variable)
        else:
            if inputs:
                whole.append(variable)
            if not is_float(variable):  # a mean of all rows stays whole, a number of rows does not
                stack.extend(inputs)
    return found, whole


def _frontier(logp, parameters, sources, length):
    """Return the last variables that are computed from parameters alone; and all with rows."""
    behind = _computed_from([logp], sources.__contains__)
    moving = _computed_from(
        [logp], lambda each: each in parameters or isinstance(each, TensorSharedVariable)
    )
    if logp not in behind:
        raise NotByRows("its log-likelihood does not depend on its data")
    frontier = {}  # in a fixed order
    for variable in _inputs_first([logp]):
        if variable.owner is None or variable not in behind:
            continue
        for each in variable.owner.inputs:
            if each in moving and each not in behind:
                frontier[each] = None
    return _smaller(frontier, moving, length), behind


def _is_by(variable, kinds):
    return variable.owner is not None and isinstance(variable.owner.op, kinds)


def _is_array(variable):
    return isinstance(variable.type, TensorType)


def is_float(variable) -> bool:
    """Return whether a variable's dtype is one of floats, which have gradients."""
    return getattr(variable, "dtype", "").startswith("float")


def _smaller(frontier, moving, length):
    """Move a frontier towards the parameters where that leaves fewer or simpler variables.

    Each evaluation copies each variable of the frontier, while each rank computes a few numbers in
    less time. Variables that may have rows stay.
    """
    kept, near = {}, {}
    for variable in frontier:
        while variable.owner and isinstance(variable.owner.op, DimShuffle):
            [variable] = variable.owner.inputs
        is_far = _is_array(variable) and (length in variable.type.shape or not _is_small(variable))
        (kept if is_far else near)[variable] = None
    sources = [each for each in _inputs_first(near) if each in moving and each.owner is None]
    must_move = not all(map(_is_array, near))
    pays = len(sources) <= len(near) and all(map(_is_small, sources))
    chosen = sources if must_move or pays else near
    return [*kept, *(each for each in chosen if each not in kept)]


def _is_small(variable):
    shape = getattr(variable.type, "shape", (None,))
    return None not in shape and prod(shape) <= SMALL


def replaced(graphs, replacements) -> list[Variable]:
    """Return graphs with some of their variables replaced, by variables of any length.

    PyTensor's own functions keep the type of what they replace, with its known lengths. Random
    variables lose their size, and are as long as their data then.
    """
    new = dict(replacements)
    for variable in _inputs_first(graphs, new):
        node = variable.owner
        if variable in new or node is None:
            continue
        inputs = [new.get(each, each) for each in node.inputs]
        place = _place_of_size(node.op)
        if place is not None:
            inputs[place] = NoneConst
        if inputs != node.inputs:
            new.update(zip(node.outputs, _rebuilt(node, inputs), strict=True))
    return [new.get(each, each) for each in graphs]


def _known_numbers(graphs) -> dict[Variable, Variable]:
    """Return constants for variables that are computed from known lengths."""
    found = {}
    for each in _inputs_first(graphs):
        node = each.owner
        if node is None:
            continue
        inputs = [found.get(one, one) for one in node.inputs]
        if isinstance(node.op, Shape):
            shape = inputs[0].type.shape
            if None not in shape:
                found[each] = pt.constant(np.array(shape, dtype="int64"))
        elif not found.keys().isdisjoint(node.inputs) and all(
            isinstance(one, Constant) for one in inputs
        ):
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
            [value] = values_of([outputs[node.outputs.index(each)]])
            found[each] = each.type.make_constant(value)
    return found


def _place_of_size(op):
    op = getattr(op, "base_rv_op", op)  # of a truncated variable, whose inputs come first
    if isinstance(op, RandomVariable):
        return 1
    if isinstance(op, SymbolicRandomVariable) and not op.inline_logprob and op.extended_signature:
        (_, place, _), _ = op.get_input_output_type_idxs(op.extended_signature)
        return place
    return None


def _rebuilt(node, inputs):
    op = node.op
    if isinstance(op, SpecifyShape):
        return inputs[:1]
    if not isinstance(op, OpFromGraph):
        return node.clone_with_new_inputs(inputs, strict=False).outputs
    if isinstance(op, SymbolicRandomVariable) and not op.inline_logprob:
        # PyMC reads the inputs alone; `make_node` would restore the former lengths.
        outputs = [_of_any_length(each.type)() for each in node.outputs]
        return Apply(op, inputs, outputs).outputs
    inside = op.fgraph.unfreeze()
    return replaced(inside.outputs, dict(zip(inside.inputs, inputs, strict=True)))


def _of_any_length(type_):
    if not isinstance(type_, TensorType):
        return type_
    return TensorType(type_.dtype, tuple(1 if each == 1 else None for each in type_.shape))


def _is_data(variable):
    if variable.owner is None:
        return isinstance(variable, Constant | TensorSharedVariable)
    return not isinstance(variable.owner.op, MeasurableOp)


def _computed_from(graphs, is_source) -> set[Variable]:
    """Return all variables of graphs that are sources, or computed from one."""
    found = set()
    for variable in _inputs_first(graphs):
        inputs = variable.owner.inputs if variable.owner else ()
        if is_source(variable) or not found.isdisjoint(inputs):
            found.add(variable)
    return found


def _inputs_first(graphs, ends=()) -> list[Variable]:
    """Return the variables of graphs up to the ends, each one after its inputs."""
    order, seen, stack = [], set(), [(each, False) for each in graphs]
    while stack:
        variable, is_left = stack.pop()
        if is_left:
            order.append(variable)
        elif variable not in seen:
            seen.add(variable)
            stack.append((variable, True))
            if variable.owner and variable not in ends:
                stack.extend((each, False) for each in variable.owner.inputs)
    return order


def first_line(error: Exception) -> str:
    """Return an exception's type and the first line of its message, shortened."""
    lines = [shorten(each, 400, placeholder=" ...") for each in str(error).splitlines() if each]
    return ": ".join([type(error).__name__, *lines[:1]])


def values_of(variables) -> list[Any]:
    """Return the values of variables that are computed from data alone."""
    computed = [each for each in variables if each.owner is not None]
    values = iter(pytensor.function([], computed, mode=AT_ONCE)() if computed else ())
    return [_value(each) if each.owner is None else next(values) for each in variables]


def _value(leaf):
    if isinstance(leaf, Constant):
        return leaf.data
    return leaf.get_value(borrow=True)
