"""Minibatches: rows, targets, labels and masks."""

import numpy as np

SIZES = 12, 12, 9
# Each rank has both classes, but not equally many.
MIXED = {12: [1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0], 9: [1, 1, 0, 0, 0, 1, 0, 1, 0]}


def rows(sizes=SIZES, width=4, repeats=False, seed=1):
    """Return an array for each size; the first one repeats two rows, if asked to."""
    rng = np.random.RandomState(seed)
    made = [rng.normal(size=(n, width)) for n in sizes]
    if repeats:
        made[0] = np.tile(made[0][:2], (sizes[0] // 2, 1))
    return made


def columns(sizes=SIZES, repeats=False, seed=2):
    """Return targets between 0 and 1, of one column."""
    return [1 / (1 + np.exp(-each)) for each in rows(sizes, 1, repeats, seed)]


def labels(sizes=SIZES, kind=np.int64):
    """Return labels 0 and 1: at first in turns, later mixed unevenly."""
    return [
        np.array(MIXED[n] if number else np.arange(n) % 2).astype(kind)
        for number, n in enumerate(sizes)
    ]


def masks(sizes=(12, 12, 12), length=5):
    """Return masks over time, rows first: full in all minibatches but the last."""
    lengths = np.array([5, 5, 4, 5, 3, 2, 1, 1, 2, 1, 1, 1])
    made = [np.ones((n, length)) for n in sizes]
    made[-1] = (np.arange(length) < lengths[: sizes[-1], None]).astype(float)
    return made


def zipped(*arrays):
    """Return minibatches of these lists of arrays."""
    return list(zip(*arrays))


def two_class_columns():
    """Return labels as columns of floats."""
    return [each[:, None] for each in labels(kind=float)]
