"""A small convolutional network for CIFAR-10, in Theano-MPI's contract."""

import numpy as np
from theanompi.models.classifier import Classifier
from theanompi.models.data import Cifar10_data
from theanompi.models.layers2 import (
    FC,
    Conv,
    Crop,
    Dropout,
    Flatten,
    Normal,
    Pool,
    Softmax,
    Subtract,
)


class Cifar10_model(Classifier):
    """Three convolutions and two dense layers, of parts of the images."""

    n_epochs = 70
    batch_size = 16
    learning_rate = 0.01
    lr_step = (50, 60, 65)  # of 70 epochs; with fewer epochs in proportion
    crop_size = 28  # pixels, of parts at random, which are mirrored at random too
    filters = (64, 128, 64)
    units = 256

    def __init__(self, config):
        super().__init__(config)
        if "lr_step" not in config:
            self.lr_step = [round(each * self.n_epochs / 70) for each in self.lr_step]

    def make_data(self):
        return Cifar10_data(self.verbose)

    def network(self, images):
        size, (first, second, third) = self.crop_size, self.filters
        shape = self.batch_size, 3, 32, 32
        # Scales bytes to numbers of about 1.
        scale = np.float32(1 / 128)
        layer = Subtract(scale * images, scale * self.data.rawdata[4], input_shape=shape)
        layer = Crop(layer, (size, size))
        layer = Conv(layer, padsize=2, W=he(first, 3, 5, 5))
        layer = Pool(layer, poolsize=3, poolstride=2)
        layer = Conv(layer, padsize=2, W=he(second, first, 5, 5))
        layer = Pool(layer, poolsize=3, poolstride=2)
        layer = Conv(layer, padsize=1, W=he(third, second, 3, 3))
        layer = Flatten(layer)
        ins = layer.output_shape[1]
        layer = FC(layer, W=Normal((ins, self.units), std=(2 / ins) ** 0.5), b=0)
        layer = Dropout(layer, prob_drop=0.5)
        return self.use_layers(Softmax(layer, W=Normal((self.units, self.data.n_class))))


def he(*shape):
    """Return weights of a convolution before a rectifier: He et al., arXiv:1502.01852."""
    return Normal(shape, std=(2 / np.prod(shape[1:])) ** 0.5)
