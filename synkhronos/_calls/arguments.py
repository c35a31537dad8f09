"""From the arguments of a call to arrays in shared memory: bound, checked, cast, staged."""

import numpy as np

from synkhronos import _host
from synkhronos._calls import signature
from synkhronos._machine.interrupts import raised_here
from synkhronos._master.staging import StagedInput
from synkhronos._wording import count, sentence
from synkhronos.inputs import Data


class Inputs:
    """The inputs of one function, and the shared memory that plain arrays are copied into.

    The memory belongs to the function and is used again by its next call. It goes with `release`,
    or with the function.
    """

    def __init__(self, inputs, owner):
        self._owner = owner  # the function's name, for error messages
        self.given = self.sent = inputs  # lists of `Input`: of the user, and of those for ranks
        self.variables = tuple(each.variable for each in inputs)
        self._names = tuple(each.name for each in inputs)
        self.is_scattered = tuple(each.is_scattered for each in inputs)
        self.axes = tuple(each.axis for each in inputs)
        self._casts = tuple(each.caster() for each in inputs)
        self._dtypes = tuple(np.dtype(variable.dtype) for variable in self.variables)
        self._ndims = tuple(variable.ndim for variable in self.variables)
        self._has_fixed = tuple(
            any(length is not None for length in _host.lengths(variable))
            for variable in self.variables
        )

    def join(self, session):
        """Use the shared memory of a session from now on."""
        self._session = session
        self._staged = {}  # position of an input -> its StagedInput

    def bind(self, args, kwargs):
        """Return the arguments of a call: one value for each input, in the order of the inputs."""
        given = len(args) + len(kwargs)
        if given != len(self.variables):
            raise TypeError(
                f"{self._owner} takes {count(len(self.variables), 'input')} ({self}), got {given}."
            )
        if not kwargs:
            return args
        values = list(args) + [None] * len(kwargs)
        positions = {name: i for i, name in enumerate(self._names) if name is not None}
        for name, value in kwargs.items():
            if name not in positions:
                raise ValueError(f"{self._owner} has no input {name!r}. It takes: {self}.")
            if positions[name] < len(args):
                raise ValueError(f"{self._owner} got input {name!r} twice: by position and name.")
            values[positions[name]] = value
        return values

    def bind_ahead(self, args, kwargs):
        """Return the arguments of a call that follows."""
        return self.bind(args, kwargs)

    def bind_here(self, args, kwargs):
        """Return the arguments of a call in the master alone."""
        return self.bind(args, kwargs)

    def bind_data(self, args, kwargs):
        """Return one value for each input, of which Data are made."""
        return self.bind(args, kwargs)

    def get(self, position):
        """Return the value of an input between calls: None."""

    def set(self, position, value):
        """Refuse to set an input without a value of its own."""
        raise TypeError(
            f"{self.label(position)} has no value of its own: give it in the call, or make the "
            "function with In(variable, value=...)."
        )

    def locate(self, position, value):
        """Check the value of one input, copy a plain one to shared memory, return its reference.

        The reference to a plain array is valid until the next call: it overwrites the copy.
        """
        if type(value) is Data:
            contents = value._hold(self._session)
            self._check_data(position, value, contents.array)
            return contents.ref
        value = self.cast(position, value)
        staged = self._staged.get(position)
        if staged is None:
            staged = self._staged[position] = StagedInput(
                self._session, self._dtypes[position], value.ndim
            )
        return staged.put(value)

    def array(self, position, value):
        """Return the value of one input, checked and cast, for a call in the master alone."""
        if type(value) is not Data:
            return self.cast(position, value)
        array = value.data
        self._check_data(position, value, array)
        return array

    def cast(self, position, value):
        """Return a value as an array, cast as ``theano.function`` casts its inputs."""
        try:
            return self._casts[position](value)
        except raised_here(Exception) as error:
            variable = self.variables[position]
            if value is None:
                raise TypeError(
                    f"{self.label(position)} takes {variable.type}, got None."
                ) from None
            if isinstance(value, _host.Variable):
                raise TypeError(
                    f"{self.label(position)} takes {variable.type}, got the variable {value} in "
                    "place of a value."
                ) from None
            # Theano's checks raise errors of many kinds for values that are no arrays.
            raise TypeError(
                f"{self.label(position)} takes {variable.type}, got "
                f"{signature.describe_value(value)}: {sentence(error)}"
            ) from error

    def _check_data(self, position, value, array):
        if array.dtype != self._dtypes[position] or array.ndim != self._ndims[position]:
            raise TypeError(
                f"{self.label(position)} takes {self.variables[position].type}, got {value}. A "
                "Data is never cast: make it with data(value, var=variable)."
            )
        if self._has_fixed[position]:
            self._check_broadcastable(position, array.shape)

    def _check_broadcastable(self, position, shape):
        pattern = _host.fixed_axes(self.variables[position])
        if any(fixed and length != 1 for fixed, length in zip(pattern, shape)):
            raise TypeError(
                f"{self.label(position)} is broadcastable ({pattern}): it must have length 1 "
                f"there, got shape {shape}."
            )
        lengths = _host.lengths(self.variables[position])
        if any(fixed not in (None, length) for fixed, length in zip(lengths, shape)):
            raise TypeError(
                f"{self.label(position)} has the shape {lengths} by its type, got shape {shape}."
            )

    def release(self):
        """Give the shared memory of plain arrays back."""
        self._staged.clear()

    def name_of(self, position):
        """Return the name of an input, or its number."""
        return str(self._names[position] or f"input {position}")

    def label(self, position):
        """Return the first words of an error message about one input: its name and its function."""
        return f"Input {self._names[position] or position!r} of {self._owner}"

    def __str__(self):
        return ", ".join(map(self.name_of, range(len(self.variables))))
