"""A small convolutional network for CIFAR-10, in Theano-MPI's contract."""

from theanompi.models.classifier import Classifier
from theanompi.models.data import Cifar10_data
from theanompi.models.layers2 import (
    FC,
    Conv,
    Crop,
    Dropout,
    Flatten,
    HeNormal,
    Normal,
    Pool,
    Softmax,
    Subtract,
)


class Cifar10_model(Classifier):
    n_epochs = 70
    batch_size = 256
    learning_rate = 0.01
    lr_step = (50, 60, 65)
    crop_size = 28  # pixels, of parts at random, which are mirrored at random too
    filters = (64, 128, 64)
    units = 256

    def make_data(self):
        return Cifar10_data(self.verbose)

    def network(self, images):
        size, (first, second, third) = self.crop_size, self.filters
        layer = Subtract(images, (self.batch_size, 3, 32, 32), self.data.rawdata[4])
        layer = Crop(layer, output_shape=(size, size), flag_batch=False)
        layer = Conv(layer, padsize=2, W=HeNormal((first, 3, 5, 5)))
        layer = Pool(layer, poolsize=3, poolstride=2)
        layer = Conv(layer, padsize=2, W=HeNormal((second, first, 5, 5)))
        layer = Pool(layer, poolsize=3, poolstride=2)
        layer = Conv(layer, padsize=1, W=HeNormal((third, second, 3, 3)))
        layer = Flatten(layer, axis=2)
        layer = FC(layer, W=HeNormal((layer.output_shape[1], self.units)))
        layer = Dropout(layer, prob_drop=0.5)
        return self.use_layers(Softmax(layer, W=Normal((self.units, self.data.n_class))))
