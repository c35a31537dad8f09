"""Type hints of public functions, whose docstrings say more.

In arguments ``Sequence`` stands for a list or tuple, and ``float`` for any real number.
"""

from typing import Protocol, Sequence, Tuple, Union

import numpy as np

from synkhronos._host import In, Out, RandomState, SharedVariable, Variable

__all__ = ["RandomState", "SharedVariable", "Variable"]


class SupportsArray(Protocol):
    """An object that NumPy can convert to an array: an array, a NumPy number, a Data."""

    def __array__(self, dtype=None) -> np.ndarray: ...


ArrayLike = Union[SupportsArray, Sequence, complex]
Values = Union[ArrayLike, RandomState]
Rows = Union[int, slice, Sequence[int], np.ndarray]  # a selection of rows

SharedVariables = Union[SharedVariable, Sequence[SharedVariable]]

# The string in an output or update is its reduce mode.
Output = Union[Variable, Out, Tuple[Union[Variable, Out], Union[str, None]]]
Input = Union[Variable, In, Sequence]  # Theano takes tuples such as (variable, value)
Update = Union[Tuple[SharedVariable, Variable], Tuple[SharedVariable, Variable, Union[str, None]]]
