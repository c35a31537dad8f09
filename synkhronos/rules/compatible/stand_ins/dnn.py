"""cuDNN's convolution and pooling by their names in ``theano.gpuarray.dnn``, on CPU ranks too.

With a GPU the functions of Theano are called. On a CPU rank the same numbers come from
``conv2d`` (cuDNN's "cross" leaves the filters unflipped) and from ``pool_2d``, whose windows all
lie inside the padded image (``ignore_border``), as cuDNN's do.
"""

from __future__ import annotations

import functools
from typing import Any

import theano.gpuarray.dnn as real
from theano.gpuarray.type import list_contexts
from theano.tensor import as_tensor_variable
from theano.tensor.nnet import conv2d, conv3d
from theano.tensor.signal import pool

CONV_MODES = ("conv", "cross")
POOL_MODES = ("max", "sum", "average_inc_pad", "average_exc_pad")
_theirs = {name: getattr(real, name) for name in ("dnn_conv", "dnn_conv3d", "dnn_pool")}


def install() -> None:
    """Replace the functions of ``theano.gpuarray.dnn`` by those of this module."""
    real.dnn_conv, real.dnn_conv3d, real.dnn_pool = dnn_conv, dnn_conv3d, dnn_pool


def _on_gpus(function):
    """Call Theano's own function, with the same arguments, in a process that has a GPU."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        chosen = _theirs[function.__name__] if list_contexts() else function
        return chosen(*args, **kwargs)

    return called


@_on_gpus
def dnn_conv(
    img: Any,
    kerns: Any,
    border_mode: Any = "valid",
    subsample: Any = (1, 1),
    dilation: Any = (1, 1),
    conv_mode: str = "conv",
    direction_hint: Any = None,
    workmem: Any = None,
    algo: Any = None,
    precision: Any = None,
    num_groups: int = 1,
) -> Any:
    """Return the convolution of images (b, c, 0, 1) with filters (out, in, 0, 1).

    Arguments that choose cuDNN's algorithm are accepted, and change nothing.
    """
    return _convolved(conv2d, img, kerns, border_mode, subsample, dilation, conv_mode, num_groups)


@_on_gpus
def dnn_conv3d(
    img: Any,
    kerns: Any,
    border_mode: Any = "valid",
    subsample: Any = (1, 1, 1),
    dilation: Any = (1, 1, 1),
    conv_mode: str = "conv",
    direction_hint: Any = None,
    algo: Any = None,
    precision: Any = None,
    num_groups: int = 1,
) -> Any:
    """Return the convolution of volumes (b, c, 0, 1, 2) with filters."""
    return _convolved(conv3d, img, kerns, border_mode, subsample, dilation, conv_mode, num_groups)


def _convolved(conv, img, kerns, border_mode, subsample, dilation, conv_mode, num_groups):
    if conv_mode not in CONV_MODES:
        raise ValueError(f"conv_mode must be 'conv' or 'cross', got {conv_mode!r}.")
    return conv(
        img,
        kerns,
        border_mode=border_mode,
        subsample=tuple(subsample),
        filter_dilation=tuple(dilation),
        filter_flip=conv_mode == "conv",
        num_groups=num_groups,
    )


@_on_gpus
def dnn_pool(img: Any, ws: Any, stride: Any = None, mode: str = "max", pad: Any = None) -> Any:
    """Return the pooled images, of 2 or 3 dimensions as `ws` has; 'average' is average_inc_pad."""
    mode = "average_inc_pad" if mode == "average" else mode
    if mode not in POOL_MODES:
        raise ValueError(f"mode must be one of {', '.join(POOL_MODES)}, got {mode!r}.")
    img = as_tensor_variable(img)
    pooled = pool.pool_3d if img.ndim == 5 else pool.pool_2d
    dimensions = img.ndim - 2
    stride = ws if stride is None else stride
    pad = (0,) * dimensions if pad is None else pad
    return pooled(
        img, tuple(ws), stride=tuple(stride), pad=tuple(pad), mode=mode, ignore_border=True
    )
