"""``theanompi.models.data.utils``: what data classes of Theano-MPI have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

from synkhronos.rules import plain_pickles
from synkhronos.rules.preprocessing import crop_and_mirror

__all__ = ["crop_and_mirror", "extend_data", "unpickle"]


def unpickle(file: Any) -> dict[str, Any]:
    """Return the dict of one of CIFAR's files: ``data``, ``labels`` and others.

    Parameters
    ----------
    file : str
        The path of a pickle with containers, text, numbers and arrays. Nothing else is read.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no such pickle.
    """
    path = Path(os.fspath(file))
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}.")
    found = plain_pickles.load(path.read_bytes(), str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a dict, but holds a {type(found).__name__}.")
    return {key.decode() if isinstance(key, bytes) else key: each for key, each in found.items()}


def extend_data(
    rank: int, size: int, imgs: Sequence[Any], labels: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return batches of images and labels, the last ones repeated up to a multiple of `size`.

    A shard of every rank has equally many batches then, at the price of rows that count twice.

    >>> extend_data(0, 2, ["a", "b", "c"], [1, 2, 3])
    (['a', 'b', 'c', 'c'], [1, 2, 3, 3])
    """
    if len(imgs) != len(labels) or not len(imgs):
        raise ValueError(
            f"imgs and labels must have equally many batches, at least one, got {len(imgs)} and "
            f"{len(labels)}."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}.")
    missing = -len(imgs) % size
    more = [len(imgs) - 1 - i % len(imgs) for i in reversed(range(missing))]
    return [*imgs, *(imgs[i] for i in more)], [*labels, *(labels[i] for i in more)]
