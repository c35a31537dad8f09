"""CIFAR-10, from its pickles for Python."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np

from synkhronos.rules.compatible.models.data import sources, utils
from synkhronos.rules.compatible.models.data.images import ImagesInMemory

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
FOLDER = "cifar-10-batches-py"
FILES = [f"data_batch_{number}" for number in range(1, 6)]


class Cifar10_data(ImagesInMemory):
    """Colour images of 32 x 32 pixels, of bytes, in 10 classes.

    A fifth of the rows of the five training files is for validation: the same rows on all ranks, in
    all runs. Files are read from ``$SYNKHRONOS_DATA/cifar-10-batches-py``.

    See `Batches` for the attributes. The mean image is of shape (3, 32, 32, 1).

    Examples
    --------
    >>> import os
    >>> os.environ.update(SYNKHRONOS_DATA="made", SYNKHRONOS_MADE_BATCHES="5")
    >>> data = Cifar10_data()
    >>> data.batch_data(8)
    >>> data.shuffle_data("train", common_seed=0)
    >>> data.shard_data("train", rank=1, size=2)
    >>> data.n_batch_train, data.train_img_shard[0].shape
    (2, (8, 3, 32, 32))
    >>> del os.environ["SYNKHRONOS_DATA"], os.environ["SYNKHRONOS_MADE_BATCHES"]
    """

    channels, height, width, n_class = 3, 32, 32, 10
    are_bytes = True

    def read_files(self):
        """Return the rows of the five files, divided once and for all."""
        folder = sources.find([FOLDER], "CIFAR-10 (python version)", PAGE)
        images, labels = [], []
        for name in FILES:
            found = read_batch(sources.find([f"{FOLDER}/{name}"], f"{name} of {folder}", PAGE))
            images.append(found[0])
            labels.append(found[1])
        images, labels = np.concatenate(images), np.concatenate(labels)
        train, val = sources.split(len(images), len(images) // 5)
        return images[train], labels[train], images[val], labels[val]


def read_batch(file):
    """Return images of bytes, of shape (rows, 3, 32, 32), and labels, of one of its pickles."""
    try:
        content = utils.unpickle(file)
        images = np.asarray(content["data"], "uint8").reshape(-1, 3, 32, 32)
        labels = np.asarray(content["labels"], "int64")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{file} is no file of CIFAR-10's python version ({error}). Get it from {PAGE} again."
        ) from error
    if len(images) != len(labels):
        raise ValueError(f"{file} has {len(images)} images, but {len(labels)} labels.")
    return images, labels


def iterate_minibatches(
    inputs: Any, targets: Any, shuffle: bool = False, forever: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of the items of two lists, such as lists of batches.

    With `shuffle` in an order drawn from NumPy's global random state, with `forever` again and
    again.

    >>> list(iterate_minibatches("ab", [1, 2]))
    [('a', 1), ('b', 2)]
    """
    if len(inputs) != len(targets):
        raise ValueError(f"inputs and targets must be as many, got {len(inputs)}, {len(targets)}.")
    while True:
        order = np.random.permutation(len(inputs)) if shuffle else range(len(inputs))
        for number in order:
            yield inputs[number], targets[number]
        if not forever:
            return
