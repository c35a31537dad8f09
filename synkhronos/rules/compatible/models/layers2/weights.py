"""Weights of layers: shared variables with their first values, and files of one array each."""

from __future__ import annotations

import os
from typing import Any, Sequence

import numpy as np
import theano

SEED = 23455
rng = np.random.RandomState(SEED)  # of all weights, in the order in which layers are made


class Weight:
    """A shared variable of a layer; its subclasses say which values it begins with.

    Parameters
    ----------
    shape : tuple of int
        The shape. Filters are (out, in, 0, 1), or (in, 0, 1, out) in layers of c01b; weights of
        dense layers (in, out).

    Attributes
    ----------
    val : shared variable
        Of dtype ``floatX``.
    np_values : array
        The first values, or those that were loaded last.
    """

    def __init__(self, shape: Sequence[int]):
        self.shape = tuple(int(n) for n in shape)
        self.np_values = np.asarray(self._first_values(), theano.config.floatX)
        self.val = theano.shared(self.np_values, self._name())

    def _name(self):
        return "W" if len(self.shape) > 1 else "b"

    def _first_values(self):
        raise NotImplementedError(f"{type(self).__name__} is no weight to begin with: use Normal.")

    def save_weight(self, dir: Any, name: str) -> None:
        """Write the values into ``dir/name.npy``."""
        np.save(os.path.join(dir, f"{name}.npy"), self.val.get_value())

    def load_weight(self, dir: Any, name: str) -> None:
        """Set the values of ``dir/name.npy``; raise ValueError if their shape is another one."""
        path = os.path.join(dir, f"{name}.npy")
        values = np.load(path, allow_pickle=False)
        if values.shape != self.shape:
            raise ValueError(f"{path} must have the shape {self.shape}, but has {values.shape}.")
        self.np_values = values.astype(self.val.dtype)
        self.val.set_value(self.np_values)


class Constant(Weight):
    """Equal values.

    >>> Constant((2,), val=0.5).val.get_value().tolist()
    [0.5, 0.5]
    """

    def __init__(self, shape: Sequence[int], val: float = 0.0):
        self._value = val
        super().__init__(shape)

    def _first_values(self):
        return np.full(self.shape, self._value)


class Normal(Weight):
    """Values of a normal distribution."""

    def __init__(self, shape: Sequence[int], mean: float = 0.0, std: float = 0.01):
        self._mean, self._std = mean, std
        super().__init__(shape)

    def _first_values(self):
        return rng.normal(self._mean, self._std, self.shape)


class Uniform(Weight):
    """Values of a uniform distribution from `low` to `high`."""

    def __init__(self, shape: Sequence[int], low: float = -0.01, high: float = 0.01):
        self._low, self._high = low, high
        super().__init__(shape)

    def _first_values(self):
        return rng.uniform(self._low, self._high, self.shape)


class _Scaled(Weight):
    """Values whose spread comes from the numbers of inputs and outputs of a unit.

    Parameters
    ----------
    shape : tuple of int
        (in, out), (out, in, 0, 1), or (in, 0, 1, out) with `c01b`.
    gain : float, optional
        A factor of the spread; sqrt(2) fits rectifiers.
    c01b : bool, optional
        Whether filters are (in, 0, 1, out).
    """

    _is_uniform = False

    def __init__(self, shape: Sequence[int], gain: float = 1.0, c01b: bool = False):
        self._gain, self._is_c01b = gain, c01b
        super().__init__(shape)

    def _fans(self):
        if len(self.shape) < 2:
            raise ValueError(
                f"{type(self).__name__} needs a shape of 2 dimensions or more, got {self.shape}."
            )
        if len(self.shape) == 2:
            return self.shape
        ins, outs = (0, -1) if self._is_c01b else (1, 0)
        field = np.prod(self.shape) / (self.shape[ins] * self.shape[outs])
        return self.shape[ins] * field, self.shape[outs] * field

    def _std(self):
        raise NotImplementedError

    def _first_values(self):
        std = self._gain * self._std()
        if not self._is_uniform:
            return rng.normal(0.0, std, self.shape)
        limit = std * np.sqrt(3)
        return rng.uniform(-limit, limit, self.shape)


class GlorotNormal(_Scaled):
    """Normal values of the standard deviation gain sqrt(2 / (fan in + fan out)) [1]_.

    .. [1] Xavier Glorot and Yoshua Bengio, "Understanding the difficulty of training deep
       feedforward neural networks", AISTATS 2010.
    """

    def _std(self):
        return np.sqrt(2.0 / sum(self._fans()))


class GlorotUniform(GlorotNormal):
    """Uniform values of the same standard deviation as `GlorotNormal`."""

    _is_uniform = True


class HeNormal(_Scaled):
    """Normal values of the standard deviation gain sqrt(1 / fan in) [1]_.

    .. [1] Kaiming He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, 2015.
    """

    def __init__(self, shape: Sequence[int], gain: float = np.sqrt(2), c01b: bool = False):
        super().__init__(shape, gain, c01b)

    def _std(self):
        return np.sqrt(1.0 / self._fans()[0])


class HeUniform(HeNormal):
    """Uniform values of the same standard deviation as `HeNormal`."""

    _is_uniform = True


def as_weight(given: Any, shape: Sequence[int], default: Any) -> Weight:
    """Return a weight: the one given, a constant for a number, a default for None.

    Raises
    ------
    ValueError
        If the weight that is given has another shape.
    TypeError
        If it is neither a weight nor a number.
    """
    if given is None:
        return default(shape)
    if isinstance(given, (int, float, np.number)) and not isinstance(given, bool):
        return Constant(shape, given)
    if not isinstance(given, Weight):
        raise TypeError(
            f"W and b must be weights of layers2, such as Normal({tuple(shape)}), got {given!r}."
        )
    if given.shape != tuple(shape):
        raise ValueError(f"a weight of the shape {tuple(shape)} is needed, got {given.shape}.")
    return given
