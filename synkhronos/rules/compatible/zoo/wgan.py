"""A Wasserstein GAN for MNIST, of Lasagne's layers, in Theano-MPI's contract.

The critic learns from each batch. The generator learns after every second one; in the beginning,
and after each hundredth of its updates, after 50 batches, so that the critic is near its optimum.
Both update their parameters themselves, so BSP takes it with sync type avg, or swap.

References
----------
Arjovsky, Chintala and Bottou, "Wasserstein GAN", arXiv:1701.07875.
"""

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.init import Normal
from lasagne.layers import DenseLayer, InputLayer, ReshapeLayer
from lasagne.nonlinearities import LeakyRectify, rectify, sigmoid
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theanompi.models.data.mnist import MNIST_data
from theanompi.models.model import Model, refuse_cdd


class WGAN(Model):
    n_epochs = 100
    batch_size = 64
    learning_rate = 5e-5
    noise = 100  # inputs of the generator for each image
    width = 64  # channels of the critic's first convolution
    clip = 0.01  # of the critic's parameters
    critic_steps = 2
    critic_steps_at_first = 50
    exchanged = "all"  # or "critic": only its parameters are averaged or swapped

    def make_data(self):
        return MNIST_data(self.verbose)

    def build(self):
        lasagne.random.set_rng(np.random.RandomState(self.seed))
        self.random = MRG_RandomStreams(self.seed)
        self.images = T.tensor4("images")
        noise = self.random.uniform((self.images.shape[0], self.noise), -1, 1)
        generator = build_generator(self.noise, self.width)
        critic = build_critic(self.width)
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
        self.generator_updates = self.steps_since = 0
        self.generator_cost = 0.0

    def costs(self):
        """Return the cost of the critic, and that of the generator."""
        real, generated = self.scores
        return generated.mean() - real.mean(), -generated.mean()

    def compile_iter_fns(self, *args, **kwargs):
        refuse_cdd(self, kwargs.get("sync_type"))
        critic_cost, generator_cost = self.costs()
        updates = rmsprop(critic_cost, self.critic_params, self.shared_lr)
        if self.clip:
            updates = [
                (variable, T.clip(new, -self.clip, self.clip))
                if variable in self.critic_params
                else (variable, new)
                for variable, new in updates
            ]
        self.critic_fn = theano.function([self.images], critic_cost, updates=updates)
        rows = T.iscalar("rows")
        updates = rmsprop(generator_cost, self.generator_params, self.shared_lr)
        # Only the number of rows of the images is used.
        images = T.zeros((rows, 1, 28, 28), self.images.dtype)
        self.generator_fn = theano.function(
            [rows], generator_cost, updates=updates, givens={self.images: images}
        )
        self.val_fn = theano.function([self.images], [critic_cost, generator_cost])
        self.sample_fn = theano.function([rows], self.generated, givens={self.images: images})

    def load(self, mode, number):
        images, _ = self.data.batch(mode, number)
        self.loaded = images.astype(theano.config.floatX)

    def part(self, number):
        """Return the images of a sub-batch."""
        bounds = [each * len(self.loaded) // self.n_subb for each in (number, number + 1)]
        return self.loaded[slice(*bounds)]

    def train_batch(self, part):
        """Update the critic, and the generator when it is due; return the cost of each."""
        images = self.part(part)
        critic_cost = self.critic_fn(images)
        self.steps_since += 1
        at_first = self.generator_updates < 5 or self.generator_updates % 100 == 0
        if self.steps_since >= (self.critic_steps_at_first if at_first else self.critic_steps):
            self.generator_cost = float(self.generator_fn(len(images)))
            self.generator_updates += 1
            self.steps_since = 0
        return critic_cost, self.generator_cost

    def val_batch(self, part):
        critic_cost, generator_cost = self.val_fn(self.part(part))
        return critic_cost, generator_cost, 0.0

    def adjust_hyperp(self, epoch):
        """Let the learning rate fall in the second half, in a line to zero."""

        def share(number):
            return min(1.0, 2 * (1 - number / self.n_epochs))

        if epoch < self.n_epochs:
            self.scale_lr(max(share(epoch + 1), 0.0) / share(epoch))

    def print_info(self, recorder, verbose=False):
        if verbose:
            print(f"updates of the generator: {self.generator_updates}")


def build_generator(noise, width):
    """Return the last layer of a network from noise to images of 28 x 28 pixels."""
    layer = InputLayer((None, noise))
    layer = normalized(DenseLayer(layer, 16 * width, W=Normal(0.02), nonlinearity=None), rectify)
    layer = DenseLayer(layer, 2 * width * 7 * 7, W=Normal(0.02), nonlinearity=None)
    layer = ReshapeLayer(normalized(layer, rectify), ([0], 2 * width, 7, 7))
    layer = Convolution(Doubled(layer), width, nonlinearity=None)
    layer = normalized(layer, rectify)
    return Convolution(Doubled(layer), 1, nonlinearity=sigmoid)


def build_critic(width):
    """Return the last layer of a network from images to a score each."""
    leaky = LeakyRectify(0.2)
    layer = InputLayer((None, 1, 28, 28))
    layer = Convolution(layer, width, stride=2, nonlinearity=leaky)
    layer = Convolution(layer, 2 * width, stride=2, nonlinearity=leaky)
    layer = DenseLayer(layer, 16 * width, W=Normal(0.02), nonlinearity=leaky)
    return DenseLayer(layer, 1, W=Normal(0.02), b=None, nonlinearity=None)


def normalized(layer, nonlinearity):
    return lasagne.layers.NonlinearityLayer(Normalization(layer), nonlinearity)


class Convolution(lasagne.layers.Conv2DLayer):
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
        updates += [
            (squares, new_squares),
            (velocity, new_velocity),
            (param, param - new_velocity),
        ]
    return updates
