"""Data sets of images in memory: read from files, made up, or made of scikit-learn's digits."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.batches import Batches


class ImagesInMemory(Batches):
    """Images of float32 from 0 to 1, of shape (rows, channels, height, width).

    A subclass says shape and classes, and reads the files.
    """

    channels, height, width, n_class = 1, 1, 1, 2
    made_rows = 32  # of a batch, before the batch size is known

    def get_data(self) -> None:
        """Read, or make up, training and validation rows, and their mean image."""
        shape = (self.channels, self.height, self.width)
        chosen = sources.source()
        if chosen == sources.MADE:
            self._make_up(self.made_rows)
        elif chosen == sources.DIGITS:
            images, labels = sources.digits(shape)
            train, val = sources.split(len(images), len(images) // 5)
            self._take(images[train], labels[train], images[val], labels[val])
        else:
            self._take(*self.read_files())

    def read_files(self) -> tuple[Any, Any, Any, Any]:
        """Return training images and labels, and validation images and labels."""
        raise NotImplementedError

    def make_batches(self, file_batch_size: int) -> None:
        """Set the lists of batches; make up as many rows as they need."""
        if sources.source() == sources.MADE:
            self._make_up(file_batch_size)
        super().make_batches(file_batch_size)

    def _make_up(self, batch: int) -> None:
        shape = (self.channels, self.height, self.width)
        parts: list[Any] = []
        for seed, batches in enumerate(sources.made_batches()):
            parts += sources.made_images(batches * batch, shape, self.n_class, seed)
        self._take(*parts)

    def _take(self, train_img, train_labels, val_img, val_labels) -> None:
        mean = train_img.mean(axis=0, dtype="float64").astype("float32")
        self.rawdata = [train_img, train_labels, val_img, val_labels, mean]


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Return bytes as numbers from 0 to 1."""
    result = pixels.astype("float32")
    result /= 255
    return result
