"""``theanompi.models.data.utils``: what data classes of Theano-MPI have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from synkhronos.rules import plain_pickles
from synkhronos.rules.preprocessing import crop_and_mirror

__all__ = [
    "crop_and_mirror",
    "extend_data",
    "get_bad_list",
    "get_params_crop_and_mirror",
    "get_rand3d",
    "unpickle",
]


def unpickle(path: Any) -> dict[str, Any]:
    """Return the dict of one of CIFAR's files: ``data``, ``labels`` and others.

    Parameters
    ----------
    path : str
        That of a pickle with containers, text, numbers and arrays. Nothing else is read.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no such pickle.
    """
    path = Path(os.fspath(path))
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}.")
    found = plain_pickles.load(path.read_bytes(), str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a dict, but holds a {type(found).__name__}.")
    return {key.decode() if isinstance(key, bytes) else key: each for key, each in found.items()}


def extend_data(
    rank: int, size: int, img_batches: Sequence[Any], label_batches: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return batches of images and labels, the last ones repeated up to a multiple of `size`.

    A shard of every rank has equally many batches then, at the price of rows that count twice.

    >>> extend_data(0, 2, ["a", "b", "c"], [1, 2, 3])
    (['a', 'b', 'c', 'c'], [1, 2, 3, 3])
    """
    imgs, labels = img_batches, label_batches[: len(img_batches)]
    if len(imgs) != len(labels) or not len(imgs):
        raise ValueError(
            f"images and labels must have equally many batches, at least one, got {len(imgs)} and "
            f"{len(labels)}."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}.")
    missing = -len(imgs) % size
    more = [len(imgs) - 1 - i % len(imgs) for i in reversed(range(missing))]
    return [*imgs, *(imgs[i] for i in more)], [*labels, *(labels[i] for i in more)]


def get_bad_list(n_batches: int, commsize: int) -> list[int]:
    """Return the numbers of the last batches, which are too few for all ranks.

    >>> get_bad_list(8, 3)
    [7, 6]
    """
    return [n_batches - 1 - number for number in range(n_batches % commsize)]


def get_rand3d(rand_crop: bool, mode: str) -> np.ndarray:
    """Return where to crop, from 0 to 1 of the room in rows and columns, and whether to mirror.

    In validation, and without `rand_crop`, it is the center.
    """
    if not rand_crop or mode == "val":
        return np.float32([0.5, 0.5, 0])
    return np.float32([np.random.rand(), np.random.rand(), np.random.randint(2)])


def get_params_crop_and_mirror(
    param_rand: Any, data_shape: Sequence[int], cropsize: int
) -> tuple[int, int, bool]:
    """Return the first row and column, and whether to mirror, for what `get_rand3d` has returned.

    >>> get_params_crop_and_mirror([0.5, 1, 0], (3, 8, 8, 4), 6)
    (1, 2, False)
    """
    room = data_shape[2] - cropsize
    return round(param_rand[0] * room), round(param_rand[1] * room), bool(round(param_rand[2]))
