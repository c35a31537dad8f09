"""GoogLeNet for ImageNet, in Theano-MPI's contract.

References
----------
Szegedy et al., "Going deeper with convolutions", arXiv:1409.4842.
"""

import theano.tensor as T
from theanompi.models.classifier import Classifier
from theanompi.models.data import ImageNet_data
from theanompi.models.layers2 import (
    FC,
    LRN,
    Conv,
    Dropout,
    Flatten,
    GlorotUniform,
    Layer,
    Pool,
    Softmax,
)

# Filters of each part: 1 x 1; before and in 3 x 3; before and in 5 x 5; after pooling.
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class GoogLeNet(Classifier):
    """Nine inception modules."""

    n_epochs = 90
    batch_size = 32
    file_batch_size = 128
    learning_rate = 0.005
    eta = 0.0002
    input_size = 224
    image_size = 256  # of made-up data
    width = 1.0  # filters are multiplied with it
    units = 1024  # of the classifiers beside the main one
    rate_epochs = 240  # after which the learning rate would be 0
    rate_power = 0.5
    side_weight = 0.3  # of the costs of the classifiers beside the main one

    def make_data(self):
        return ImageNet_data(self.verbose, self.file_batch_size, self.image_size)

    def network(self, images):
        shape = self.batch_size, 3, self.input_size, self.input_size
        layer = self.conv(images, 64, 7, stride=2, input_shape=shape)
        layer = LRN(halved(layer))
        layer = self.conv(self.conv(layer, 64, 1), 192, 3)
        layer = halved(LRN(layer))
        sides = []
        for name, filters in INCEPTIONS.items():
            layer = Inception(self, layer, filters)
            if name in ("4a", "4d"):
                sides.append(self.side(layer))
            if name in ("3b", "4e"):
                layer = halved(layer)
        layer = Pool(layer, poolsize=layer.output_shape[2:], mode="average_exc_pad")
        layer = Dropout(Flatten(layer), prob_drop=0.4)
        last = Softmax(layer, n_out=self.data.n_class)
        # As an attribute of the last layer they are found by `get_layers`, and trained.
        last.sides = sides
        costs = [self.cost_of(each.p_y_given_x) for each in sides]
        self.extra_cost = self.side_weight * sum(costs)
        return self.use_layers(last)

    def conv(self, layer, filters, size, stride=1, input_shape=None):
        filters = max(1, int(filters * self.width))
        channels = (input_shape or layer.output_shape)[1]
        weights = GlorotUniform((filters, channels, size, size), gain=1)
        return Conv(layer, stride, size // 2, b=0.2, W=weights, input_shape=input_shape)

    def side(self, layer):
        """Return a classifier beside the main one."""
        size = min(5, *layer.output_shape[2:])
        layer = Pool(layer, poolsize=size, poolstride=3, mode="average_exc_pad")
        layer = Flatten(self.conv(layer, 128, 1), axis=2)
        weights = GlorotUniform((layer.output_shape[1], self.units), gain=1)
        layer = Dropout(FC(layer, W=weights, b=0.2), prob_drop=0.7)
        return Softmax(layer, n_out=self.data.n_class)

    def adjust_hyperp(self, epoch):
        """Let the learning rate fall as (1 - epoch / rate_epochs) ** rate_power."""
        left, next_left = (max(1 - each / self.rate_epochs, 0) for each in (epoch, epoch + 1))
        if left > 0:
            self.scale_lr((next_left / left) ** self.rate_power)


class Inception(Layer):
    """Convolutions of several sizes, side by side; their layers are attributes."""

    def __init__(self, model, before, filters):
        super().__init__(before)
        one, before_three, three, before_five, five, pooled = filters
        self.inner = [
            model.conv(before, one, 1),
            model.conv(model.conv(before, before_three, 1), three, 3),
            model.conv(model.conv(before, before_five, 1), five, 5),
            model.conv(Pool(before, poolsize=3, poolstride=1, poolpad=1), pooled, 1),
        ]
        # The layers inside a part come before its last one.
        self.inner = [each.input_layer for each in self.inner[1:]] + self.inner
        last = self.inner[3:]
        shape = list(before.output_shape)
        shape[1] = sum(each.output_shape[1] for each in last)
        self._finish(T.concatenate([each.output for each in last], axis=1), shape)


def halved(layer):
    """Pool the largest of 3 x 3 pixels, with stride 2."""
    return Pool(layer, poolsize=3, poolstride=2, poolpad=1)
