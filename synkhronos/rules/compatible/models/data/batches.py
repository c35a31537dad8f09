"""The batches of a data set, their order in an epoch, and the part of each rank.

all rows ──batch_data──▶ batches ──extend_data──▶ a multiple of the ranks (only if asked for)
         ──shuffle_data──▶ train_order ──shard_data──▶ train_shard: this rank's part of it

Each arrow is a method of `Batches`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from synkhronos.rules.compatible.models.data import sources, utils
from synkhronos.rules.preprocessing import check_mode


class Picked(Sequence):
    """Some items of a list, in an order, without a copy.

    >>> list(Picked("abcd", [2, 0]))
    ['c', 'a']
    """

    def __init__(self, items, numbers):
        self._items, self._numbers = items, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Picked(self._items, self._numbers[index])
        return self._items[self._numbers[index]]


def _data(name: str) -> Any:
    """Return a property for data, which snapshots leave out."""

    def get(self):
        return getattr(self._data, name)

    def set(self, value):
        setattr(self._data, name, value)

    return property(get, set)


def _number(mode: str, purpose: str) -> Any:
    """Return a property: the number of batches of a rank."""

    def get(self):
        self._must_be_batched()
        number, most = len(getattr(self, f"{mode}_shard")), getattr(self, f"_most_{mode}")
        return min(number, most) if most >= 0 else number

    def set(self, number):
        setattr(self, f"_most_{mode}", int(number))

    what = f"The number of batches of this rank {purpose}; one that is set is an upper bound."
    return property(get, set, doc=what)


class Batches:
    """The batches of one data set; a subclass reads it in `get_data`.

    Methods are called in this order: `get_data` (by the constructor), `batch_data`, `extend_data`
    if all ranks must have equally many batches, then at each epoch `shuffle_data` and `shard_data`.
    Without `extend_data` the shards are a partition: each batch is in the shard of one rank, so
    some ranks may have one batch more than others.

    Attributes
    ----------
    rawdata : list
        Training images, their labels, validation images, their labels, and the mean image, whose
        last axis is of length 1.
    train_img, train_labels, val_img, val_labels : list
        An item for each batch.
    train_order, val_order : array of int
        Numbers of all batches, in the order of this epoch.
    train_shard, val_shard : array of int
        Those of this rank.
    train_img_shard, train_labels_shard, val_img_shard, val_labels_shard : sequence
        The batches of this rank, in its order.

    Parameters
    ----------
    verbose : bool
        Kept for model files; nothing is printed.
    seed : int, optional
        Of the order of batches; by default ``$SYNKHRONOS_SEED``, or else 23455. Validation rows do
        not depend on it.
    """

    para_load = False
    rawdata = _data("rawdata")
    train_img, train_labels = _data("train_img"), _data("train_labels")
    val_img, val_labels = _data("val_img"), _data("val_labels")

    def __init__(self, verbose: bool = False, seed: int | None = None):
        self.verbose = verbose
        self.seed = int(os.environ.get("SYNKHRONOS_SEED", 23455)) if seed is None else int(seed)
        self.stream = int(os.environ.get("SYNKHRONOS_STREAM", 0))
        self.rank = int(os.environ.get("SYNKHRONOS_RANK", 0))
        self.batched = self.extended = False
        self._data = SimpleNamespace(rawdata=[])
        self._most_train = self._most_val = -1  # the user's bounds; -1 for none
        self.get_data()

    def get_data(self) -> None:
        """Read the data set into `rawdata`."""
        raise NotImplementedError

    n_batch_train = _number("train", "to train with")
    n_batch_val = _number("val", "to validate with")

    def batch_data(self, file_batch_size: int) -> None:
        """Divide the rows into batches; the last one has fewer rows if they don't come out even."""
        if self.batched:
            return
        if int(file_batch_size) < 1:
            raise ValueError(f"file_batch_size must be at least 1, got {file_batch_size!r}.")
        self.make_batches(int(file_batch_size))
        self._begin()

    def make_batches(self, file_batch_size: int) -> None:
        """Set the lists of batches."""
        names = "train_img", "train_labels", "val_img", "val_labels"
        for name, rows in zip(names, self.rawdata):
            starts = range(0, len(rows), file_batch_size)
            setattr(self, name, [rows[start : start + file_batch_size] for start in starts])

    def _begin(self) -> None:
        """Begin with all batches, in the order that they have."""
        self.batched = True
        self.train_order = np.arange(len(self.train_img))
        self.val_order = np.arange(len(self.val_img))
        self.train_shard, self.val_shard = self.train_order, self.val_order

    def extend_data(self, rank: int, size: int) -> None:
        """Repeat the last batches, so that their number is a multiple of that of the ranks.

        Rows are then taken twice. Nothing needs it but a model that must have equally many batches
        on each rank.
        """
        self._must_be_batched()
        if self.extended:
            return
        for items, labels in ((self.train_img, self.train_labels), (self.val_img, self.val_labels)):
            if items:
                items[:], labels[:] = utils.extend_data(rank, size, items, labels)
        self._begin()
        self.extended = True

    def shuffle_data(self, mode: str = "train", common_seed: float = 1234) -> None:
        """Order the batches of all ranks; model files pass the epoch as `common_seed`.

        The order depends on the seed, on `common_seed`, and on the worker for asynchronous rules,
        whose workers see all data. Batches for validation keep their order.
        """
        self._must_be_batched()
        count = len(getattr(self, f"{check_mode(mode)}_img"))
        order = np.arange(count)
        if mode == "train":
            # GOSGD's epoch was no whole number.
            random = np.random.RandomState([self.seed, int(common_seed), self.stream])
            order = random.permutation(count)
        setattr(self, f"{mode}_order", order)

    def shard_data(self, mode: str = "train", rank: int = 0, size: int = 1) -> None:
        """Take every `size`-th batch, beginning with that of this rank."""
        self._must_be_batched()
        order = getattr(self, f"{check_mode(mode)}_order")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to {size - 1} for size={size}, got {rank}.")
        if mode == "train" and len(order) < size:
            raise ValueError(
                f"{len(order)} batches can't be divided among {size} ranks: each needs one at "
                "least. Take a smaller batch size, or fewer ranks."
            )
        setattr(self, f"{mode}_shard", order[rank::size])

    # By names of Theano-MPI: all batches, and all in the order of this epoch.
    train_img_ext = property(lambda self: self.train_img)
    train_labels_ext = property(lambda self: self.train_labels)
    val_img_ext = property(lambda self: self.val_img)
    val_labels_ext = property(lambda self: self.val_labels)
    train_img_shuffle = property(lambda self: Picked(self.train_img, self.train_order))
    train_labels_shuffle = property(lambda self: Picked(self.train_labels, self.train_order))
    val_img_shuffle = property(lambda self: Picked(self.val_img, self.val_order))
    val_labels_shuffle = property(lambda self: Picked(self.val_labels, self.val_order))
    data_path = property(lambda self: str(sources.folder()), doc="The folder of the data sets.")

    train_img_shard = property(lambda self: Picked(self.train_img, self.train_shard))
    train_labels_shard = property(lambda self: Picked(self.train_labels, self.train_shard))
    val_img_shard = property(lambda self: Picked(self.val_img, self.val_shard))
    val_labels_shard = property(lambda self: Picked(self.val_labels, self.val_shard))

    def batch(self, mode: str, number: int):
        """Return the images and the labels of a batch of this rank."""
        shard = getattr(self, f"{check_mode(mode)}_shard")
        return (
            self.read(getattr(self, f"{mode}_img")[shard[number]]),
            getattr(self, f"{mode}_labels")[shard[number]],
        )

    def read(self, item):
        """Return the images of an item of the lists of batches."""
        return item

    def _must_be_batched(self) -> None:
        if not self.batched:
            raise RuntimeError(
                "The data are not divided into batches yet: call batch_data(file_batch_size) "
                "before extend_data, shuffle_data, shard_data and n_batch_train."
            )
