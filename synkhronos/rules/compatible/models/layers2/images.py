"""Layers of images: convolution, pooling, normalization over channels, cropping.

Images are (batch, channels, rows, columns), "bc01". Layers of "c01b" shuffle the axes to bc01, and
the result back: so they compute on any device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Sequence

import numpy as np
import theano.tensor as T
from theano.tensor.nnet.abstract_conv import get_conv_output_shape

from synkhronos.rules.compatible.models.layers2.layer import (
    Layer,
    Switch,
    layout_of,
    new_stream,
    relu,
)
from synkhronos.rules.compatible.models.layers2.weights import Constant, Normal, as_weight
from synkhronos.rules.compatible.stand_ins.dnn import dnn_conv, dnn_pool

LAYOUTS = ("bc01", "c01b")


def _pair(size):
    if isinstance(size, str):  # "half" and other names of paddings
        return size
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _to_bc01(x, layout):
    return x.dimshuffle(3, 0, 1, 2) if layout == "c01b" else x


def _from_bc01(x, layout):
    return x.dimshuffle(1, 2, 3, 0) if layout == "c01b" else x


def _shape_bc01(shape, layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if len(shape) != 4:
        raise ValueError(f"input_shape must have 4 dimensions ({layout}), got {tuple(shape)}.")
    return (shape[3], *shape[:3]) if layout == "c01b" else tuple(shape)


def _shape_from_bc01(shape, layout):
    return (*shape[1:], shape[0]) if layout == "c01b" else tuple(shape)


def _convolved(x, W, b, pad, stride):
    """Return x * W + b, for bc01. As cuDNN does by default, filters are flipped."""
    options = {"border_mode": _pair(pad), "subsample": _pair(stride)}
    return dnn_conv(x, W, conv_mode="conv", **options) + b.dimshuffle("x", 0, "x", "x")


def _pooled(x, shape, size, stride, pad, mode="max"):
    """Return the pooled images, bc01, and their shape; windows of one pixel change nothing."""
    if _pair(size) == (1, 1):
        return x, shape
    made = dnn_pool(x, _pair(size), _pair(stride), mode, _pair(pad))
    sides = [
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip(shape[2:], _pair(size), _pair(stride), _pair(pad))
    ]
    return made, (*shape[:2], *sides)


def _check_odd(n):
    if n % 2 != 1:
        raise ValueError(f"n must be an odd number of channels, got {n}.")


def normalize_channels(
    x: Any, channels: Any, n: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75
) -> Any:
    """Return x / (k + alpha sum of x^2 over `n` neighbouring channels)^beta, for bc01 [1]_.

    .. [1] Alex Krizhevsky, Ilya Sutskever and Geoffrey E. Hinton, "ImageNet classification with
       deep convolutional neural networks", NIPS 2012: section 3.3.
    """
    _check_odd(n)
    half = n // 2
    padded = T.zeros((x.shape[0], channels + 2 * half, x.shape[2], x.shape[3]), x.dtype)
    padded = T.set_subtensor(padded[:, half : half + channels], T.sqr(x))
    total = sum(padded[:, i : i + channels] for i in range(n))
    return x / (k + alpha * total) ** beta


class CrossChannelNormalization:
    """`normalize_channels` of images c01b, by calling it with them.

    Parameters
    ----------
    alpha, k, beta : float, optional
    n : int, optional
        The number of channels, an odd one.
    """

    def __init__(self, alpha: float = 1e-4, k: float = 2, beta: float = 0.75, n: int = 5):
        self.alpha, self.k, self.beta, self.n = alpha, k, beta, n
        _check_odd(n)

    def __call__(self, c01b: Any) -> Any:
        """Return the normalized images."""
        return self.of(c01b, "c01b")

    def of(self, x: Any, layout: str) -> Any:
        """Return normalized images of a layout."""
        x = _to_bc01(x, layout)
        made = normalize_channels(x, x.shape[1], self.n, self.k, self.alpha, self.beta)
        return _from_bc01(made, layout)


class Conv(Layer):
    """max(x * W + b, 0), for images bc01: a convolution, whose filters are flipped.

    Parameters
    ----------
    input : Layer or symbolic variable
    convstride, padsize : int or pair of int, optional
        The stride, and the zeros around the images.
    W, b : Weight or float, optional
        W is (out, in, rows, columns). By default normal with a standard deviation of 0.1, and 0.
    filter_shape : tuple of int, optional
        The shape of W, where no W is given.
    lib_conv : str, optional
        Accepted, and of no effect: Theano chooses.
    input_shape : tuple of int, optional
        (batch, channels, rows, columns); needed where `input` is no layer.
    output_shape : tuple of int, optional
        By default computed.
    activation : callable, optional
        The rectifier by default; None for the identity.
    """

    layout = "bc01"

    def __init__(
        self,
        input: Any,
        convstride: Any = 1,
        padsize: Any = 0,
        b: Any = 0.0,
        W: Any = None,
        filter_shape: Any = None,
        lib_conv: str = "cudnn",
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
        activation: Any = relu,
    ):
        self.name = f"Conv ({lib_conv})"
        super().__init__(input, input_shape, printinfo)
        shape = _shape_bc01(self.input_shape, "bc01")
        filter_shape = getattr(W, "shape", filter_shape) if filter_shape is None else filter_shape
        if filter_shape is None:
            raise TypeError("Conv needs W or filter_shape: (out, in, rows, columns).")
        _check_channels(shape[1], filter_shape[1])
        self.convstride, self.padsize, self.lib_conv = convstride, padsize, lib_conv
        self.filter_shape = tuple(int(n) for n in filter_shape)
        self.W = as_weight(W, self.filter_shape, partial(Normal, std=0.1))
        self.b = as_weight(b, self.filter_shape[:1], Constant)
        made = _convolved(self.input, self.W.val, self.b.val, padsize, convstride)
        shape = get_conv_output_shape(shape, self.W.shape, _pair(padsize), _pair(convstride))
        self._finish(made if activation is None else activation(made), shape, output_shape)


def _check_channels(found, expected):
    if found != expected:
        raise ValueError(f"the filters take {expected} channels, but the input has {found}.")


class Pool(Layer):
    """The largest or mean value of each window, for images bc01.

    Parameters
    ----------
    input, input_shape, output_shape
        As for `Conv`.
    poolsize, poolstride, poolpad : int or pair of int, optional
        The window, its stride and the padding. Windows that reach beyond the padding are left out.
    mode : str, optional
        "max", "sum", "average_inc_pad", which "average" is too, or "average_exc_pad".
    """

    layout = "bc01"

    def __init__(
        self,
        input: Any,
        poolsize: Any = 2,
        poolstride: Any = None,
        poolpad: Any = 0,
        mode: str = "max",
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
    ):
        super().__init__(input, input_shape, printinfo)
        shape = _shape_bc01(self.input_shape, "bc01")
        poolstride = poolsize if poolstride is None else poolstride
        self.poolsize, self.poolstride, self.poolpad = poolsize, poolstride, poolpad
        made, shape = _pooled(self.input, shape, poolsize, poolstride, poolpad, mode)
        self._finish(made, shape, output_shape)


class LRN(Layer):
    """`normalize_channels` of the input, bc01 or c01b.

    Without `layout` the images are as the layers before say, else c01b.
    """

    def __init__(
        self,
        input: Any,
        input_shape: Any = None,
        printinfo: bool = True,
        n: int = 5,
        k: float = 2.0,
        alpha: float = 1e-4,
        beta: float = 0.75,
        layout: str | None = None,
    ):
        super().__init__(input, input_shape, printinfo)
        self.layout = layout or layout_of(self.input_layer) or "c01b"
        _shape_bc01(self.input_shape, self.layout)
        self.lrn_func = CrossChannelNormalization(alpha, k, beta, n)
        self._finish(self.lrn_func.of(self.input, self.layout), self.input_shape)


class ConvPoolLRN(Layer):
    """Convolution, rectifier, pooling and `LRN` in one layer, for images c01b.

    Parameters
    ----------
    input, input_shape, output_shape
        (channels, rows, columns, batch).
    convstride, padsize : int, optional
        As for `Conv`.
    poolsize, poolstride, poolpad : int, optional
        As for `Pool`, of the largest value; no pooling with 1.
    group : int, optional
        With 2, each half of the filters sees one half of the channels: W0, b0 and W1, b1.
    b, W : Weight or float, optional
        As for `Conv`, in the layout of the layer; for two groups pairs of them, or a number. W is
        normal with a standard deviation of 0.01 by default.
    filter_shape : tuple of int, optional
        (in, rows, columns, out), where no W is given.
    mode : str, optional
        Accepted, and of no effect, as in Theano-MPI.
    lrn : bool, optional
        Whether to normalize over channels.
    lib_conv : str, optional
        Accepted, and of no effect.
    """

    layout = "c01b"
    _std = 0.01  # of weights that are None

    def __init__(
        self,
        input: Any,
        convstride: Any = 1,
        padsize: Any = 0,
        poolsize: Any = 1,
        poolstride: Any = 1,
        group: int = 1,
        b: Any = 0.0,
        W: Any = None,
        filter_shape: Any = None,
        poolpad: Any = 0,
        mode: str = "max",
        lrn: bool = False,
        lib_conv: str = "cudnn",
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
    ):
        self.name = f"ConvPoolLRN ({lib_conv})"
        super().__init__(input, input_shape, printinfo)
        if filter_shape is None and group == 1 and hasattr(W, "shape"):
            filter_shape = W.shape
        if filter_shape is None:
            raise TypeError(f"{type(self).__name__} needs filter_shape, of {self.layout}.")
        if group not in (1, 2):
            raise ValueError(f"group must be 1 or 2, got {group!r}.")
        self.convstride, self.padsize, self.lib_conv = convstride, padsize, lib_conv
        self.poolsize, self.poolstride, self.poolpad = poolsize, poolstride, poolpad
        self.lrn, self.lrn_func = lrn, CrossChannelNormalization()
        shape = _shape_bc01(self.input_shape, self.layout)
        self.channel = shape[1]
        filter_shape = tuple(int(n) for n in filter_shape)
        filters = (filter_shape[3], *filter_shape[:3]) if self.layout == "c01b" else filter_shape
        _check_channels(shape[1], filters[1])
        if filters[0] % group or filters[1] % group:
            raise ValueError(f"channels and filters must be even in 2 groups, got {filter_shape}.")
        self.group, self.filter_shape = group, filter_shape
        self._make_weights((filters[0] // group, filters[1] // group, *filters[2:]), W, b)
        x, each = _to_bc01(self.input, self.layout), shape[1] // group
        parts = []
        for i, (weight, bias) in enumerate(self._pairs):
            part = x if group == 1 else x[:, i * each : (i + 1) * each]
            # c01b of filters is (in, 0, 1, out), which shuffles as images do.
            weight = _to_bc01(weight.val, self.layout)
            parts.append(relu(_convolved(part, weight, bias.val, padsize, convstride)))
        made = parts[0] if group == 1 else T.concatenate(parts, axis=1)
        shape = get_conv_output_shape(
            (shape[0], each, *shape[2:]),
            (filters[0] // group, each, *filters[2:]),
            _pair(padsize),
            _pair(convstride),
        )
        shape = (shape[0], filters[0], *shape[2:])
        made, shape = _pooled(made, shape, poolsize, poolstride, poolpad)
        if lrn:
            made = self.lrn_func.of(made, "bc01")
        shape = _shape_from_bc01(shape, self.layout)
        self._finish(_from_bc01(made, self.layout), shape, output_shape)

    def _make_weights(self, filters, W, b):
        """Set W and b, or W0, b0, W1, b1, from what was given for `filters`, bc01."""
        shape = _shape_from_bc01(filters, self.layout)
        names = [""] if self.group == 1 else ["0", "1"]
        self._pairs = []
        for i, name in enumerate(names):
            given = [each[i] if isinstance(each, (list, tuple)) else each for each in (W, b)]
            weight = as_weight(given[0], shape, partial(Normal, std=self._std))
            bias = as_weight(given[1], filters[:1], Constant)
            if any(weight is each or bias is other for each, other in self._pairs):
                raise TypeError("2 groups need a pair of weights: W=[W0, W1] and b=[b0, b1].")
            setattr(self, f"W{name}", weight)
            setattr(self, f"b{name}", bias)
            self._pairs.append((weight, bias))


class ConvPoolLRN_bc01(ConvPoolLRN):
    """`ConvPoolLRN` for images bc01, with filters (out, in, rows, columns).

    W is normal with a standard deviation of 0.1 by default, and `group` comes last.
    """

    layout = "bc01"
    _std = 0.1

    def __init__(
        self,
        input: Any,
        convstride: Any = 1,
        padsize: Any = 0,
        poolsize: Any = 1,
        poolstride: Any = 1,
        b: Any = 0.0,
        W: Any = None,
        filter_shape: Any = None,
        poolpad: Any = 0,
        mode: str = "max",
        lrn: bool = False,
        lib_conv: str = "cudnn",
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
        group: int = 1,
    ):
        super().__init__(
            input, convstride, padsize, poolsize, poolstride, group, b, W, filter_shape, poolpad,
            mode, lrn, lib_conv, printinfo, input_shape, output_shape,
        )  # fmt: skip


class Subtract(Layer):
    """The input less an array: one for the whole batch, or one for each of its images.

    Parameters
    ----------
    input, input_shape, output_shape
        bc01 or c01b.
    subtract_arr : array
        A mean image (channels, rows, columns), or (channels, rows, columns, 1), or anything that
        broadcasts to the input.
    """

    def __init__(
        self,
        input: Any,
        subtract_arr: Any = 0.0,
        printinfo: bool = True,
        input_shape: Any = None,
        output_shape: Any = None,
    ):
        super().__init__(input, input_shape, printinfo)
        array, shape = np.asarray(subtract_arr, "float32"), self.input_shape
        if array.ndim == len(shape) and array.shape[-1] == 1:
            array = array[..., 0]
        if array.ndim == len(shape) - 1 and array.shape == shape[:-1]:
            array, self.layout = array[..., None], "c01b"
        elif array.ndim == 3 and array.shape == shape[1:]:
            self.layout = "bc01"
        elif array.ndim == 3 and len(shape) == 4:
            raise ValueError(
                f"subtract_arr, of the shape {np.shape(subtract_arr)}, does not fit the input, "
                f"which is of the shape {shape}."
            )
        self.sub_arr = array
        self._finish(self.input - array, self.input_shape, output_shape)


class Crop(Layer):
    """A part of each image: at random and mirrored by chance in training, else the center.

    Parameters
    ----------
    input, input_shape
        bc01 or c01b.
    output_shape : tuple of int
        The shape after cropping, or (rows, columns).
    flag_batch : bool, optional
        Whether all images of a batch are cropped and mirrored alike.
    layout : str, optional
        "bc01" or "c01b". By default that of which the two shapes differ in rows and columns, or
        that of the layers before.

    Notes
    -----
    ``Crop.SetRandCropOn()`` and ``SetRandCropOff()`` switch all layers of the process.
    """

    switch = Switch("random_crop_is_on")
    SetRandCropOn, SetRandCropOff = switch.set_on, switch.set_off
    layers: ClassVar[list[Any]] = []  # all of the process

    def __init__(
        self,
        input: Any,
        output_shape: Sequence[int] = (),
        input_shape: Any = None,
        flag_batch: bool = False,
        printinfo: bool = True,
        layout: str | None = None,
    ):
        super().__init__(input, input_shape, printinfo)
        if len(output_shape) not in (2, 4):
            raise TypeError(f"Crop needs output_shape, (rows, columns), got {output_shape!r}.")
        layout = self.layout = layout or self._found_layout(tuple(output_shape))
        shape = _shape_bc01(self.input_shape, layout)
        wanted = (
            tuple(output_shape)
            if len(output_shape) == 2
            else _shape_bc01(tuple(output_shape), layout)[2:]
        )
        room = [n - m for n, m in zip(shape[2:], wanted)]
        if min(room) < 0 or min(wanted) < 1:
            raise ValueError(f"output_shape must be inside {shape[2:]}, got {wanted}.")
        x, number = _to_bc01(self.input, layout), self.input.shape[LAYOUTS.index(layout) * 3]
        stream = new_stream(of_script=True)
        drawn = stream.uniform((3, 1) if flag_batch else (3, number), dtype="float32")
        self.flag_on = self.switch.value
        starts = [
            self.switch.choose(T.floor(drawn[i] * (room[i] + 1)), room[i] // 2) for i in (0, 1)
        ]
        is_mirrored = T.gt(T.switch(self.switch.value, drawn[2], 0), 0.5)[:, None]
        starts = [T.cast(start, "int64")[:, None] for start in starts]
        rows = starts[0] + np.arange(wanted[0])
        there = np.arange(wanted[1])
        columns = starts[1] + T.switch(is_mirrored, there[::-1], there)
        if flag_batch:
            made = x[:, :, rows[0], :][:, :, :, columns[0]]
        else:
            made = x[
                T.arange(number)[:, None, None, None],
                np.arange(shape[1])[None, :, None, None],
                rows[:, None, :, None],
                columns[:, None, None, :],
            ]
        shape = (*shape[:2], *wanted)
        self._finish(_from_bc01(made, layout), _shape_from_bc01(shape, layout))
        Crop.layers.append(self)

    def _found_layout(self, wanted):
        """Return the layout in which the shapes differ in rows and columns only."""
        given, before = self.input_shape, layout_of(self.input_layer)
        if len(wanted) == 4 and len(given) == 4:
            fits = {
                "bc01": given[:2] == wanted[:2],
                "c01b": (given[0], given[3]) == (wanted[0], wanted[3]),
            }
            if fits["bc01"] != fits["c01b"]:
                return "bc01" if fits["bc01"] else "c01b"
            return before or "c01b"  # where nothing is cut off, as in Theano-MPI
        return before or "bc01"
