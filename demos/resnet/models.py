"""ResNets made of Lasagne's layers, and the batch normalization that they need.

    images ──▶ stem ──▶ stages of blocks ──▶ mean over space ──▶ dense ──▶ softmax

    a block:   x ──┬──▶ 2 or 3 convolutions, each normalized ──▶ + ──▶ rectify
                   └──────── shortcut, projected where ─────────▲
                             the shape changes

Works with Lasagne 0.1, which has no BatchNormLayer, and with 0.2.
"""

import sys

import lasagne
import numpy as np
import theano.tensor as T
from lasagne.layers import (
    DenseLayer,
    ElemwiseSumLayer,
    GlobalPoolLayer,
    InputLayer,
    MaxPool2DLayer,
    NonlinearityLayer,
)
from lasagne.nonlinearities import rectify, softmax
from theano.tensor.nnet.bn import batch_normalization_train

import synkhronos as synk

# Number of layers with weights -> (convolutions in a block, blocks in each stage).
# Networks of three stages are for small images (He et al. 2015, section 4.2), with 6 n + 2 layers.
# Networks of four stages are for ImageNet (section 4.1); 10 and 26 are the smallest of these. Every
# depth counts the convolutions of all blocks, the one of the stem, and the dense layer.
DEPTHS = {
    8: (2, [1, 1, 1]),
    14: (2, [2, 2, 2]),
    20: (2, [3, 3, 3]),
    32: (2, [5, 5, 5]),
    44: (2, [7, 7, 7]),
    56: (2, [9, 9, 9]),
    110: (2, [18, 18, 18]),
    10: (2, [1, 1, 1, 1]),
    18: (2, [2, 2, 2, 2]),
    34: (2, [3, 4, 6, 3]),
    26: (3, [2, 2, 2, 2]),
    50: (3, [3, 4, 6, 3]),
    101: (3, [3, 4, 23, 3]),
    152: (3, [3, 8, 36, 3]),
}


def build_resnet(images, depth=50, width=64, classes=1000, size=224, synchronized=False):
    """Return the last layer of a ResNet, which gives probabilities.

    Parameters
    ----------
    images : 4-d variable
        Of shape (rows, 3, size, size).
    depth : int
        One of `DEPTHS`.
    width : int
        Channels of the first stage; each later stage has twice as many as the one before. The
        outputs of blocks of three convolutions have four times as many.
    classes : int
    size : int
        Pixels.
    synchronized : bool
        See `BatchNormLayer`.

    Returns
    -------
    lasagne.layers.Layer

    References
    ----------
    He, Zhang, Ren and Sun, "Deep residual learning for image recognition", arXiv:1512.03385.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {sorted(DEPTHS)}, got {depth!r}.")
    n_convolutions, n_blocks = DEPTHS[depth]
    layer = InputLayer((None, 3, size, size), images)
    if len(n_blocks) == 4:
        layer = _normalized(layer, "stem", width, 7, synchronized, stride=2)
        layer = MaxPool2DLayer(layer, 3, stride=2, pad=1)
    else:
        layer = _normalized(layer, "stem", width, 3, synchronized)
    for stage, n in enumerate(n_blocks, start=1):
        for block in range(1, n + 1):
            name, stride = f"stage{stage}.block{block}", 2 if stage > 1 and block == 1 else 1
            layer = _block(layer, name, width, n_convolutions, synchronized, stride)
        width *= 2
    return DenseLayer(
        GlobalPoolLayer(layer, name="mean"), classes, nonlinearity=softmax, name="dense"
    )


def _block(layer, name, width, n_convolutions, synchronized, stride):
    """Add a block: two convolutions of 3x3, or three of 1x1, 3x3 and 1x1, and a shortcut."""
    if n_convolutions == 2:
        plan = [(width, 3, rectify), (width, 3, None)]
    else:
        plan = [(width, 1, rectify), (width, 3, rectify), (4 * width, 1, None)]
    shortcut, n_out = layer, plan[-1][0]
    if stride > 1 or layer.output_shape[1] != n_out:
        shortcut = _normalized(
            layer, f"{name}.shortcut", n_out, 1, synchronized, stride, nonlinearity=None
        )
    for number, (n_filters, filter_size, nonlinearity) in enumerate(plan, start=1):
        layer = _normalized(
            layer,
            f"{name}.conv{number}",
            n_filters,
            filter_size,
            synchronized,
            stride if number == 1 else 1,
            nonlinearity,
        )
    return NonlinearityLayer(ElemwiseSumLayer([layer, shortcut]), rectify)


def _normalized(layer, name, n_filters, filter_size, synchronized, stride=1, nonlinearity=rectify):
    layer = ConvolutionLayer(
        layer,
        n_filters,
        filter_size,
        stride,
        pad=filter_size // 2,
        W=lasagne.init.HeNormal(gain="relu"),
        b=None,  # the normalization would subtract it again
        nonlinearity=None,
        name=name,
    )
    layer = BatchNormLayer(layer, synchronized=synchronized, name=f"{name}.norm")
    return layer if nonlinearity is None else NonlinearityLayer(layer, nonlinearity)


class ConvolutionLayer(lasagne.layers.Conv2DLayer):
    """A convolution without bias, padded by Theano.

    Lasagne 0.1 copies every image into a larger one first, and uses names of arguments from before
    Theano 1.0.
    """

    def get_output_for(self, input, **kwargs):
        """Return the convolution of a variable with the filters."""
        return self.nonlinearity(
            T.nnet.conv2d(
                input,
                self.W,
                input_shape=self.input_shape,
                filter_shape=self.get_W_shape(),
                border_mode=self.pad,
                subsample=self.stride,
            )
        )


class BatchNormLayer(lasagne.layers.Layer):
    r"""Normalize each channel over rows and space, then scale and shift it.

    .. math:: y = \gamma (x - m) / \sqrt{v + \epsilon} + \beta

    In training, m and v are mean and variance of the minibatch: on several ranks, of each rank's
    own rows, or with `synchronized` of all rows. With ``deterministic=True`` they are the running
    statistics. To update these, collect their updates, and pass them as `averages`; without
    `synchronized` they are averaged over the ranks, without a round of their own::

        statistics = OrderedDict()
        output = lasagne.layers.get_output(network, statistics=statistics)
        step = train.make_train_step(..., averages=statistics, per_rank="normalization")

    So all ranks have the same statistics, bit by bit. With `synchronized` the statistics and the
    gradients equal those of serial Theano. Without it the variance, averaged over the ranks, leaves
    out the differences between the ranks' means.

    Parameters
    ----------
    incoming : lasagne.layers.Layer or tuple
        Of shape (rows, channels, height, width).
    epsilon : float
        Added to the variance.
    alpha : float
        The fraction of the running statistics that a minibatch replaces.
    synchronized : bool
        Compute the same as serial training, with two more small rounds for each such layer, one
        forward and one backward. It matters if ranks have few rows.
    **kwargs
        For Lasagne's Layer.

    References
    ----------
    Ioffe and Szegedy, "Batch normalization", arXiv:1502.03167. The running variance is not
    multiplied with n / (n - 1) here.
    """

    def __init__(self, incoming, epsilon=1e-5, alpha=0.1, synchronized=False, **kwargs):
        super().__init__(incoming, **kwargs)
        self.epsilon, self.alpha, self.synchronized = epsilon, alpha, synchronized
        zero, one = lasagne.init.Constant(0), lasagne.init.Constant(1)
        shape = (self.input_shape[1],)
        kept = {"trainable": False, "regularizable": False}
        self.gamma = self.add_param(one, shape, "gamma")
        self.beta = self.add_param(zero, shape, "beta", regularizable=False)
        self.mean = self.add_param(zero, shape, "mean", **kept)
        self.variance = self.add_param(one, shape, "variance", **kept)

    def get_output_for(self, input, deterministic=False, statistics=None, **kwargs):
        """Return the normalized variable; add updates of running statistics to `statistics`."""
        mean, variance, output = self.mean, self.variance, None
        if not deterministic and not self.synchronized and has_cudnn():
            # One operation, and one for its gradient: ResNet-50 compiles in a third of the time.
            epsilon = max(self.epsilon, np.nextafter(np.float32(1e-5), np.float32(1)))  # its least
            output, mean, inverse = batch_normalization_train(
                input, self.gamma, self.beta, "spatial", epsilon
            )
            variance = T.maximum(1 / T.sqr(inverse) - epsilon, 0)
        elif not deterministic:
            mean, variance = self._of_minibatch(input)
        if statistics is not None:
            for kept, new in ((self.mean, mean), (self.variance, variance)):
                statistics[kept] = (1 - self.alpha) * kept + self.alpha * new
        if output is not None:
            return output
        scale = self.gamma / T.sqrt(variance + self.epsilon)
        # One multiplication and one addition for each pixel; the rest is computed for each channel.
        return input * _over_space(scale) + _over_space(self.beta - mean * scale)

    def _of_minibatch(self, input):
        """Return mean and variance, computed from moments about the running mean.

        So both moments take one pass and one round, and their difference stays precise if the mean
        is large. Any number that is the same on all ranks could replace the running mean.
        """
        first = _mean(input) - self.mean
        second = _mean(T.sqr(input - _over_space(self.mean)))
        if self.synchronized:
            first, second = synk.ops.all_reduce(first), synk.ops.all_reduce(second)
        return self.mean + first, T.maximum(second - T.sqr(first), 0)


def has_cudnn():
    """Return whether the device that this process has opened computes with cuDNN."""
    dnn = sys.modules.get("theano.gpuarray.dnn")
    return dnn is not None and bool(dnn.dnn_present.avail)


def _over_space(channels):
    return channels.dimshuffle("x", 0, "x", "x")


def _mean(images):
    """Return the mean of each channel.

    BLAS sums over space. So a batch normalization and its gradient take about half the time that
    they take with ``images.mean((0, 2, 3))``, and a third of the time that they take with Theano's
    ``batch_normalization_train``, whose gradient needs many passes on the CPU.
    """
    rows, channels, pixels = images.shape[0], images.shape[1], images.shape[2] * images.shape[3]
    ones = T.ones((pixels,), images.dtype)
    sums = T.dot(images.reshape((rows * channels, pixels)), ones).reshape((rows, channels))
    return sums.sum(axis=0) / T.cast(rows * pixels, images.dtype)
