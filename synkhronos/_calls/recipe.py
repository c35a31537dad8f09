"""Compile the variants of a function from the arguments of `function`."""

from typing import Any, List, NamedTuple

from synkhronos import _host
from synkhronos._calls.arguments import Inputs
from synkhronos._calls.parameters import Input
from synkhronos._calls.signature import OutputSignature
from synkhronos._machine.log import told_if_slow
from synkhronos._session.replica import PLAIN, SLICED


class Source(NamedTuple):
    """The arguments of `function`, checked, from which a function and its copies are made."""

    inputs: List[Input]
    has_whole: bool  # whether there are bcast_inputs
    outputs: OutputSignature
    updates: list  # pairs (shared variable, expression)
    update_modes: list
    sliceables: Any
    keywords: dict  # of theano.function; the givens are pairs (variable, replacement)
    check: Any  # the number of calls to compare with serial Theano, or "first"
    draws_all: bool  # whether random numbers are those of serial Theano
    conditions: Any = None  # the Conditions of the calls of a divided function, or None
    is_proved: bool = False  # whether the division has proved its modes and reductions
    # For a function that divides nothing: position of an input with rows -> their axis; or None.
    rows_of_all: Any = None


def take_out_row_numbers(source):
    """Return a `Source` with inputs in place of row numbers, and a list of these inputs.

    The expression ``data[rows(index, size)]`` becomes ``data[numbers]``, where `numbers` is a
    scattered input that the user doesn't see. Set the variables of `source.outputs` in place.
    """
    outputs, updates, givens = source.outputs, source.updates, source.keywords["givens"]
    expressions = [*outputs.variables, *(new for _, new in [*updates, *givens])]
    kept = [(each.variable, each.storage) for each in source.inputs if each.storage is not None]
    expressions, numbers, are_used = _host.without_row_numbers(
        expressions, [*givens, *kept], [each.variable for each in source.inputs]
    )
    if not numbers:
        return source, numbers
    new = iter(expressions)
    outputs.variables = [next(new) for _ in outputs.variables]
    updates = [(target, next(new)) for target, _ in updates]
    keywords = {**source.keywords, "givens": [(variable, next(new)) for variable, _ in givens]}
    if are_used:
        keywords["on_unused_input"] = "ignore"  # only the master uses the index
    return source._replace(updates=updates, keywords=keywords), numbers


class Recipe:
    """The variants of a function, and the expressions that they are compiled from.

    The plain variant is the function that ``theano.function`` makes. The sliced variant returns the
    values of the updates after the outputs, to accumulate them, and updates random states only, at
    every slice. After the user's inputs come `row_numbers`, inputs that the master computes.
    """

    def __init__(self, source, row_numbers):
        inputs, self._outputs = source.inputs, source.outputs
        kept = [each for each in inputs if each.storage is not None]
        # Inputs come from shared memory, so they are variables on the host: the graph transfers
        # those that the user has declared on a device.
        self.given = [each._replace(variable=_host.on_host(each.variable)) for each in inputs]
        self.row_numbers = row_numbers
        self._sent = [sent for each in self.given for sent in each.sent()]
        self.inputs = [each.variable for each in [*self._sent, *row_numbers]]
        moved = [
            (each.variable, new.variable)
            for each, new in zip(inputs, self.given)
            if each.variable is not new.variable
        ]
        moved += [(each.variable, each.storage) for each in kept]
        moved += [(each.variable, each.whole) for each in inputs if each.parts]
        self.givens = [*source.keywords["givens"], *moved]
        self._kwargs = {**source.keywords, "givens": self.givens}
        states = [(each.storage, each.update) for each in kept if each.update is not None]
        self.updates = [*source.updates, *states]
        self.update_modes = [*source.update_modes, *("avg" for _ in states)]
        self._default_updates = []
        self.sliceables = []
        self.draws_all = source.draws_all  # whether each rank draws the numbers of all rows
        self.conditions = source.conditions
        # Whether all inputs are numbers that the ranks get whole.
        self.divides_nothing = not (
            source.has_whole or row_numbers or any(each.variable.ndim for each in inputs)
        )
        self._uses = {}  # shared variable -> result of `computes_with`
        self._compiled = {}  # variant -> (outputs, updates, keyword arguments)

    @property
    def accumulated(self):
        """The updates that are accumulated over slices: pairs (shared variable, mode)."""
        targets = [target for target, _ in self.updates]
        explicit = _without_states(zip(targets, self.update_modes))
        return explicit + [(target, "avg") for target, _ in self._default_updates]

    @property
    def updated(self):
        """The shared variables that are updated, except random states with default updates."""
        return [target for target, _ in self.updates + self._default_updates]

    def rows(self):
        numbers = [each.variable for each in self.row_numbers]
        return {**rows_of(self._sent, self.sliceables), **dict.fromkeys(numbers, 0)}

    def examine(self):
        """Return the relations of a rank's values to the serial ones: see `_host.examine`."""
        no_defaults = self._kwargs.get("no_default_updates", False)
        computed = self.inputs, self._outputs.variables, self.updates, self.givens, no_defaults
        return _host.examine(self.rows(), *computed, draws_all=self.draws_all)

    def computes_with(self, variable):
        """Return whether the function uses a variable for more than a moving average or a total.

        The script collects such averages and totals, and those that outputs put together.
        """
        if variable not in self._uses:
            has_rows = bool(self.rows())
            updates = [*self.updates, *self._default_updates]
            outputs = zip(self._outputs.variables, self._outputs.modes)
            values = [
                *(value for target, value in updates if target is not variable),
                *(output for output, mode in outputs if has_rows or mode is None),
                *(new for _, new in self.givens),
            ]
            own_updates = [value for target, value in updates if target is variable]
            self._uses[variable] = any(_host.uses(each, {variable}) for each in values) or not all(
                _host.is_total(each, variable, self.rows()) for each in own_updates
            )
        return self._uses[variable]

    def sliced_by_inputs(self):
        """Return the shared variables whose rows the function slices by its inputs."""
        if self.sliceables:
            return []
        pairs = [*self.updates, *self.givens]
        expressions = [*self._outputs.variables, *(value for _, value in pairs)]
        sliced = _host.sliced_by_inputs(expressions, self.inputs)
        # It may keep its own results in those that it updates.
        return [variable for variable in sliced if variable not in self.updated]

    def compile_plain(self):
        """Compile the function as the user gave it."""
        compiled = self._compile(PLAIN, self._outputs.variables, self.updates, self._kwargs)
        self._default_updates = _without_states(_host.default_updates(compiled, self.updates))
        return compiled

    def compile_sliced(self):
        """Compile the function with its updates as outputs."""
        states = [pair for pair in self.updates if _host.is_random_state(pair[0])]
        others = _without_states(self.updates + self._default_updates)
        values = [_host.as_update(target, value) for target, value in others]
        defaults = [variable for variable, _ in self._default_updates]
        kwargs = _host.without_default_updates(self._kwargs, defaults)
        kwargs["on_unused_input"] = "ignore"  # the plain variant has warned
        return self._compile(SLICED, self._outputs.variables + values, states, kwargs)

    def _compile(self, variant, outputs, updates, kwargs):
        self._compiled[variant] = outputs, updates, kwargs
        name = kwargs.get("name") or "a function"
        with told_if_slow("compiling %s; later runs find it in a cache", name):
            return _host.compile_function(self.inputs, outputs, updates=updates, **kwargs)

    def expression(self, variant, compiled):
        """Return the expression of a variant, for ranks on another kind of device."""
        return _host.expression_of(compiled, self.inputs, *self._compiled[variant])


def _without_states(pairs):
    return [pair for pair in pairs if not _host.is_random_state(pair[0])]


def rows_of(inputs, sliceables):
    """Return a dict of each variable of which ranks have different rows to its axis of rows."""
    rows = {each.variable: each.axis for each in inputs if each.is_scattered}
    if isinstance(sliceables, (list, tuple)):
        rows.update(dict.fromkeys(sliceables, 0))
    return rows


class Definition(NamedTuple):
    """The parts of a function, which stay the same in all sessions."""

    compiled: Any  # the plain variant of the master: the function of serial Theano
    inputs: Inputs
    outputs: OutputSignature
    recipe: Recipe
    owner: str  # the function's name, for messages
