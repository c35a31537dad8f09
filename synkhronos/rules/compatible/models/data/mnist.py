"""MNIST, from its idx files."""

from __future__ import annotations

import gzip
import math
import struct
from typing import Any, Iterator

import numpy as np

from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.images import ImagesInMemory, scaled

PAGE = "http://yann.lecun.com/exdb/mnist/"
LARGEST = 1 << 30  # bytes of one file; MNIST's largest has 47 million


class MNIST_data(ImagesInMemory):
    """Grey images of 28 x 28 pixels in 10 classes, from 0 to 1.

    The 60000 training rows are for training, and the 10000 test rows for validation. The four idx
    files, gzipped or not, are read from ``$SYNKHRONOS_DATA/mnist`` or ``$SYNKHRONOS_DATA``.

    See `Batches` for the attributes. As in Theano-MPI `rawdata` has rows of 784 numbers, also of
    the mean, and the test rows after it; batches are of shape (rows, 1, 28, 28).

    Examples
    --------
    >>> import os
    >>> os.environ.update(SYNKHRONOS_DATA="made", SYNKHRONOS_MADE_BATCHES="3")
    >>> data = MNIST_data()
    >>> data.batch_data(4)
    >>> data.n_batch_train, data.n_batch_val, data.train_img[0].shape
    (3, 1, (4, 1, 28, 28))
    >>> del os.environ["SYNKHRONOS_DATA"], os.environ["SYNKHRONOS_MADE_BATCHES"]
    """

    channels, height, width, n_class = 1, 28, 28, 10

    def batch_data(self, batchsize: int) -> None:
        """Divide the rows into batches of a size."""
        super().batch_data(batchsize)

    def _take(self, train_img, train_labels, val_img, val_labels) -> None:
        super()._take(
            train_img.reshape(-1, 784), train_labels, val_img.reshape(-1, 784), val_labels
        )
        self.rawdata[4] = self.rawdata[4].T
        self.rawdata += self.rawdata[2:4]

    def read_files(self):
        """Return the images and labels of the four files."""
        found = []
        for part in ("train", "t10k"):
            images = _read(f"{part}-images-idx3-ubyte", 3)
            labels = _read(f"{part}-labels-idx1-ubyte", 1)
            if images.shape[1:] != (28, 28) or len(images) != len(labels):
                raise ValueError(
                    f"MNIST's files {part}-* must have as many images of 28 x 28 pixels as labels, "
                    f"got shapes {images.shape} and {labels.shape}. Get them from {PAGE} again."
                )
            found += [scaled(images[:, None]), labels.astype("int64")]
        return tuple(found)


def _read(name, ndim):
    names = [f"{place}{name}{end}" for place in ("mnist/", "") for end in ("", ".gz")]
    return read_idx(sources.find(names, f"MNIST's file {name}", PAGE), ndim)


def read_idx(file, ndim):
    """Return the array of bytes in an idx file."""
    magic = bytes([0, 0, 8, ndim])  # 8 stands for unsigned bytes
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rb") as stream:
        header = stream.read(4 + 4 * ndim)
        if header[:4] != magic or len(header) < 4 + 4 * ndim:
            raise ValueError(f"{file} is no idx file of bytes in {ndim} dimensions.")
        shape = struct.unpack(f">{ndim}I", header[4:])
        size = math.prod(shape)
        # Checked before reading, which allocates as much memory as the header asks for.
        if size > LARGEST:
            raise ValueError(f"{file} says that its shape is {shape}: more than {LARGEST} bytes.")
        content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"{file} has not the {size} bytes that its header says, of shape {shape}.")
    return np.frombuffer(content, "uint8").reshape(shape)


def iterate_minibatches(
    inputs: Any, targets: Any, batchsize: int, shuffle: bool = False, forever: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yield minibatches of two arrays; rows that do not fill one are left out.

    With `shuffle` in an order drawn from NumPy's global random state, with `forever` again and
    again.

    >>> [rows.tolist() for rows, _ in iterate_minibatches(np.arange(5), np.arange(5), 2)]
    [[0, 1], [2, 3]]
    """
    if len(inputs) != len(targets):
        raise ValueError(f"inputs and targets must be as many, got {len(inputs)}, {len(targets)}.")
    while True:
        order = np.random.permutation(len(inputs)) if shuffle else np.arange(len(inputs))
        for start in range(0, len(inputs) - batchsize + 1, batchsize):
            rows = order[start : start + batchsize]
            yield inputs[rows], targets[rows]
        if not forever:
            return
