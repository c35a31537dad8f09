"""Re-export :mod:`synkhronos.extensions.update_rules` under the name that it had before."""

from synkhronos.extensions.update_rules import (
    adadelta,
    adagrad,
    adam,
    adamax,
    apply_momentum,
    apply_nesterov_momentum,
    momentum,
    nesterov_momentum,
    rmsprop,
    sgd,
)

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "apply_momentum",
    "apply_nesterov_momentum",
    "momentum",
    "nesterov_momentum",
    "rmsprop",
    "sgd",
]
