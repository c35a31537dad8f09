"""Inputs that are more than one value in each call: with a default, kept by ranks, or sparse.

default     In(x, value=1.0)                    the master puts it into the call
kept        In(x, value=1.0, update=x + 1)      a shared variable of each rank, and its update
            In(x, value=s.container)            the shared variable itself
sparse      sparse.csr_matrix("x")              the arrays of its parts are sent
"""

from synkhronos import _host
from synkhronos._calls import collective
from synkhronos._calls.arguments import Inputs
from synkhronos._rank import commands
from synkhronos._wording import count

_MISSING = object()


class OptionalInputs(Inputs):
    """The inputs of a function, not all of which are one array in each call.

    `variables` and all that is numbered are the inputs that a call sends to the ranks: not those
    that they keep.
    """

    def __init__(self, inputs, owner):
        super().__init__([sent for each in inputs for sent in each.sent()], owner)
        self.given = inputs
        self._next = {}  # position -> the value of an input with a default, in the next call

    def bind(self, args, kwargs):
        """Return the arguments of a call, and set on all ranks what they keep."""
        bound = self._bind(args, kwargs, self._keep)
        self._next.clear()
        return bound

    def bind_ahead(self, args, kwargs):
        """Return the arguments of a call that follows, and set on all ranks what they keep."""
        return self._bind(args, kwargs, self._keep)

    def bind_here(self, args, kwargs):
        """Return the arguments of a call in the master alone."""
        bound = self._bind(args, kwargs, _keep_here)
        self._next.clear()
        return bound

    def bind_data(self, args, kwargs):
        """Refuse to make Data of inputs that are kept; else return a value for each input."""
        if len(self.given) != len(self.variables):
            raise TypeError(
                f"build_inputs() makes no Data for {self._owner}, because some of its inputs are "
                "sparse, or kept by the ranks. Make others with synkhronos.data()."
            )
        return self._bind(args, kwargs, _keep_here)

    def _bind(self, args, kwargs, keep):
        values, positions = list(args), self._positions()
        if len(args) > len(self.given):
            raise TypeError(
                f"{self._owner} takes at most {count(len(self.given), 'input')} ({self}), got "
                f"{len(args)}."
            )
        values += [_MISSING] * (len(self.given) - len(args))
        for name, value in kwargs.items():
            if name not in positions:
                raise ValueError(f"{self._owner} has no input {name!r}. It takes: {self}.")
            if values[positions[name]] is not _MISSING:
                raise ValueError(f"{self._owner} got input {name!r} twice: by position and name.")
            values[positions[name]] = value
        bound, kept = [], []
        for position, (given, value) in enumerate(zip(self.given, values)):
            if value is _MISSING:
                if given.is_required:
                    raise TypeError(
                        f"{self._owner} needs a value for {self._name(position)}. It takes: {self}."
                    )
                if given.parts:
                    bound += _host.take_apart(self._next.get(position, given.default))
                elif given.keeper is None:
                    bound.append(self._next.get(position, given.default))
                continue
            if given.is_implicit:
                raise TypeError(
                    f"{self._owner} takes no value for {self._name(position)}: it is implicit."
                )
            if given.parts:
                bound += _host.take_apart(self._cast_given(position, value))
            elif given.keeper is None:
                bound.append(value)
            else:
                kept.append((given.keeper, self._cast_given(position, value)))
        # All are cast before one is kept.
        if kept:
            for position, value in enumerate(bound):
                self.array(position, value)
            for variable, value in kept:
                keep(variable, value)
        return bound

    def get(self, position):
        """Return the value of an input between calls: None for one that has no default."""
        given = self.given[position]
        if given.keeper is not None:
            return given.keeper.get_value()
        return self._next.get(position, given.default)

    def set(self, position, value):
        """Set what ranks keep, on all of them; or the value of an input in the next call."""
        given = self.given[position]
        if given.is_required:
            Inputs([given], self._owner).set(0, value)
        value = self._cast_given(position, value)
        if given.keeper is None:
            self._next[position] = value
            return
        with self._session.call("Function value"):
            self._keep(given.keeper, value)

    def _keep(self, variable, value):
        session = self._session
        [key] = session.registry.keys_of([variable])
        [value] = collective.copy_borrowed(session, [value])
        commands.assign(session.worker, key, value)
        session.run(commands.Broadcast((key,), session.master_rank))
        session.changes.equal([key])

    def _cast_given(self, position, value):
        given = self.given[position]
        alone = Inputs([given], self._owner)
        return alone.cast(0, value) if given.parts else alone.array(0, value)

    def _positions(self):
        return {each.name: i for i, each in enumerate(self.given) if each.name is not None}

    def _name(self, position):
        return f"input {self.given[position].name or position!r}"

    def __str__(self):
        names = [str(each.name or f"input {i}") for i, each in enumerate(self.given)]
        return ", ".join(
            name if each.is_required else f"{name}=..." for name, each in zip(names, self.given)
        )


def _keep_here(variable, value):
    variable.set_value(value)


class Values:
    """The values of a function's inputs and shared variables: what ``f.value`` is.

    Keys are the names, the variables or the positions of inputs, and shared variables.
    """

    def __init__(self, function, inputs, shared):
        self._function, self._inputs, self._shared = function, inputs, shared

    def __getitem__(self, item):
        position, variable = self._find(item)
        return variable.get_value() if position is None else self._inputs.get(position)

    def __setitem__(self, item, value):
        position, variable = self._find(item)
        if position is None:
            raise TypeError(
                f"{variable} is a shared variable of {self._function}: set it on all ranks with "
                "synkhronos.broadcast(variable, value)."
            )
        if self._inputs.given[position].keeper is not None:
            self._function._require_session()
        self._inputs.set(position, value)

    def __contains__(self, item):
        try:
            self._find(item)
        except TypeError:
            return False
        return True

    def _find(self, item):
        """Return the position of an input and None, or None and a shared variable."""
        given = self._inputs.given
        found = [
            position
            for position, each in enumerate(given)
            if item is each.variable
            or (isinstance(item, str) and item == each.name)
            or (isinstance(item, int) and item == position)
        ]
        if len(found) > 1:
            raise TypeError(f"{self._function} has several inputs of the name {item!r}.")
        if found:
            return found[0], None
        keepers = [each.keeper for each in given]
        for variable in self._shared:
            if any(variable is keeper for keeper in keepers):
                continue
            if item is variable or (isinstance(item, str) and item == variable.name):
                return None, variable
        raise TypeError(
            f"{self._function} has no input or shared variable {item!r}. It takes: {self._inputs}."
        )


class Containers:
    """The same values, each behind an object with a `value`: what ``f.container`` is."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, item):
        self._values[item]  # raises for an unknown item
        return Container(self._values, item)

    def __contains__(self, item):
        return item in self._values


class Container:
    """One input of a function: its `value` can be read and set, on all ranks."""

    def __init__(self, values, item):
        self._values, self._item = values, item

    @property
    def value(self):
        """The value of the input, as in ``f.value[...]``."""
        return self._values[self._item]

    @value.setter
    def value(self, value):
        self._values[self._item] = value

    data = value

    def __repr__(self):
        return f"<{self.value!r}>"
