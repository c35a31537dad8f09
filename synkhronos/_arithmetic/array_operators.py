"""Python's operators for an object that holds an array, as NumPy defines them for the array.

    d + 1, d == 1, -d, d @ x    return arrays
    d += 1                      changes the array that d holds

Reflected operators are for lists and numbers on the left: ``2 * d``. An array on the left converts
the object itself, and a variable of a graph makes an expression.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from synkhronos._wording import shown

_BOTH_SIDES = "add sub mul truediv floordiv mod divmod pow lshift rshift and_ or_ xor matmul"
_COMPARISONS = "eq ne lt le gt ge"
_ONE_OPERAND = "neg pos abs invert"

if TYPE_CHECKING:
    from numpy.lib.mixins import NDArrayOperatorsMixin

    class Operators(NDArrayOperatorsMixin):
        """The operators, for type checkers and editors."""

        def __array_ufunc__(self, *args, **kwargs): ...

else:

    class Operators:
        """The operators; `data` is the array, as a property of the derived class."""

        # By identity, so that objects can be in sets and dicts although `==` compares arrays.
        __hash__ = object.__hash__

        def __bool__(self):
            # As for lists: scripts ask `if d:`, which NumPy refuses for arrays of several items.
            return len(self.data) > 0 if self.data.ndim else bool(self.data)


def plain(value):
    """Replace objects with `Operators` by their arrays, also in a tuple; return other values."""
    if isinstance(value, Operators):
        return value.data
    return tuple(map(plain, value)) if type(value) is tuple else value


def _on_the_left(function):
    return lambda self, other: function(self.data, plain(other))


def _on_the_right(function):
    return lambda self, other: function(plain(other), self.data)


def _in_place(function):
    def change(self, other):
        array = self.data
        if function(array, plain(other)) is not array:  # it is an expression of a graph
            raise TypeError(f"{self} can't be changed in place by {shown(other)}.")
        return self

    return change


def _alone(function):
    return lambda self: function(self.data)


def _add_operators():
    for name in _BOTH_SIDES.split():
        function = divmod if name == "divmod" else getattr(operator, name)
        name = name.rstrip("_")
        setattr(Operators, f"__{name}__", _on_the_left(function))
        setattr(Operators, f"__r{name}__", _on_the_right(function))
        if name != "divmod":
            in_place = getattr(operator, f"__i{name}__")
            setattr(Operators, f"__i{name}__", _in_place(in_place))
    for name in _COMPARISONS.split():
        setattr(Operators, f"__{name}__", _on_the_left(getattr(operator, name)))
    for name in _ONE_OPERAND.split():
        setattr(Operators, f"__{name}__", _alone(getattr(operator, name)))
    for convert in (int, float, complex, operator.index):
        setattr(Operators, f"__{convert.__name__}__", _alone(convert))


_add_operators()
