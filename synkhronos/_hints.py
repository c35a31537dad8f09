"""Short names for the type hints of public functions; docstrings say the rest.

A ``Sequence`` of an argument is a list or tuple, a ``float`` any real number.
"""

from typing import Callable, List, OrderedDict, Protocol, Sequence, Tuple, Union

import numpy as np

from synkhronos._host import RandomState, SharedVariable, Variable

__all__ = ["RandomState", "SharedVariable", "Variable"]


class SupportsArray(Protocol):
    """What NumPy makes an array of: its own arrays and numbers, Data."""

    def __array__(self, dtype=None) -> np.ndarray: ...


class Optimizer(Protocol):
    """What makes its updates of a loss, as the optimizers of Keras do."""

    def get_updates(self, loss, params):
        """Return pairs (shared variable, expression)."""


ArrayLike = Union[SupportsArray, Sequence, complex]
Values = Union[ArrayLike, RandomState]
Rows = Union[int, slice, Sequence[int], np.ndarray]  # which of them

SharedVariables = Union[SharedVariable, Sequence[SharedVariable]]
Scalar = Union[float, Variable]
LossOrGrads = Union[Variable, Sequence[Variable]]

# Outputs of functions, reduced as the string says, and updates.
Output = Union[Variable, Tuple[Variable, Union[str, None]]]
Update = Union[Tuple[SharedVariable, Variable], Tuple[SharedVariable, Variable, Union[str, None]]]
Updates = OrderedDict[SharedVariable, Variable]
UpdatePairs = List[Tuple[SharedVariable, Variable]]
UpdatesLike = Union[Updates, Sequence[Tuple[SharedVariable, Variable]]]

# grads, params, hyperparameters ──▶ updates
Rule = Union[Callable[..., UpdatesLike], Optimizer]
# grad_updates, param_updates, grad_shared
TwoSteps = Tuple[UpdatePairs, UpdatePairs, SharedVariable]
TwoStepRule = Callable[..., TwoSteps]
