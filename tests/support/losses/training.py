"""What a loss is trained with, and the list of all losses."""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple


@dataclasses.dataclass
class Training:
    """What make_train_step takes, and the minibatches.

    `common` are inputs that each rank gets whole, after the others. `schedule` has, for a shared
    variable, its value before each minibatch. `outputs` are pairs of a variable and a mode;
    `updates` are those of running averages. `state` lists what default updates change. `mode` is
    that of Theano for operations that have no Python code.
    """

    inputs: List[Any]
    loss: Any
    params: List[Any]
    batches: Sequence[Tuple]
    common: List[Any] = dataclasses.field(default_factory=list)
    outputs: List[Tuple] = dataclasses.field(default_factory=list)
    updates: List[Tuple] = dataclasses.field(default_factory=list)
    schedule: Dict[Any, Sequence[float]] = dataclasses.field(default_factory=dict)
    state: List[Any] = dataclasses.field(default_factory=list)
    serial_random: bool = False
    rate: float = 0.1
    mode: Optional[str] = None


@dataclasses.dataclass
class KerasTraining:
    """A function that makes a compiled model, and minibatches (x, y) or (x, y, weights)."""

    build: Callable
    batches: Sequence[Tuple]
    schedule: Dict[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    serial_random: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss: what makes its training, whether it is a mean over rows, and where it was reported.

    `keras` is None for what is no loss or metric of Keras.
    """

    name: str
    is_mean: bool
    make: Callable[[], Training]
    source: str
    keras: Optional[Callable[[], KerasTraining]] = None

    def __str__(self):
        return self.name


LOSSES: List[Loss] = []


def _listed(is_mean):
    def listed(source="", keras=None):
        def add(make):
            LOSSES.append(Loss(make.__name__, is_mean, make, source, keras))
            return make

        return add

    return listed


a_mean, no_mean = _listed(True), _listed(False)
