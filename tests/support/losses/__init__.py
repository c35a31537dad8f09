"""Losses of public reports and papers, of which two thirds are no mean over the rows.

    LOSSES ──▶ Loss.make() ──▶ Training: inputs, loss, parameters, minibatches
           ──▶ Loss.keras() ──▶ KerasTraining, for those that are losses or metrics of Keras

The first minibatch is one with which the average of the ranks' losses is right, where that can be
arranged: its two rows are repeated, its masks are full, its classes are equally many on each rank,
or a weight is 0. So a comparison of the first call alone finds nothing. Later minibatches have
other masks, counts, weights and numbers of rows. Numbers are of float64.

A minibatch has 12 rows or 9, which 2 and 3 ranks divide into parts of 6 and 4, or of 4, 5 and 3.
"""

from support.losses import (  # noqa: F401, they add to the list
    means,
    pairs,
    policies,
    ratios,
    statistics,
    sums,
    weighted,
)
from support.losses.training import LOSSES, KerasTraining, Loss, Training

__all__ = ["LOSSES", "KerasTraining", "Loss", "Training"]
