"""Updaters change weights by the reduced gradients of rounds, where the weights are kept.

    init_updater(rank, parameters)     once, in the process that keeps the weights
    init_model(key, weight)            once for each key: fill the weight, and remember it
    adopt(key, weight)                 instead of init_model, if the key was given a value
    update(key, gradient)              once a round: change the remembered weight in place

An updater is called for one key at a time. A store of several processes pickles it, without the
weights, and sends it to its servers, which call it for their parts of each key. Later changes of
the script's copy, such as a new learning rate, are sent, too: see `hyper`.
"""

from __future__ import annotations

import inspect
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Mapping

import cloudpickle
import numpy as np

from synkhronos import _host
from synkhronos._host.choice import is_imported
from synkhronos._wording import sentence, shown
from synkhronos.parameter_server.hyper import (
    Hyperparameter,
    attributes_of,
    copy_of,
    is_followed,
    is_shared,
    outside_of,
    set_shared,
)

if TYPE_CHECKING:  # a script that has only arrays of NumPy needs no Theano
    from synkhronos._hints import SharedVariable

# Attributes of updaters that are no hyperparameters.
_OWN = frozenset(
    {"weights", "parameters", "rank", "is_taken", "is_elementwise", "keeps_copies", "kind", "_fill"}
)
_PROBE = (2,), (2, 2), (2, 2, 2, 2)  # shapes of weights with which a rule is tried


class Updater:
    """The base class of updaters: derive from it, and define `update`.

    Attributes
    ----------
    weights : dict of int or str -> numpy.ndarray
        The store's memory of each key, of the key's shape. Where several servers divide a large key
        it is a part of its elements, of the shape (1, ..., n) with as many axes.
    is_elementwise : bool or None
        Whether each element is updated by itself, so that servers may divide a key. With False each
        key is kept whole by one server. None: keys are divided, with a warning at the first one. A
        function may have this attribute, too.
    rank : int
        The number of the server, 0 in a store of one process.
    parameters : dict of str -> str
        The parameters of the store, as ``set_param`` was given them.

    Examples
    --------
    >>> class Decay(Updater):
    ...     def init_model(self, key, weight):
    ...         super().init_model(key, weight)
    ...         weight[...] = 1
    ...     def update(self, key, gradient):
    ...         self.weights[key] -= 0.5 * gradient
    >>> updater, weight = Decay(), np.zeros(2)
    >>> updater.init_updater(0, {})
    >>> updater.init_model("bias", weight)
    >>> updater.update("bias", np.array([0.0, 1.0]))
    >>> weight
    array([1. , 0.5])
    """

    rank = 0
    is_taken = False  # by a store
    is_elementwise: bool | None = None
    keeps_copies = False  # `assign_hyper` changes copies of what the script has
    _fill: Callable | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Updater:
        """Make the dicts here, as users' classes may define ``__init__`` without calling ours."""
        updater = super().__new__(cls)
        updater.weights, updater.parameters = {}, {}
        return updater

    def __getstate__(self) -> dict:
        left_out = {"weights": {}, "parameters": {}, "rank": 0, "is_taken": False}
        return {**self.__dict__, **left_out}

    @property
    def kind(self) -> str:
        """The kind of updater: files of its states are read by the same kind only."""
        return type(self).__qualname__

    def init_updater(self, rank: int, parameters: Mapping[str, str]) -> None:
        """Remember the number of this server and the store's parameters."""
        self.rank, self.parameters = rank, dict(parameters)

    def init_model(self, key: int | str, weight: np.ndarray) -> None:
        """Remember the memory of a key's weight, now zeros; fill it as `starting_from` said."""
        self.weights[key] = weight
        if self._fill is not None:
            self._fill(key, weight)

    def adopt(self, key: int | str, weight: np.ndarray) -> None:
        """Remember the memory of a key's weight, which has its initial value already."""
        value = weight.copy()
        self.init_model(key, weight)
        weight[...] = value

    def update(self, key: int | str, gradient: np.ndarray) -> None:
        """Change the weight of a key in place, by the gradient of a round.

        The gradient is memory of the store: it is valid during the call, and must not be changed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(key, gradient).")

    def states(self) -> dict[int | str, dict[str, np.ndarray]]:
        """Return copies of what the updater keeps for each key beside the weight, by name."""
        return {}

    def set_states(self, states: Mapping[int | str, Mapping[str, np.ndarray]]) -> None:
        """Set what `states` has returned; raise ValueError, with nothing set, if it doesn't fit."""
        if states:
            raise ValueError(
                f"{type(self).__name__} keeps no states, but got those of the keys "
                f"{_listed(states)}: define states() and set_states()."
            )

    def takes_parts(self, key: int | str, shape: tuple[int, ...], dtype: Any) -> bool | None:
        """Return whether servers may divide a key of this shape; None if it is not known."""
        return self.is_elementwise if self._fill is None else False

    def find_hyper(self) -> dict[str, Hyperparameter]:
        """Return what a script may change later: attributes that are numbers, texts and arrays."""
        return attributes_of(self, without=_OWN)

    def hyper_values(self) -> dict[str, Any]:
        """Return the present values of `find_hyper`."""
        return {name: copy_of(each.value) for name, each in self.find_hyper().items()}

    def hyper_when_pickled(self) -> dict[str, Any]:
        """Return the hyperparameters that servers got with the pickled updater."""
        return self.hyper_values()

    def set_hyper(self, values: Mapping[str, Any]) -> None:
        """Set hyperparameters in the script's own copy.

        Raises ValueError for other names, TypeError for what is neither number, text nor array.
        """
        self._check_names(values)
        for name, value in values.items():
            if not is_followed(value) or is_shared(value):
                raise TypeError(f"{name} must be a number or a text, got {shown(value)}.")
        self.assign_hyper(values)

    def _check_names(self, values):
        found = self.find_hyper()
        for name in values:
            if name not in found:
                raise ValueError(
                    f"{self.kind} has no {name!r} that could be set, only {_listed(found)}."
                )

    def assign_hyper(self, values: Mapping[str, Any]) -> None:
        """Set hyperparameters where the weights are kept."""
        found = self.find_hyper()
        for name, value in values.items():
            if name in found and is_shared(found[name].value):
                set_shared(name, found[name].value, value)
            elif name in found:
                found[name].write(value)
            else:  # the script has added an attribute
                setattr(self, name, value)

    def starting_from(self, fill: Callable[[int | str, np.ndarray], None]) -> Updater:
        """Fill weights of keys without a value by ``fill(key, weight)``; return the updater.

        Examples
        --------
        >>> def small(key, weight):
        ...     weight[...] = 0.01
        >>> updater = function_updater(lambda key, gradient, weight: None).starting_from(small)
        """
        if not callable(fill):
            raise TypeError(f"fill must be a function (key, weight), got {shown(fill)}.")
        self._fill = fill
        return self

    def pickled(self) -> bytes:
        """Return the updater for servers; raise TypeError if it can't be pickled."""
        try:
            return cloudpickle.dumps(self)
        except Exception as error:  # objects raise errors of any kind
            raise TypeError(
                f"{type(self).__name__} can't be sent to the servers: {sentence(error)} Make what "
                "can't be pickled in init_updater(), which the servers call."
            ) from error

    def random_state(self, key: int | str, seed: int = 0) -> np.random.RandomState:
        """Return random numbers for the initial weight of a key, the same in each run.

        Servers draw different ones for their parts of a key.
        """
        return np.random.RandomState(zlib.crc32(f"{seed} {key!r} {self.rank}".encode()))


def as_updater(updater: Updater | Callable) -> Updater:
    """Return an updater, or for a callable (key, gradient, weight) an updater that calls it."""
    if isinstance(updater, Updater):
        return updater
    if isinstance(updater, type) and issubclass(updater, Updater):
        raise TypeError(f"updater must be an Updater, got the class: write {updater.__name__}().")
    if is_imported() and isinstance(updater, _host.CompiledFunction):
        raise TypeError(
            "updater must be an Updater or a function (key, gradient, weight), got a compiled "
            f"{_host.title} function: write theano_updater({{key: function}}, {{key: weight}})."
        )
    if not callable(updater):
        raise TypeError(
            "updater must be an Updater or a function (key, gradient, weight), got "
            f"{shown(updater)}."
        )
    return function_updater(updater)


def update(updater: Updater, key: int | str, gradient: np.ndarray, weight: np.ndarray) -> None:
    """Let an updater change a weight; raise if it has replaced the store's array instead."""
    updater.update(key, gradient)
    if updater.weights.get(key, weight) is not weight:
        updater.weights[key] = weight
        raise TypeError(
            f"the updater has assigned self.weights[{key!r}], which leaves the store's memory as "
            f"it was: write self.weights[{key!r}][...] = new, or -= step."
        )


def function_updater(function: Callable[[int | str, np.ndarray, np.ndarray], None]) -> Updater:
    """Return an updater that calls ``function(key, gradient, weight)``.

    Parameters
    ----------
    function : callable
        It changes `weight` in place, and returns None. The order of its arguments is that of
        updaters of MXNet's KVStore. Where several servers divide a large key, `gradient` and
        `weight` are a part of it: see `Updater`. Numbers outside of the function that it uses, such
        as a global learning rate, may change later.

    Raises
    ------
    TypeError
        For what can't be called.

    Examples
    --------
    >>> def descend(key, gradient, weight):
    ...     weight -= 0.1 * gradient
    >>> updater, weight = function_updater(descend), np.ones(2)
    >>> updater.init_model(0, weight)
    >>> updater.update(0, np.array([0.0, 1.0]))
    >>> weight
    array([1. , 0.9])
    """
    if not callable(function):
        raise TypeError(f"function must be a callable (key, gradient, weight), got {function!r}.")
    return _FunctionUpdater(function)


def rule_updater(rule: Callable, **hyper: Any) -> Updater:
    """Return an updater that applies an update rule, with a state for each key.

    Parameters
    ----------
    rule : callable
        ``rule(grads, params, **hyper) -> updates``: one of
        :mod:`synkhronos.extensions.update_rules`, of Lasagne, or one's own. It is given one
        parameter at a time. If it does not compute element by element, as with a norm, one server
        keeps the key whole. For keys of float16 the updater keeps weights in float32, and rounds
        them for pulls.
    **hyper
        Its hyperparameters, such as ``learning_rate=0.1``: numbers, which ``store.set_hyper``
        changes later, or shared variables, which may be set.

    Raises
    ------
    TypeError, ValueError
        For what is no rule, and for hyperparameters that the rule refuses.

    Examples
    --------
    >>> from synkhronos.extensions.update_rules import momentum
    >>> updater, weight = rule_updater(momentum, learning_rate=0.5), np.ones(2)
    >>> updater.init_model("weight", weight)
    >>> updater.update("weight", np.array([0.0, 1.0]))
    >>> updater.update("weight", np.array([0.0, 1.0]))
    >>> weight, updater.states()["weight"]
    (array([ 1.  , -0.45]), {'0 weight_velocity': array([ 0.  , -0.95])})
    """
    if not callable(rule):
        raise TypeError(
            "rule must be an update rule such as synkhronos.extensions.update_rules.sgd, "
            f"(grads, params, **hyper) -> updates, got {shown(rule)}."
        )
    # Tried here, so that the caller gets the rule's errors rather than a server.
    shared = [each for each in hyper.values() if is_shared(each)]
    for shape in _PROBE:
        try:
            updates = dict(_graph_of(rule, hyper, "probe", np.zeros(shape, np.float32))[2])
        except Exception:  # of any kind: the rule may be for keys of other shapes
            if shape == _PROBE[0]:
                raise
            continue
        shared += [each for each in _host.shared_in([*updates.values()]) if each not in updates]
    followed = [each for each in dict.fromkeys(shared) if is_followed(each)]
    return _RuleUpdater(rule, hyper, followed)


def theano_updater(
    functions: Mapping[int | str, Callable], weights: Mapping[int | str, SharedVariable]
) -> Updater:
    """Return an updater that calls a compiled Theano function for each key.

    The memory of the store becomes the value of the shared variable, so functions that read it see
    the updates. It begins with the variable's value, or with that given to ``init(key, value)``.

    Parameters
    ----------
    functions : dict of key -> Theano function
        Each has one input, the gradient of a round, and updates the weight of its key.
    weights : dict of key -> shared variable
        The weight that the function of each key updates.

    Raises
    ------
    TypeError
        For other kinds.
    ValueError
        For other keys in `weights` than in `functions`, and a function that does not update its
        weight or has another number of inputs.

    Examples
    --------
    >>> import theano, theano.tensor as T
    >>> gradient, weight = T.vector(dtype="float64"), theano.shared(np.ones(2), "weight")
    >>> step = theano.function([gradient], updates=[(weight, weight - 0.5 * gradient)])
    >>> updater, memory = theano_updater({0: step}, {0: weight}), np.zeros(2)
    >>> updater.init_model(0, memory)
    >>> updater.update(0, np.array([0.0, 1.0]))
    >>> memory, weight.get_value()
    (array([1. , 0.5]), array([1. , 0.5]))
    """
    for name, value in (("functions", functions), ("weights", weights)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict with one for each key, got {shown(value)}.")
    if set(functions) != set(weights):
        raise ValueError(
            f"weights must have the keys of functions, {_listed(functions)}, got "
            f"{_listed(weights)}."
        )
    for key, function in functions.items():
        _check_function(key, function, weights[key])
    return _TheanoUpdater(dict(functions), dict(weights))


class _FunctionUpdater(Updater):
    def __init__(self, function):
        self._function = function
        self.is_elementwise = getattr(function, "is_elementwise", None)

    def find_hyper(self):
        """Return what the function reads outside of itself."""
        return outside_of(self._function)

    def hyper_when_pickled(self):
        """Return none: a function of an imported module is pickled by its name."""
        return {}

    @property
    def kind(self):
        return f"function {_name_of(self._function)}"

    def update(self, key, gradient):
        result = self._function(key, gradient, self.weights[key])
        if result is not None:
            raise TypeError(
                f"an updater must change weight in place and return None, but "
                f"{_name_of(self._function)} returned {shown(result)} for key {key!r}: write "
                "weight -= ..., or weight[...] = ..."
            )


class _Step:
    """A compiled function that updates one weight, whose value is the store's memory."""

    def __init__(self, function, variable, weight, shape):
        self._function, self._variable, self._shape = function, variable, shape
        assert weight.flags.c_contiguous  # else the next line makes a copy
        self._weight = weight.reshape(shape)
        self._states = [each for each in _host.updated_variables(function) if each is not variable]
        _host.replace(variable, self._weight)

    def run(self, gradient):
        """Update the weight and the states."""
        weight, variable = self._weight, self._variable
        if _host.peek(variable) is not weight:  # the script has set it
            self._keep()
        gradient = np.asarray(gradient, weight.dtype).reshape(self._shape)
        _host.run(self._function, [gradient])
        if _host.peek(variable) is not weight:  # it was not compiled to work in place
            self._keep()

    def _keep(self):
        self._weight[...] = _host.to_host(_host.peek(self._variable))
        _host.replace(self._variable, self._weight)

    def state(self):
        """Return copies of the other variables that the function updates, by name."""
        return _copies(self._states, [_host.peek(each) for each in self._states])

    def set_state(self, values):
        """Set what `state` has returned."""
        for each, name in zip(self._states, _names(self._states)):
            _host.replace(each, np.array(values[name]))


_MASTER = "weight in float32"


class _SharedStep(_Step):
    """A step whose function other keys use, too: its variables get this key's values for each run.

    `used` are the variables that the function updates, `own` those made for this key, the weight
    first. `weight` is the store's memory, `rounded`, or for float16 an array of float32.
    """

    def __init__(self, function, used, own, weight, rounded):
        super().__init__(function, used[0], weight, weight.shape)
        self._states, self._named = used[1:], own[1:]
        self.values = [_host.peek(each) for each in own[1:]]
        self._rounded = rounded if rounded.dtype == np.float16 else None
        self.weight = weight

    def run(self, gradient):
        """Update the weight and the states."""
        _host.replace(self._variable, self._weight)
        for each, value in zip(self._states, self.values):
            set_to = _host.replace if _host.is_array_variable(each) else _host.replace_object
            set_to(each, value)
        super().run(gradient)
        self.values = [_host.peek(each) for each in self._states]
        if self._rounded is not None:
            self._rounded[...] = self._weight

    def take_weight(self):
        """Take the weight from the store's memory."""
        if self._rounded is not None:
            self._weight[...] = self._rounded

    def state(self):
        """Return copies of the other variables that the function updates, by name."""
        wide = {} if self._rounded is None else {_MASTER: self._weight.copy()}
        return {**_copies(self._named, self.values), **wide}

    def set_state(self, values):
        """Set what `state` has returned."""
        self.values = [np.array(values[name]) for name in _names(self._named)]
        if self._rounded is not None and np.array_equal(
            self._rounded, values[_MASTER].astype(np.float16)
        ):  # else the states are of other weights
            self._weight[...] = values[_MASTER]


def _copies(variables, values):
    for each in variables:
        if not _host.is_array_variable(each):
            raise TypeError(f"the state {each} of type {each.type} can't be saved.")
    return dict(zip(_names(variables), [np.array(_host.to_host(value)) for value in values]))


def _names(variables):
    return [f"{number} {each.name or ''}".strip() for number, each in enumerate(variables)]


class _Stepping(Updater):
    """An updater that has a compiled function for each key."""

    def __init__(self):
        self._steps: dict[int | str, _Step] = {}

    def __getstate__(self):
        return {**super().__getstate__(), "_steps": {}}

    def update(self, key, gradient):
        self._steps[key].run(gradient)

    def states(self):
        return {key: step.state() for key, step in self._steps.items()}

    def set_states(self, states):
        own = self.states()
        if set(own) != set(states):
            raise ValueError(
                f"the states are of the keys {_listed(states)}, but this updater has "
                f"{_listed(own)}. Initialize the same keys before."
            )
        for key, values in own.items():
            _check_state(key, values, states[key])
        for key, step in self._steps.items():
            step.set_state({name: states[key][name] for name in own[key]})


class _RuleUpdater(_Stepping):
    keeps_copies = True

    def __init__(self, rule, hyper, followed):
        super().__init__()
        self._rule, self._given = rule, hyper
        names = {id(each): name for name, each in hyper.items()}
        self._followed = {
            names.get(id(each), name): each for name, each in zip(_names(followed), followed)
        }
        numbers = {**_numbers_among_defaults(rule), **hyper}
        self._numbers = {name: each for name, each in numbers.items() if _is_number(each)}
        self._shared = {}  # what the functions read in place of these numbers and variables
        self._old = set()  # keys whose functions read a number that has changed
        self._compiled = []  # (gradient, updates, function)
        self._takes_parts = {}

    def __getstate__(self):
        left_out = {"_shared": {}, "_old": set(), "_compiled": [], "_takes_parts": {}}
        return {**super().__getstate__(), **left_out}

    def find_hyper(self):
        """Return the numbers that the rule was given, and shared variables that it reads."""
        found = {**self._numbers, **self._followed}
        return {
            n: Hyperparameter(each, partial(self._numbers.__setitem__, n))
            for n, each in found.items()
        }

    def set_hyper(self, values):
        """Set numbers by their keywords; raise if the rule can't take another one later."""
        self._check_names(values)
        numbers = {name: each for name, each in values.items() if name in self._numbers}
        for name, value in numbers.items():
            if not _is_number(value):
                raise TypeError(f"{name} must be a number, got {shown(value)}.")
        probe = {name: _host.shared_on_host(np.zeros(()), name) for name in numbers}
        try:
            hyper = {**self._given, **_as_type(probe, "float32")}
            _graph_of(self._rule, hyper, "probe", np.zeros(2, np.float32))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{_name_of(self._rule)} takes {_listed(numbers)} as a number only, which can't be "
                f"changed later: {sentence(error)}"
            ) from error
        numbers = {name: float(each) for name, each in numbers.items()}
        for name in values.keys() - numbers.keys():
            set_shared(name, self._followed[name], values[name])
        self._numbers.update(numbers)

    def assign_hyper(self, values):
        """Set what the functions read; the first change of a number compiles them anew."""
        for name, value in values.items():
            if name in self._shared:
                set_shared(name, self._shared[name], value)
                continue
            dtype = np.asarray(value).dtype if name in self._followed else np.float64
            self._shared[name] = _host.shared_on_host(np.array(value, dtype), name)
            if name not in self._followed:
                self._compiled, self._old = [], set(self._steps)

    def update(self, key, gradient):
        if key in self._old:
            old = self._steps[key]
            new = self._step_for(key, old.weight, self.weights[key])
            if len(new.values) == len(old.values):  # else the number decides which states there are
                new.values = old.values
            self._steps[key] = new
            self._old.discard(key)
        super().update(key, gradient)

    def _graph(self, name, weight):
        """Return what `_graph_of` does, with variables of this updater in place of the script's."""
        for each, variable in self._followed.items():
            if each not in self._shared:
                self._shared[each] = _host.shared_on_host(np.array(copy_of(variable)), each)
        own = {n: each for n, each in self._shared.items() if n not in self._followed}
        hyper = {**self._given, **_as_type(own, weight.dtype)}
        gradient, variable, updates = _graph_of(self._rule, hyper, name, weight)
        in_place = {each: self._shared[n] for n, each in self._followed.items()}
        expressions = _host.swapped([value for _, value in updates], in_place)
        return gradient, variable, [(target, e) for (target, _), e in zip(updates, expressions)]

    def takes_parts(self, key, shape, dtype):
        """Return whether the rule computes each element of such a key by itself."""
        if self._fill is not None:
            return False
        known = self._takes_parts.get((key, shape, dtype))
        if known is None:
            known = self._takes_parts[key, shape, dtype] = self._computes_by_element(
                str(key), shape, np.float32 if dtype == np.float16 else dtype
            )
        return known

    def _computes_by_element(self, name, shape, dtype):
        # A rule that looks at the shape or the values makes two different graphs.
        graphs = []
        for lengths in (shape, (1,) * (len(shape) - 1) + (2,)):
            weight = np.random.RandomState(len(graphs)).random_sample(lengths).astype(dtype)
            gradient, variable, updates = self._graph(name, weight)
            numbers = [_host.peek(each) for each, _ in updates if each.ndim == 0]
            graphs.append((gradient, variable, updates, numbers))
        (gradient, variable, whole, numbers), (other, _, part, others) = graphs
        return (
            _host.computes_by_element(whole, [gradient, variable])
            and _host.same_updates(([gradient], whole), ([other], part))
            and all(map(np.array_equal, numbers, others))
        )

    @property
    def kind(self):
        return f"rule {_name_of(self._rule)}"

    def init_model(self, key, weight):
        super().init_model(key, weight)
        master = weight.astype(np.float32) if weight.dtype == np.float16 else weight
        self._steps[key] = self._step_for(key, master, weight)

    def adopt(self, key, weight):
        super().adopt(key, weight)
        self._steps[key].take_weight()

    def _step_for(self, key, weight, rounded):
        with _host.compiling:
            gradient, variable, updates = self._graph(str(key), weight)
            used, function = self._function_for(gradient, updates)
        at = [target for target, _ in updates].index(variable)
        own = [target for target, _ in updates]
        used.insert(0, used.pop(at))
        own.insert(0, own.pop(at))
        return _SharedStep(function, used, own, weight, rounded)

    def _function_for(self, gradient, updates):
        """Return (variables, function) for updates: an equal one that there is, or a new one."""
        for given, pairs, function in self._compiled:
            if _host.same_updates(([given], pairs), ([gradient], updates)):
                return [target for target, _ in pairs], function
        taken = [_host.In(gradient, borrow=True)]
        function = _host.compile_function(taken, [], updates=updates)
        if not _host.is_reusing_memory(function):  # it would write to the state of another key
            self._compiled.append((gradient, updates, function))
        return [target for target, _ in updates], function


def _as_type(shared, dtype):
    return {name: _host.tensor.cast(each, np.dtype(dtype).name) for name, each in shared.items()}


def _is_number(value):
    is_array = isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"
    return is_array or (
        isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    )


def _numbers_among_defaults(rule):
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: each.default for each in parameters if _is_number(each.default)}


class _TheanoUpdater(_Stepping):
    is_elementwise = False  # a function is compiled for its key

    def __init__(self, functions, variables):
        super().__init__()
        self._functions, self._variables = functions, variables
        used = [each for function in functions.values() for each in function.get_shared()]
        updated = {id(v) for f in functions.values() for v in _host.updated_variables(f)}
        kept = [each for each in dict.fromkeys(used) if id(each) not in updated]
        self._followed = [each for each in kept if is_followed(each)]

    def find_hyper(self):
        """Return the shared variables that the functions read and don't update."""
        return {
            n: Hyperparameter(v, v.set_value)
            for n, v in zip(_names(self._followed), self._followed)
        }

    @property
    def kind(self):
        return f"{_host.title} functions of {_listed(self._functions)}"

    def init_model(self, key, weight):
        super().init_model(key, weight)
        if key not in self._functions:
            raise ValueError(
                f"the updater has no function for key {key!r}, only for {_listed(self._functions)}."
            )
        variable = self._variables[key]
        value = _host.to_host(_host.peek(variable))
        if weight.size != value.size or weight.dtype != value.dtype:
            raise ValueError(
                f"key {key!r} has {weight.size} items of {weight.dtype} here, but {variable} has "
                f"{value.size} of {value.dtype}."
            )
        weight[...] = value.reshape(weight.shape)
        self._steps[key] = _Step(self._functions[key], variable, weight, value.shape)


def _graph_of(rule, hyper, name, weight):
    """Return the gradient of a weight, its shared variable, and the updates of a rule."""
    variable = _host.shared_on_host(weight, name)
    gradient = variable.type("gradient")
    try:
        updates = rule([gradient], [variable], **hyper)
    except TypeError as error:
        raise TypeError(f"{_name_of(rule)} can't be used as a rule: {sentence(error)}") from error
    # Imported here: it imports Theano, which stores without rules don't need.
    from synkhronos._calls.signature import check_pairs

    pairs = check_pairs(f"the updates of {_name_of(rule)}", updates)
    if variable not in dict(pairs):
        raise ValueError(
            f"the updates of {_name_of(rule)} do not have the parameter that it was given."
        )
    return gradient, variable, pairs


def _check_function(key, function, weight):
    if not isinstance(function, _host.CompiledFunction):
        raise TypeError(
            f"functions[{key!r}] must be a compiled {_host.title} function, got {shown(function)}."
        )
    if not isinstance(weight, _host.SharedVariable):
        raise TypeError(f"weights[{key!r}] must be a shared variable, got {shown(weight)}.")
    if not _host.is_array_variable(weight) or _host.lives_on_device(weight):
        raise TypeError(
            f"weights[{key!r}] must hold an array on the host, where the store keeps its weights, "
            f"got {weight} of type {weight.type}."
        )
    if weight not in _host.updated_variables(function):
        raise ValueError(
            f"functions[{key!r}] must update weights[{key!r}], {weight}, but updates "
            f"{[str(each) for each in _host.updated_variables(function)]}."
        )
    given = [each for each in function.maker.inputs if not each.shared]
    if len(given) != 1:
        raise ValueError(
            f"functions[{key!r}] must have one input, the gradient, but has {len(given)}."
        )


def _check_state(key, own, given):
    if set(own) != set(given):
        raise ValueError(
            f"the state of key {key!r} has {_listed(given)}, but this updater keeps {_listed(own)}."
        )
    for name, value in own.items():
        there = np.asarray(given[name])
        if (there.shape, there.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"the state {name!r} of key {key!r} has shape {there.shape} and dtype "
                f"{there.dtype}, but must have {value.shape} and {value.dtype}."
            )


def _name_of(function):
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _listed(keys):
    return ", ".join(repr(key) for key in keys) or "none"
