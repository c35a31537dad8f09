"""Check the inputs that are given to `function`.

variable, In, tuple ──▶ read ──▶ required, with a default value, or kept on each rank
"""

import inspect
from typing import Any, NamedTuple, Optional

from synkhronos import _host
from synkhronos._host.choice import advice
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import nearest, sentence, shown
from synkhronos.inputs import Data


class Input(NamedTuple):
    """An input of a function: its variable, and the values that calls may give."""

    variable: Any
    name: Optional[str]
    is_scattered: bool
    axis: int = 0  # of its rows
    default: Any = None  # the value without one in the call, or the storage's first; or None
    is_implicit: bool = False  # whether calls may not give a value
    strict: bool = False
    allow_downcast: Optional[bool] = None
    storage: Any = None  # the shared variable in which each rank keeps the value, or None
    update: Any = None  # the expression of the storage's next value, or None
    parts: tuple = ()  # of a sparse input: variables of the arrays that are sent
    whole: Any = None  # of a sparse input: the sparse expression of these parts

    @property
    def is_required(self):
        """Whether each call must give a value."""
        return self.default is None and self.storage is None

    @property
    def is_plain(self):
        """Whether each call gives one array for it."""
        return self.is_required and not self.is_implicit and not self.parts

    def sent(self):
        """Return the inputs that calls send to the ranks for this one: none if ranks keep it."""
        if self.storage is not None:
            return []
        if not self.parts:
            return [self]
        return [Input(part, self.name, self.is_scattered and part.ndim == 2) for part in self.parts]

    def caster(self):
        """Return a function that casts a value as ``theano.function`` does for this input."""
        return _host.caster(self.variable, self.strict, self.allow_downcast)


def check_inputs(argument, given, allow_downcast, scattered):
    """Return a list of `Input`; raise TypeError for anything that ``theano.function`` refuses."""
    if given is None and not scattered:
        return []
    if not isinstance(given, (list, tuple)):
        hint = ""
        if not scattered and isinstance(given, (str, _host.Mode)):
            hint = " A mode of compilation is given as mode=, after the other arguments."
        raise TypeError(
            f"{argument} must be a list of {_host.title} variables, got {given!r}.{hint}"
        )
    places = [f"{argument}[{position}]" for position in range(len(given))]
    return [_read(*each, allow_downcast, scattered) for each in zip(places, given)]


def for_copy(inputs, without_updates):
    """Return inputs for a copy of a function; inputs that ranks keep begin with their default."""
    copies = []
    for each in inputs:
        storage, update = each.storage, None if without_updates else each.update
        if storage is not None and each.default is not None:
            storage = _host.storage(each.variable, each.default)
        copies.append(each._replace(storage=storage, update=update))
    return copies


def check_tuples(lists, updates, givens, profile):
    """Raise TypeError for tuples among inputs where ``theano.function`` refuses them."""
    for given in lists:
        for each in given or ():
            if isinstance(each, (list, tuple)) and (updates or givens or profile):
                raise TypeError(
                    f"The input {shown(each)} is a tuple, beside which theano.function takes no "
                    "updates, givens or profile. Write it as In(variable, value=...)."
                )


def check_keywords(keywords, function):
    """Raise TypeError for a keyword that neither `function` nor the host's function takes."""
    of_host = inspect.signature(_host.library.function).parameters
    if any(each.kind == each.VAR_KEYWORD for each in of_host.values()):
        return  # a script has put a function of its own there, which takes any
    known = [*inspect.signature(function).parameters, *of_host]
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"function() got an unexpected keyword argument {name!r}.{nearest(name, known)}"
            )


def check_kept(inputs, givens):
    """Raise ValueError for givens that replace a kept input; Theano refuses all other ones."""
    replaced = dict(givens)
    for each in inputs:
        if each.storage is not None and each.variable in replaced:
            raise ValueError(f"givens replaces {each.variable}, which is an input of the function.")


def refuse_destroyed(compiled, inputs):
    """Raise ValueError if a function writes into the memory of its inputs, which ranks share."""
    for position in _host.destroyed_inputs(compiled):
        raise ValueError(
            f"The function has an operation that works in place on its input {inputs[position]}. "
            "Ranks share the memory of inputs: use the operation that makes a new array."
        )


def _read(place, given, allow_downcast, scattered):
    read = _host.read_input(given)
    if read is None and isinstance(given, (list, tuple)):
        forms, hint = f"variable, an In, or a tuple {_host.tuple_forms}", ""
        if not _host.tuple_forms:
            forms = "variable or an In"
            hint = (
                f" {_host.title} takes no tuples: give the value in each call, or write "
                "In(variable, value=shared)."
            )
        raise TypeError(f"{place} must be a {_host.title} {forms}, got {shown(given)}.{hint}")
    variable, options = read or (given, {})
    is_variable = isinstance(variable, _host.Variable)
    is_sparse = is_variable and _host.sparse_format(variable)
    if not is_variable or not (is_sparse or _host.is_array_variable(variable)):
        raise TypeError(
            f"{place} must be a {_host.title} tensor variable, got {variable!r}."
            f"{advice(variable, _host.title)}"
        )
    if isinstance(variable, (_host.Constant, _host.SharedVariable)):
        kind = "constant" if isinstance(variable, _host.Constant) else "shared variable"
        raise TypeError(f"{place} is the {kind} {variable}: it has a value without being an input.")
    parts, whole = (), None
    if is_sparse:
        _check_sparse(place, variable, options, scattered)
        parts, whole = _host.sparse_parts(variable)
    checked = Input(
        variable,
        options.get("name", variable.name),
        scattered and variable.ndim > 0,  # every rank gets a scalar whole
        is_implicit=options.get("implicit", False),
        strict=options.get("strict", False),
        allow_downcast=options.get("allow_downcast", allow_downcast),
        parts=tuple(parts),
        whole=whole,
    )
    value, update = options.get("value"), options.get("update")
    if value is None:  # `update` would have no effect: each call gives a new value
        return checked
    if update is None and isinstance(value, Data) and not parts:
        return checked._replace(default=value)
    default = storage = None
    try:
        if _host.is_kept(value):
            storage = _host.storage(variable, value)
        elif isinstance(value, _host.Variable):
            raise TypeError("a variable has no value")
        else:
            default = checked.caster()(value)
            storage = None if update is None else _host.storage(variable, default)
    except raised_here(Exception) as error:
        # Theano's checks raise errors of many kinds for values that are no arrays.
        raise TypeError(
            f"{place} of type {variable.type} can't have the value {shown(value)}: "
            f"{sentence(error)}"
        ) from error
    return checked._replace(default=default, storage=storage, update=update)


def _check_sparse(place, variable, options, scattered):
    form = _host.sparse_format(variable)
    if form not in (("csr",) if scattered else ("csr", "csc")):
        raise TypeError(
            f"{place} is a sparse matrix in the format {form}, whose rows can't be scattered: give "
            "it in the format csr, or csr or csc in bcast_inputs."
        )
    if options.get("update") is not None or _host.is_kept(options.get("value")):
        raise TypeError(
            f"{place} is a sparse matrix: ranks can't keep its value. Use a shared variable."
        )
