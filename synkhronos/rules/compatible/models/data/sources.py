"""Finds data sets in ``$SYNKHRONOS_DATA``, and makes up data of the same shapes and kinds.

$SYNKHRONOS_DATA    data
a folder, ~/data    the published files
made                made up: a pattern for each class, with noise
digits              scikit-learn's digits, in the shape of the data set

`source` says which of these is chosen.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from synkhronos._host import pythons

MADE, DIGITS = "made", "digits"
SPLIT_SEED = 23455  # of validation rows and made-up data, which are the same in all runs


def source() -> str:
    """Return ``"made"``, ``"digits"`` or ``"files"``."""
    name = os.environ.get("SYNKHRONOS_DATA", "")
    return name if name in (MADE, DIGITS) else "files"


def folder() -> Path:
    """Return the folder of the data sets."""
    return Path(os.environ.get("SYNKHRONOS_DATA") or "~/data").expanduser()


def find(names: list[str], data_set: str, official_page: str) -> Path:
    """Return the first of these that is in the folder; else tell where to get the data set.

    Raises
    ------
    FileNotFoundError
        With the folder, the names, and the page of the data set.
    """
    for name in names:
        if (folder() / name).exists():
            return folder() / name
    raise FileNotFoundError(
        f"{data_set} is not in {folder()}: expected {' or '.join(names)}. Get it from "
        f"{official_page} and unpack it there, or name another folder in SYNKHRONOS_DATA. "
        "SYNKHRONOS_DATA=made makes up data of the same shapes."
    )


def made_batches() -> tuple[int, int]:
    """Return how many made-up batches are for training and for validation, on all ranks together.

    ``$SYNKHRONOS_MADE_BATCHES`` says it, by default 8; a quarter as many are for validation.
    """
    text = os.environ.get("SYNKHRONOS_MADE_BATCHES") or "8"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"SYNKHRONOS_MADE_BATCHES must be a whole number of at least 1, got {text!r}."
        )
    return int(text), max(1, int(text) // 4)


def made_images(rows: int, shape: tuple[int, ...], n_class: int, seed: int):
    """Return images of float32 from 0 to 1, and labels: a pattern of each class, with noise.

    >>> images, labels = made_images(5, (3, 8, 8), n_class=2, seed=0)
    >>> images.shape, labels.shape
    ((5, 3, 8, 8), (5,))
    """
    channels, height, width = shape
    # All seeds have the same patterns, so that one part of the data can be learned from another.
    blocks = np.random.RandomState(SPLIT_SEED).uniform(size=(min(n_class, 1000), channels, 4, 4))
    random = np.random.RandomState(seed)
    labels = random.randint(min(n_class, 1000), size=rows)
    cells = np.ones((-(-height // 4), -(-width // 4)), "float32")
    images = np.kron(blocks[labels].astype("float32"), cells)[:, :, :height, :width]
    images += random.normal(scale=0.2, size=images.shape).astype("float32")
    return np.clip(images, 0, 1, out=images), labels.astype("int64")


def digits(shape: tuple[int, ...]):
    """Return the images of scikit-learn's digits, scaled to a shape, from 0 to 1; and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        needed = f"SYNKHRONOS_DATA=digits needs scikit-learn: {pythons.install('rules')}"
        raise ImportError(needed) from error
    images, labels = load_digits(return_X_y=True)
    channels, height, width = shape
    pixels = (images / 16).astype("float32").reshape(-1, 8, 8)
    times = min(height, width) // 8
    pixels = np.kron(pixels, np.ones((times, times), "float32"))
    margins = [(0, 0)] + [((n - 8 * times) // 2, -(-(n - 8 * times) // 2)) for n in (height, width)]
    pixels = np.pad(pixels, margins, mode="constant")[:, None]
    return np.repeat(pixels, channels, axis=1), labels.astype("int64")


def split(rows: int, n_val: int):
    """Return row numbers for training and for validation: the same on all ranks, in all runs."""
    order = np.random.RandomState(SPLIT_SEED).permutation(rows)
    return np.sort(order[n_val:]), np.sort(order[:n_val])
