"""AlexNet for ImageNet, in Theano-MPI's contract.

References
----------
Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks",
NIPS 2012.
"""

from theanompi.models.classifier import Classifier
from theanompi.models.data import ImageNet_data
from theanompi.models.layers2 import FC, ConvPoolLRN_bc01, Dropout, Flatten, Normal, Softmax


class AlexNet(Classifier):
    """Five convolutions and three dense layers."""

    n_epochs = 70
    batch_size = 128
    learning_rate = 0.01
    lr_step = (20, 40, 60)
    eta = 0.0005
    input_size = 227
    image_size = 256  # of made-up data
    filters = (96, 256, 384, 384, 256)  # the last four in two groups, but for the third
    units = 4096

    def make_data(self):
        return ImageNet_data(self.verbose, self.file_batch_size, self.image_size)

    def network(self, images):
        shape = self.batch_size, 3, self.input_size, self.input_size
        f1, f2, f3, f4, f5 = self.filters
        pooled = {"poolsize": 3, "poolstride": 2}
        normalized = {**pooled, "lrn": True}
        layer = convolution(images, (f1, 3, 11, 11), convstride=4, input_shape=shape, **normalized)
        of_five = {"padsize": 2, "group": 2, "b": 0.1}
        layer = convolution(layer, (f2, f1, 5, 5), **of_five, **normalized)
        layer = convolution(layer, (f3, f2, 3, 3), padsize=1)
        of_three = {"padsize": 1, "group": 2, "b": 0.1}
        layer = convolution(layer, (f4, f3, 3, 3), **of_three)
        layer = convolution(layer, (f5, f4, 3, 3), **of_three, **pooled)
        layer = Flatten(layer)
        for _ in range(2):
            weights = Normal((layer.output_shape[1], self.units), std=0.005)
            layer = Dropout(FC(layer, W=weights, b=0.1), prob_drop=0.5)
        return self.use_layers(Softmax(layer, n_out=self.data.n_class))


def convolution(layer, shape, group=1, **others):
    """Return a convolution whose groups have small random weights."""
    halves = [Normal((shape[0] // group, shape[1] // group, *shape[2:])) for _ in range(group)]
    weights = halves if group > 1 else halves[0]
    return ConvPoolLRN_bc01(layer, W=weights, filter_shape=shape, group=group, **others)
