"""VGG16 for ImageNet, of Lasagne's layers, in Theano-MPI's contract.

References
----------
Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition",
arXiv:1409.1556, configuration D.
"""

from pathlib import Path

import lasagne
import numpy as np
import theano.tensor as T
from lasagne.layers import DenseLayer, DropoutLayer, InputLayer, MaxPool2DLayer
from theanompi.models.classifier import Classifier
from theanompi.models.data import ImageNet_data

from synkhronos.rules import plain_pickles

RGB_MEAN = (123.68, 116.779, 103.939)


class VGG16(Classifier):
    """Thirteen convolutions of 3 x 3 pixels and three dense layers."""

    n_epochs = 40
    batch_size = 64
    file_batch_size = 128
    learning_rate = 0.002
    lr_step = (15, 30, 35)
    eta = 0.0005
    input_size = 224  # pixels; a multiple of 32
    image_size = 256  # of made-up data
    width = 64  # channels of the first stage
    units = 4096

    def make_data(self):
        return ImageNet_data(self.verbose, self.file_batch_size, self.image_size)

    def network(self, images):
        lasagne.random.set_rng(np.random.RandomState(self.seed))
        layer = InputLayer((None, 3, self.input_size, self.input_size), images)
        for convolutions, times in [(2, 1), (2, 2), (3, 4), (3, 8), (3, 8)]:
            for _ in range(convolutions):
                layer = Convolution3x3(layer, self.width * times)
            layer = MaxPool2DLayer(layer, 2)
        for _ in range(2):
            layer = DropoutLayer(DenseLayer(layer, self.units))
        softmax = lasagne.nonlinearities.softmax
        self.output = DenseLayer(layer, self.data.n_class, nonlinearity=softmax)
        self.params = lasagne.layers.get_all_params(self.output, trainable=True)
        probabilities = lasagne.layers.get_output(self.output)
        return probabilities, lasagne.layers.get_output(self.output, deterministic=True)

    def preprocessing(self):
        """Subtract a constant of each colour, as for the published weights."""
        return {"mean": RGB_MEAN, "scale": 1.0, "std": None}

    def read_batch(self, mode, number):
        """Return images with blue first, as for the published weights."""
        images, labels = super().read_batch(mode, number)
        return images[:, ::-1], labels

    def load_weights(self, file):
        """Begin with the weights of a file of Lasagne's recipes, vgg16.pkl."""
        content = plain_pickles.load(Path(file).read_bytes(), str(file))
        lasagne.layers.set_all_param_values(self.output, content["param values"])


class Convolution3x3(lasagne.layers.Conv2DLayer):
    """A convolution of 3 x 3 pixels, padded by Theano, with the filters as they are."""

    def __init__(self, incoming, n_filters):
        super().__init__(incoming, n_filters, 3, pad=1, W=lasagne.init.HeNormal(gain="relu"))

    def get_output_for(self, input, **kwargs):
        result = T.nnet.conv2d(
            input, self.W, filter_shape=self.get_W_shape(), border_mode=1, filter_flip=False
        )
        return self.nonlinearity(result + self.b.dimshuffle("x", 0, "x", "x"))
