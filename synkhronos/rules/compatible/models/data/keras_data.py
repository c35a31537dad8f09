"""Keras' CIFAR-10 and MNIST made up, or made of digits, where ``$SYNKHRONOS_DATA`` says so.

Otherwise Keras downloads them. Images are bytes, in Keras' own shapes.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.cifar10 import Cifar10_data
from synkhronos.rules.compatible.models.data.mnist import MNIST_data


def install() -> None:
    """Replace ``load_data`` of Keras' two data sets, if data are to be made up."""
    if sources.source() != "files":
        importlib.import_module("keras.datasets.cifar10").load_data = cifar10
        importlib.import_module("keras.datasets.mnist").load_data = mnist


def cifar10() -> tuple[Any, Any]:
    """Return pairs of images and labels, to train and to test with, of shape (rows, 1)."""
    channels_last = importlib.import_module("keras.backend").image_data_format() == "channels_last"
    x, y, x_test, y_test = Cifar10_data().rawdata[:4]
    if channels_last:
        x, x_test = (each.transpose(0, 2, 3, 1) for each in (x, x_test))
    return (x, y[:, np.newaxis]), (x_test, y_test[:, np.newaxis])


def mnist(path: Any = None) -> tuple[Any, Any]:
    """Return pairs of images, of shape (rows, 28, 28), and labels."""
    x, y, x_test, y_test = MNIST_data().rawdata[:4]
    x, x_test = (np.rint(255 * each).astype("uint8").reshape(-1, 28, 28) for each in (x, x_test))
    return (x, y), (x_test, y_test)
