"""ResNet-50 for ImageNet, of Lasagne's layers, in Theano-MPI's contract.

The last batch normalization of each block begins with gamma = 0, so each block begins as the
identity (Goyal et al., arXiv:1706.02677, section 5.1).

References
----------
He, Zhang, Ren and Sun, "Deep residual learning for image recognition", arXiv:1512.03385.
"""

from collections import OrderedDict

import lasagne
import numpy as np
import theano.tensor as T
from lasagne.init import Constant
from lasagne.layers import (
    DenseLayer,
    ElemwiseSumLayer,
    GlobalPoolLayer,
    InputLayer,
    MaxPool2DLayer,
    NonlinearityLayer,
)
from lasagne.nonlinearities import rectify, softmax
from theanompi.models.classifier import Classifier
from theanompi.models.data import ImageNet_data


class ResNet50(Classifier):
    """Sixteen blocks of three convolutions, each added to its input."""

    n_epochs = 90
    batch_size = 32
    file_batch_size = 128
    learning_rate = 0.1 * 32 / 256
    lr_step = (30, 60, 80)
    input_size = 224
    image_size = 256  # of made-up data
    width = 64  # channels of the first stage
    blocks = (3, 4, 6, 3)  # of each stage

    def make_data(self):
        return ImageNet_data(self.verbose, self.file_batch_size, self.image_size)

    def network(self, images):
        lasagne.random.set_rng(np.random.RandomState(self.seed))
        layer = InputLayer((None, 3, self.input_size, self.input_size), images)
        layer = NonlinearityLayer(normalized(layer, self.width, 7, stride=2), rectify)
        layer = MaxPool2DLayer(layer, 3, stride=2, pad=1)
        for stage, count in enumerate(self.blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layer = block(layer, self.width * 2**stage, stride)
        self.output = DenseLayer(
            GlobalPoolLayer(layer),
            self.data.n_class,
            W=lasagne.init.Normal(0.01),
            nonlinearity=softmax,
        )
        self.params = lasagne.layers.get_all_params(self.output, trainable=True)
        statistics = OrderedDict()
        probabilities = lasagne.layers.get_output(self.output, statistics=statistics)
        self.statistics_updates = list(statistics.items())
        return probabilities, lasagne.layers.get_output(self.output, deterministic=True)


def block(layer, width, stride):
    """Add a block: three convolutions, of 1, 3 and 1 pixels, beside a shortcut."""
    shortcut = layer
    if stride > 1 or layer.output_shape[1] != 4 * width:
        shortcut = normalized(layer, 4 * width, 1, stride)
    layer = NonlinearityLayer(normalized(layer, width, 1, stride), rectify)
    layer = NonlinearityLayer(normalized(layer, width, 3), rectify)
    layer = normalized(layer, 4 * width, 1, gamma=0)
    return NonlinearityLayer(ElemwiseSumLayer([layer, shortcut]), rectify)


def normalized(layer, n_filters, filter_size, stride=1, gamma=1):
    """Add a convolution and its batch normalization."""
    return BatchNormalization(UnbiasedConvolution(layer, n_filters, filter_size, stride), gamma)


class UnbiasedConvolution(lasagne.layers.Conv2DLayer):
    """A convolution without bias, padded by Theano."""

    def __init__(self, incoming, n_filters, filter_size, stride):
        super().__init__(
            incoming,
            n_filters,
            filter_size,
            stride,
            pad=filter_size // 2,
            W=lasagne.init.HeNormal(gain="relu"),
            b=None,
            nonlinearity=None,
        )

    def get_output_for(self, input, **kwargs):
        shape = self.get_W_shape()
        return T.nnet.conv2d(
            input, self.W, filter_shape=shape, border_mode=self.pad, subsample=self.stride
        )


class BatchNormalization(lasagne.layers.Layer):
    """Normalize each channel by its mean and variance in the batch, then scale and shift it.

    With ``deterministic=True`` mean and variance are running ones, whose updates are collected in
    `statistics`. Lasagne 0.1 has no such layer.
    """

    def __init__(self, incoming, gamma=1, epsilon=1e-5, alpha=0.1):
        super().__init__(incoming)
        shape = (self.input_shape[1],)
        self.epsilon, self.alpha = epsilon, alpha
        # Rules know parameters of batch normalization by these names.
        self.gamma = self.add_param(Constant(gamma), shape, "gamma", regularizable=False)
        self.beta = self.add_param(Constant(0), shape, "beta", regularizable=False)
        self.mean = self.add_param(Constant(0), shape, "mean", trainable=False)
        self.variance = self.add_param(Constant(1), shape, "variance", trainable=False)

    def get_output_for(self, input, deterministic=False, statistics=None, **kwargs):
        mean, variance = self.mean, self.variance
        if not deterministic:
            mean, variance = input.mean((0, 2, 3)), input.var((0, 2, 3))
        if statistics is not None:
            for kept, new in ((self.mean, mean), (self.variance, variance)):
                statistics[kept] = (1 - self.alpha) * kept + self.alpha * new
        scale = self.gamma / T.sqrt(variance + self.epsilon)
        shift = self.beta - mean * scale
        return input * scale.dimshuffle("x", 0, "x", "x") + shift.dimshuffle("x", 0, "x", "x")
