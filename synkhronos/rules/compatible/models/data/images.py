"""Data sets of images in memory: read from files, made up, or made of scikit-learn's digits."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np

from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.batches import Batches


class ImagesInMemory(Batches):
    """Images of shape (rows, channels, height, width): bytes, or float32 from 0 to 1.

    A subclass says shape and classes, and reads the files. A model may put other rows into
    `rawdata` before it calls `batch_data`.
    """

    channels, height, width, n_class = 1, 1, 1, 2
    are_bytes = False
    made_rows = 256  # of a batch, before the batch size is known

    def get_data(self) -> None:
        """Read, or make up, training and validation rows, and their mean image."""
        shape = (self.channels, self.height, self.width)
        chosen = sources.source()
        if chosen == sources.MADE:
            self._make_up(self.made_rows)
        elif chosen == sources.DIGITS:
            images, labels = sources.digits(shape)
            train, val = sources.split(len(images), len(images) // 5)
            self._take(*(self._kind_of(images[part]) if is_image else labels[part]
                         for part in (train, val) for is_image in (True, False)))  # fmt: skip
        else:
            self._take(*self.read_files())

    def read_files(self) -> tuple[Any, Any, Any, Any]:
        """Return training images and labels, and validation images and labels."""
        raise NotImplementedError

    def make_batches(self, file_batch_size: int) -> None:
        """Set the lists of batches; make up as many rows as they need."""
        if sources.source() == sources.MADE:
            if all(now is made for now, made in zip(self.rawdata, self._data.made)):
                self._make_up(file_batch_size)
            for part, batches in zip((0, 2), sources.made_batches()):
                for place in (part, part + 1):
                    self.rawdata[place] = self.rawdata[place][: batches * file_batch_size]
        super().make_batches(file_batch_size)
        shape = (self.channels, self.height, self.width)
        for name in ("train_img", "val_img"):
            setattr(self, name, [each.reshape(-1, *shape) for each in getattr(self, name)])

    def _make_up(self, batch: int) -> None:
        shape = (self.channels, self.height, self.width)
        parts: list[Any] = []
        for seed, batches in enumerate(sources.made_batches()):
            images, labels = sources.made_images(batches * batch, shape, self.n_class, seed)
            parts += [self._kind_of(images), labels]
        self._take(*parts)
        self._data.made = list(self.rawdata)

    def _kind_of(self, images: np.ndarray) -> np.ndarray:
        """Return images from 0 to 1 in the dtype and range of this data set."""
        return np.rint(images * 255).astype("uint8") if self.are_bytes else images

    def _take(self, train_img, train_labels, val_img, val_labels) -> None:
        mean = train_img.mean(axis=0, dtype="float64").astype("float32")
        self.rawdata = [train_img, train_labels, val_img, val_labels, mean[..., np.newaxis]]

    @property
    def batches_train(self) -> Iterator[tuple[Any, Any]]:
        """Images and labels of batches of this rank, at random, without an end."""
        return self._endless("train")

    @property
    def batches_val(self) -> Iterator[tuple[Any, Any]]:
        """Images and labels of batches to validate with, as `batches_train`."""
        return self._endless("val")

    def _endless(self, mode):
        """Return the one iterator of a mode, which all callers share."""
        kept = vars(self._data).setdefault("endless", {})
        if mode not in kept:
            kept[mode] = self._drawn(mode)
        return kept[mode]

    def _drawn(self, mode):
        random = np.random.RandomState([self.seed, self.stream, self.rank, mode == "val"])
        while True:
            for number in random.permutation(len(getattr(self, f"{mode}_shard"))):
                yield self.batch(mode, number)


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Return bytes as numbers from 0 to 1."""
    result = pixels.astype("float32")
    result /= 255
    return result
