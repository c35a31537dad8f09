"""Weights of layers: shared variables with their first values, and files of one array each."""

from __future__ import annotations

import os
from typing import Any, Sequence

import numpy as np
import theano

from synkhronos._machine.archives import load_npy

SEED = 23455
own = np.random.RandomState(SEED)  # of all weights, in the order in which layers are made


def _rng():
    """Return the random state of weights: a script may assign another one to ``layers2.rng``."""
    from synkhronos.rules.compatible.models import layers2

    return layers2.rng


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

    val: Any = None
    np_values: Any = None

    def __init__(self, shape: Any = None):
        self.shape: Any = shape
        if shape is None:  # a weight of a model file, which sets all three itself
            return
        self.shape = tuple(int(n) for n in np.ravel(shape))
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
        values = load_npy(path)
        if values.shape != self.shape:
            raise ValueError(f"{path} must have the shape {self.shape}, but has {values.shape}.")
        self.np_values = values.astype(self.val.dtype)
        self.val.set_value(self.np_values)


class Constant(Weight):
    """Equal values.

    >>> Constant((2,), val=0.5).val.get_value().tolist()
    [0.5, 0.5]
    """

    def __init__(self, shape: Any, val: float = 0):
        self._value = val
        super().__init__(shape)

    def _first_values(self):
        return np.full(self.shape, self._value)


class Normal(Weight):
    """Values of a normal distribution."""

    def __init__(self, shape: Any, mean: float = 0, std: float = 0.01):
        self._mean, self._std = mean, std
        super().__init__(shape)

    def _first_values(self):
        return _rng().normal(self._mean, self._std, self.shape)


class Uniform(Weight):
    """Values of a uniform distribution from `low` to `high`."""

    def __init__(self, shape: Any, low: float = -0.01, high: float = 0.01):
        self._low, self._high = low, high
        super().__init__(shape)

    def _first_values(self):
        return _rng().uniform(self._low, self._high, self.shape)


class _Scaled(Weight):
    """Values whose spread comes from the numbers of inputs and outputs of a unit.

    Parameters
    ----------
    shape : tuple of int
        (out, in), (out, in, 0, 1), or (in, 0, 1, out) with `c01b`. Theano-MPI counts so in dense
        layers too, whose weights are (in, out).
    gain : float, optional
        A factor of the spread; sqrt(2) fits rectifiers.
    c01b : bool, optional
        Whether filters are (in, 0, 1, out).
    """

    _is_uniform = False

    def __init__(self, shape: Any, gain: float = np.sqrt(2), c01b: bool = False):
        self._gain, self._is_c01b = gain, c01b
        super().__init__(shape)

    def _fans(self):
        """Return the inputs and the outputs of a unit, and the places of a filter."""
        if len(self.shape) not in (2, 4):
            raise ValueError(
                f"{type(self).__name__} needs a shape of 2 or 4 dimensions, got {self.shape}."
            )
        ins, outs = (0, -1) if self._is_c01b else (1, 0)
        places = np.prod(self.shape) / (self.shape[ins] * self.shape[outs])
        return self.shape[ins], self.shape[outs], places

    def _first_values(self):
        spread = self._gain * self._spread()
        if self._is_uniform:
            return _rng().uniform(-spread, spread, self.shape)
        return _rng().normal(0, spread, self.shape)


class GlorotNormal(_Scaled):
    r"""Normal values of the standard deviation :math:`g \sqrt{6 / ((in + out) places)}`.

    Glorot and Bengio [1]_ have this number as the limit of uniform values; normal values have it as
    their standard deviation in Theano-MPI.

    .. [1] Xavier Glorot and Yoshua Bengio, "Understanding the difficulty of training deep
       feedforward neural networks", AISTATS 2010.
    """

    def _spread(self):
        ins, outs, places = self._fans()
        return np.sqrt(6.0 / ((ins + outs) * places))


class GlorotUniform(GlorotNormal):
    """Uniform values up to the number that is the standard deviation of `GlorotNormal`."""

    _is_uniform = True


class HeNormal(_Scaled):
    r"""Normal values of the standard deviation :math:`g \sqrt{3 / (in \cdot places)}`.

    He et al. [1]_ have :math:`\sqrt{2 / (in \cdot places)}`: that is ``gain=np.sqrt(2 / 3)``.

    .. [1] Kaiming He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, 2015.
    """

    def _spread(self):
        ins, _, places = self._fans()
        return np.sqrt(3.0 / (ins * places))


class HeUniform(HeNormal):
    """Uniform values up to the number that is the standard deviation of `HeNormal`."""

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
