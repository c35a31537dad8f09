"""Type hints of update rules."""

from typing import Callable, List, OrderedDict, Protocol, Sequence, Tuple, Union

from synkhronos._hints import SharedVariable, Variable


class Optimizer(Protocol):
    """An object that makes updates from a loss, such as an optimizer of Keras."""

    def get_updates(self, loss, params):
        """Return pairs (shared variable, expression)."""


Scalar = Union[float, Variable]
LossOrGrads = Union[Variable, Sequence[Variable]]
Updates = OrderedDict[SharedVariable, Variable]
UpdatePairs = List[Tuple[SharedVariable, Variable]]
UpdatesLike = Union[Updates, Sequence[Tuple[SharedVariable, Variable]]]

# grads, params, hyperparameters ──▶ updates
Rule = Union[Callable[..., UpdatesLike], Optimizer]
# grad_updates, param_updates, grad_shared
TwoSteps = Tuple[UpdatePairs, UpdatePairs, SharedVariable]
TwoStepRule = Callable[..., TwoSteps]
