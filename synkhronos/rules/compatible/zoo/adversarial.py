"""The base of the generative adversarial networks: data, networks of Lasagne's layers, updates."""

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.init import Normal
from lasagne.layers import DenseLayer, InputLayer, ReshapeLayer
from lasagne.nonlinearities import LeakyRectify, rectify, sigmoid
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theanompi.models.data import Cifar10_data
from theanompi.models.data.mnist import MNIST_data
from theanompi.models.model import Model


class Adversarial(Model):
    """A generator and a critic of images; a derived class says what they learn from one another."""

    n_epochs = 100
    batch_size = 64
    data_set = "mnist"  # or "cifar10"
    noise = 100  # inputs of the generator for each image
    width = 64  # channels of the critic's first convolution
    exchanged = "all"  # or "critic": only its parameters are averaged or swapped

    def make_data(self):
        kinds = {"mnist": MNIST_data, "cifar10": Cifar10_data}
        if self.data_set not in kinds:
            raise ValueError(f"data_set must be 'mnist' or 'cifar10', got {self.data_set!r}.")
        return kinds[self.data_set](self.verbose)

    def build(self):
        lasagne.random.set_rng(np.random.RandomState(self.seed))
        self.random = MRG_RandomStreams(self.seed)
        self.images = T.tensor4("images")
        self.shape = self.data.channels, self.data.height, self.data.width
        noise = self.random.uniform((self.images.shape[0], self.noise), -1, 1)
        generator = build_generator(self.noise, self.width, self.shape)
        critic = build_critic(self.width, self.shape)
        self.generated = lasagne.layers.get_output(generator, noise)
        self.scores = [
            lasagne.layers.get_output(critic, each) for each in (self.images, self.generated)
        ]
        self.generator_params = lasagne.layers.get_all_params(generator, trainable=True)
        self.critic_params = lasagne.layers.get_all_params(critic, trainable=True)
        if self.exchanged not in ("all", "critic"):
            raise ValueError(f"exchanged must be 'all' or 'critic', got {self.exchanged!r}.")
        others = self.generator_params if self.exchanged == "all" else []
        self.params = self.critic_params + others

    def compile_sampling(self):
        """Compile the function that makes images; return its input, and zeros for real images."""
        rows = T.iscalar("rows")
        # Only the number of rows of the images is used.
        images = T.zeros((rows, *self.shape), self.images.dtype)
        self.sample_fn = theano.function([rows], self.generated, givens={self.images: images})
        return rows, images

    def load(self, mode, number):
        images, _ = self.data.batch(mode, number)
        # CIFAR-10's are bytes, MNIST's numbers up to 1.
        largest = 255 if self.data_set == "cifar10" else 1
        self.loaded = images.astype(theano.config.floatX) / largest

    def part(self, number):
        """Return the images of a sub-batch."""
        bounds = [each * len(self.loaded) // self.n_subb for each in (number, number + 1)]
        return self.loaded[slice(*bounds)]


def build_generator(noise, width, shape):
    """Return the last layer of a network from noise to images of a shape."""
    channels, height = shape[0], shape[1] // 4
    layer = InputLayer((None, noise))
    layer = normalized(DenseLayer(layer, 16 * width, W=Normal(0.02), nonlinearity=None), rectify)
    layer = DenseLayer(layer, 2 * width * height**2, W=Normal(0.02), nonlinearity=None)
    layer = ReshapeLayer(normalized(layer, rectify), ([0], 2 * width, height, height))
    layer = Convolution5x5(Doubled(layer), width, nonlinearity=None)
    layer = normalized(layer, rectify)
    return Convolution5x5(Doubled(layer), channels, nonlinearity=sigmoid)


def build_critic(width, shape):
    """Return the last layer of a network from images to a score each."""
    leaky = LeakyRectify(0.2)
    layer = InputLayer((None, *shape))
    layer = Convolution5x5(layer, width, stride=2, nonlinearity=leaky)
    layer = Convolution5x5(layer, 2 * width, stride=2, nonlinearity=leaky)
    layer = DenseLayer(layer, 16 * width, W=Normal(0.02), nonlinearity=leaky)
    return DenseLayer(layer, 1, W=Normal(0.02), b=None, nonlinearity=None)


def normalized(layer, nonlinearity):
    """Return a layer that normalizes another one, and then applies a function."""
    return lasagne.layers.NonlinearityLayer(Normalization(layer), nonlinearity)


class Convolution5x5(lasagne.layers.Conv2DLayer):
    """A convolution of 5 x 5 pixels, padded by Theano."""

    def __init__(self, incoming, n_filters, stride=1, nonlinearity=rectify):
        super().__init__(
            incoming, n_filters, 5, stride, pad=2, W=Normal(0.02), nonlinearity=nonlinearity
        )

    def get_output_for(self, input, **kwargs):
        shape = self.get_W_shape()
        result = T.nnet.conv2d(
            input, self.W, filter_shape=shape, border_mode=2, subsample=self.stride
        )
        return self.nonlinearity(result + self.b.dimshuffle("x", 0, "x", "x"))


class Doubled(lasagne.layers.Layer):
    """Repeat each pixel twice, both ways. Lasagne 0.1 has no such layer."""

    def get_output_shape_for(self, input_shape):
        return (*input_shape[:2], *(2 * length for length in input_shape[2:]))

    def get_output_for(self, input, **kwargs):
        return input.repeat(2, axis=2).repeat(2, axis=3)


class Normalization(lasagne.layers.Layer):
    """Normalize each feature or channel over the batch, then scale and shift it."""

    def __init__(self, incoming, epsilon=1e-5):
        super().__init__(incoming)
        self.epsilon = epsilon
        shape = (self.input_shape[1],)
        self.gamma = self.add_param(lasagne.init.Constant(1), shape, "gamma")
        self.beta = self.add_param(lasagne.init.Constant(0), shape, "beta")

    def get_output_for(self, input, **kwargs):
        axes = (0,) + tuple(range(2, input.ndim))
        pattern = ("x", 0) + ("x",) * (input.ndim - 2)
        mean, variance = input.mean(axes, keepdims=True), input.var(axes, keepdims=True)
        scaled = (input - mean) / T.sqrt(variance + self.epsilon)
        return scaled * self.gamma.dimshuffle(pattern) + self.beta.dimshuffle(pattern)


def rmsprop(cost, params, rate, rho=0.9, momentum=0.5, epsilon=1e-6):
    """Return updates of RMSProp with momentum; their state stays on each rank.

    Tieleman and Hinton, "Lecture 6.5: RMSProp", 2012.
    """
    updates = []
    for param, gradient in zip(params, T.grad(cost, params)):
        zeros = np.zeros_like(param.get_value(borrow=True))
        kinds = {"broadcastable": param.broadcastable}
        squares = theano.shared(zeros, "squares", **kinds)
        velocity = theano.shared(zeros, "velocity", **kinds)
        new_squares = rho * squares + (1 - rho) * gradient**2
        step = T.cast(rate, param.dtype) * gradient / T.sqrt(new_squares + epsilon)
        new_velocity = momentum * velocity + step
        updates += [(squares, new_squares), (velocity, new_velocity), (param, param - new_velocity)]
    return updates
