"""Layers of any shape, dense layers, dropout, softmax and batch normalization."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Sequence

import numpy as np
import theano
import theano.tensor as T

from synkhronos.rules.compatible.models.layers2.layer import Layer, Switch, new_stream, relu
from synkhronos.rules.compatible.models.layers2.weights import Constant, Normal, as_weight


class Dimshuffle(Layer):
    """The input with its axes in another order: ``new_axis_order=(3, 0, 1, 2)``."""

    def __init__(
        self,
        input: Any,
        new_axis_order: Sequence[int],
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
    ):
        super().__init__(input, input_shape, printinfo)
        order = tuple(new_axis_order)
        if sorted(order) != list(range(len(self.input_shape))):
            raise ValueError(
                f"new_axis_order must name each of the {len(self.input_shape)} axes once, "
                f"got {order}."
            )
        self.layout = {(3, 0, 1, 2): "bc01", (1, 2, 3, 0): "c01b"}.get(order)
        shape = [self.input_shape[i] for i in order]
        self._finish(self.input.dimshuffle(*order), shape, output_shape)


class Flatten(Layer):
    """The input with all axes from ``axis - 1`` on made one: ``axis=2`` gives a matrix."""

    def __init__(
        self,
        input: Any,
        axis: int = 2,
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
    ):
        super().__init__(input, input_shape, printinfo)
        if not 1 <= axis <= len(self.input_shape):
            raise ValueError(
                f"axis must be from 1 to {len(self.input_shape)}, the axes that are left, "
                f"got {axis}."
            )
        shape = (*self.input_shape[: axis - 1], np.prod(self.input_shape[axis - 1 :]))
        self._finish(self.input.flatten(axis), shape, output_shape)


class _Dense(Layer):
    """x W + b."""

    _std, _bias = 0.01, 0.0  # of weights that are None

    def __init__(
        self,
        input: Any,
        n_out: Any = None,
        W: Any = None,
        b: Any = None,
        printinfo: bool = True,
        input_shape: Any = None,
        n_in: Any = None,
    ):
        if input_shape is None and n_in is not None and not isinstance(input, Layer):
            input_shape = (0, n_in)  # the batch is of any size
        super().__init__(input, input_shape, printinfo)
        if len(self.input_shape) != 2:
            raise ValueError(
                f"{type(self).__name__} takes a matrix, got the shape {self.input_shape}: put a "
                "Flatten before it."
            )
        n_out = W.shape[1] if n_out is None and hasattr(W, "shape") else n_out
        if n_out is None:
            raise TypeError(f"{type(self).__name__} needs n_out, its number of units.")
        self.n_in, self.n_out = self.input_shape[1], int(n_out)
        if n_in is not None and n_in != self.n_in:
            raise ValueError(f"n_in must be {self.n_in}, as the input has, got {n_in}.")
        self.W = as_weight(W, (self.n_in, self.n_out), partial(Normal, std=self._std))
        self.b = as_weight(b, (self.n_out,), partial(Constant, val=self._bias))
        self.linear = T.dot(self.input, self.W.val) + self.b.val


class FC(_Dense):
    """max(x W + b, 0).

    Parameters
    ----------
    input : Layer or symbolic matrix
    n_out : int
        The number of units.
    W, b : Weight or float, optional
        W is (in, out). By default normal with a standard deviation of 0.005, and 0.1.
    input_shape, n_in : optional
        (batch, in), or in alone; needed where `input` is no layer.
    activation : callable, optional
        The rectifier by default; None for the identity.
    """

    _std, _bias = 0.005, 0.1

    def __init__(
        self,
        input: Any,
        n_out: Any = None,
        W: Any = None,
        b: Any = None,
        printinfo: bool = True,
        input_shape: Any = None,
        n_in: Any = None,
        activation: Any = relu,
    ):
        super().__init__(input, n_out, W, b, printinfo, input_shape, n_in)
        made = self.linear if activation is None else activation(self.linear)
        self._finish(made, (self.input_shape[0], self.n_out))


class Softmax(_Dense):
    """Probabilities of classes, softmax(x W + b); its arguments are those of `FC`.

    By default W is normal with a standard deviation of 0.01, and b is 0.

    Attributes
    ----------
    p_y_given_x : symbolic matrix
        Of each row and class.
    y_pred : symbolic vector
        The most probable class of each row.
    """

    def __init__(
        self,
        input: Any,
        n_out: Any = None,
        W: Any = None,
        b: Any = None,
        printinfo: bool = True,
        input_shape: Any = None,
        n_in: Any = None,
    ):
        super().__init__(input, n_out, W, b, printinfo, input_shape, n_in)
        self.p_y_given_x = T.nnet.softmax(self.linear)
        self.y_pred = T.argmax(self.p_y_given_x, axis=1)
        self._finish(self.p_y_given_x, (self.input_shape[0], self.n_out))

    def negative_log_likelihood(self, y: Any) -> Any:
        """Return the mean over rows of -log p(y).

        Parameters
        ----------
        y : symbolic vector of int
            The class of each row.
        """
        return T.nnet.categorical_crossentropy(self.p_y_given_x, self._classes(y)).mean()

    def errors(self, y: Any) -> Any:
        """Return the share of rows whose most probable class is another one."""
        return T.mean(T.neq(self.y_pred, self._classes(y)), dtype=theano.config.floatX)

    def errors_top_x(self, y: Any, num_top: int = 5) -> Any:
        """Return the share of rows whose class is none of the `num_top` most probable ones."""
        top = T.argsort(self.p_y_given_x, axis=1)[:, -num_top:]
        is_there = T.any(T.eq(top, self._classes(y)[:, None]), axis=1)
        return T.mean(T.eq(is_there, 0), dtype=theano.config.floatX)

    def _classes(self, y):
        if y.ndim != 1 or "int" not in y.dtype:
            raise TypeError(f"y must be a vector of integers, the classes of rows, got {y.type}.")
        return y


class Dropout(Layer):
    """The input with some units set to 0 in training, else scaled by the share that is kept.

    Parameters
    ----------
    input, input_shape
        Of any shape.
    prob_drop : float, optional
        The probability of a 0.
    n_out : int, optional
        Accepted, and of no effect.

    Notes
    -----
    ``Dropout.SetDropoutOn()`` and ``SetDropoutOff()`` switch all layers of the process [1]_.

    .. [1] Geoffrey E. Hinton et al., "Improving neural networks by preventing co-adaptation of
       feature detectors", arXiv:1207.0580, 2012.
    """

    switch = Switch("dropout_is_on")
    SetDropoutOn, SetDropoutOff = switch.set_on, switch.set_off
    layers: ClassVar[list[Any]] = []  # all of the process

    def __init__(
        self,
        input: Any,
        n_out: Any = None,
        prob_drop: float = 0.5,
        printinfo: bool = True,
        input_shape: Any = None,
    ):
        self.name = f"Dropout{prob_drop}"
        super().__init__(input, input_shape, printinfo)
        if not 0 <= prob_drop < 1:
            raise ValueError(f"prob_drop must be from 0 to less than 1, got {prob_drop}.")
        self.prob_drop, self.prob_keep, dtype = prob_drop, 1 - prob_drop, self.input.dtype
        self.flag_on, self.flag_off = self.switch.value, 1 - self.switch.value
        keep = np.asarray(1 - prob_drop, dtype)
        self.mask = new_stream().binomial(self.input.shape, p=1 - prob_drop, dtype=dtype)
        self._finish(self.input * self.switch.choose(self.mask, keep), self.input_shape)
        Dropout.layers.append(self)


class BatchNormal(Layer):
    """gamma (x - mean) / sqrt(var + epsilon) + beta, over all axes but that of channels [1]_.

    In training mean and variance are those of the batch, and running ones follow them, at each call
    of a function that has the layer. Else the running ones are used.

    Parameters
    ----------
    input, input_shape
        bc01 or a matrix, with the channels on axis 1; or c01b, with ``axis=0``.
    axis : int, optional
        The axis of channels.
    alpha : float, optional
        The weight of a batch in the running mean and variance.
    epsilon : float, optional
        Added to variances.
    gamma, beta : Weight or float, optional
        By default 1 and 0.

    Attributes
    ----------
    statistics : list of shared variables
        The running mean and variance.

    Notes
    -----
    ``BatchNormal.SetTrainOn()`` and ``SetTrainOff()`` switch all layers of the process.

    .. [1] Sergey Ioffe and Christian Szegedy, "Batch normalization", arXiv:1502.03167, 2015.
    """

    switch = Switch("batch_normal_trains")
    SetTrainOn, SetTrainOff = switch.set_on, switch.set_off

    def __init__(
        self,
        input: Any,
        input_shape: Any = None,
        axis: int = 1,
        alpha: float = 0.1,
        epsilon: float = 1e-4,
        gamma: Any = 1.0,
        beta: Any = 0.0,
        printinfo: bool = True,
    ):
        super().__init__(input, input_shape, printinfo)
        shape, dtype = (self.input_shape[axis],), theano.config.floatX
        self.gamma, self.beta = as_weight(gamma, shape, Constant), as_weight(beta, shape, Constant)
        # lib.opt tells the parameters of batch normalizations by these names.
        self.gamma.val.name, self.beta.val.name = "gamma", "beta"
        mean = theano.shared(np.zeros(shape, dtype), "running_mean")
        variance = theano.shared(np.ones(shape, dtype), "running_variance")
        self.statistics = [mean, variance]
        others = [i for i in range(self.input.ndim) if i != axis]
        of_batch = self.input.mean(others), self.input.var(others)
        used = []
        for running, now in zip(self.statistics, of_batch):
            used.append(self.switch.choose(now, running))
            followed = T.cast(running + np.float32(alpha) * (now - running), dtype)
            running.default_update = self.switch.choose(followed, running)
        where = ["x" if i != axis else 0 for i in range(self.input.ndim)]
        mean, variance, scale, shift = (
            each.dimshuffle(*where) for each in (*used, self.gamma.val, self.beta.val)
        )
        made = scale * (self.input - mean) / T.sqrt(variance + np.float32(epsilon)) + shift
        self._finish(made, self.input_shape)
