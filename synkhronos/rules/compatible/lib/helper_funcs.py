"""``theanompi.lib.helper_funcs``: files of weights and velocities, and checks of a model.

Files are ``W_<layer>_<epoch>.npy``, of a layer's W, W0, W1, b, b0 or b1, by its number in the list
of layers; and ``mom_<number>_<epoch>.npy`` of a velocity.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any, Iterator, Sequence

import numpy as np
import theano

from synkhronos._machine.archives import load_npy

_NAMES = ("W", "W0", "W1", "b", "b0", "b1")

bufint = memoryview


def dtype_to_mpi(t: Any) -> Any:
    """Return mpi4py's type for a dtype."""
    from mpi4py.util import dtypes

    return dtypes.from_numpy_dtype(t)


def _weights(layers, l_range=None) -> Iterator[tuple[str, Any]]:
    """Yield (name without the epoch, weight) for each weight of some layers."""
    for number, layer in enumerate(layers):
        if l_range is None or number in l_range:
            for name in _NAMES:
                if getattr(layer, name, None) is not None:
                    yield f"{name}_{number}", getattr(layer, name)


def save_weights(layers: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Write all weights of layers into a folder, which is made if it isn't there."""
    os.makedirs(weights_dir, exist_ok=True)
    for name, weight in _weights(layers):
        weight.save_weight(weights_dir, f"{name}_{epoch}")


def load_weights(layers: Sequence[Any], weights_dir: str, epoch: int, l_range: Any = None) -> None:
    """Set the weights of layers, or of those with the numbers `l_range`, from a folder."""
    for name, weight in _weights(layers, l_range):
        weight.load_weight(weights_dir, f"{name}_{epoch}")


def collect_weight_path(
    layers: Sequence[Any], weights_dir: str, epoch: int, l_range: Any = None
) -> list[str]:
    """Return the files that `load_weights` reads."""
    found = _weights(layers, l_range)
    return [os.path.join(weights_dir, f"{name}_{epoch}.npy") for name, _ in found]


def load_weights_from_memory(
    layers: Sequence[Any], weights_list: Sequence[np.ndarray], l_range: Any = None
) -> None:
    """Set the weights of layers from arrays, in the order of `collect_weight_path`."""
    for (_, weight), value in zip(_weights(layers, l_range), weights_list):
        weight.val.set_value(value)


def save_momentums(vels: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Write velocities into a folder."""
    os.makedirs(weights_dir, exist_ok=True)
    for number, each in enumerate(vels):
        np.save(os.path.join(weights_dir, f"mom_{number}_{epoch}"), each.get_value())


def load_momentums(vels: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Set velocities from a folder."""
    for number, each in enumerate(vels):
        path = os.path.join(weights_dir, f"mom_{number}_{epoch}.npy")
        each.set_value(load_npy(path))


def check_model(model: Any) -> None:
    """Raise TypeError with a sentence for each thing that rules need and a model lacks."""
    # Not at the top: the modules of the rules import this package.
    importlib.import_module("synkhronos.rules.contract").check(model)


def check_model_cdd(model: Any) -> None:
    """Give a model lists ``vels`` and ``vels2`` of zeros, if it has none."""
    for name in ("vels", "vels2"):
        if not isinstance(getattr(model, name, None), list):
            zeros = [theano.shared(np.zeros_like(each.get_value())) for each in model.params]
            setattr(model, name, zeros)


def save_model(model: Any, path: str, verbose: bool) -> None:
    """Write a model's weights into a folder, whose name ends with a slash.

    By its own ``save``, if it has one; else the weights of ``layers``; else a pickle of the arrays
    of ``params``.
    """
    os.makedirs(path, exist_ok=True)
    if callable(getattr(model, "save", None)):
        model.save(path)
    elif getattr(model, "layers", None):
        save_weights(model.layers, path, model.epoch)
    else:
        file = os.path.join(path, f"{model.name}params_{model.epoch}.pkl")
        with open(file, "wb") as stream:
            pickle.dump([each.get_value() for each in model.params], stream, protocol=4)
    rate = getattr(model, "shared_lr", None)
    if rate is not None:
        np.save(os.path.join(path, f"lr_{model.epoch}.npy"), rate.get_value())
    if verbose:
        sys.stdout.write(f"weights of epoch {model.epoch} saved in {path}\n")
    with open(os.path.join(path, "val_info.txt"), "a") as stream:
        stream.write(f"epoch: {model.epoch} val_info {getattr(model, 'current_info', None)}\n")
