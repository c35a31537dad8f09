"""Networks to train, in plain Theano: of dense layers, a small CNN, a small ResNet."""

import numpy as np
from theano.tensor.nnet import bn
from theano.tensor.signal.pool import pool_2d

from synkhronos._host import library
from synkhronos._host import tensor as T

CLASSES = 10


class Network:
    """A classifier, of float32, with the same random weights each time.

    Attributes
    ----------
    x, y : theano variable
        Rows, and their classes as int32.
    shape : tuple
        Of a row.
    params : list of shared variables
    scores : matrix variable
        Before the softmax.
    loss : scalar variable
        Mean cross-entropy.
    averages : list of (shared variable, expression)
        The updates of running statistics.
    """

    title = ""
    shape = ()

    def __init__(self):
        self._random = np.random.RandomState(1)
        self.params, self.averages = [], []
        self.x = T.TensorType("float32", (False,) * (1 + len(self.shape)))("x")
        self.y = T.ivector("y")
        self.scores = self._build(self.x)
        probabilities = T.nnet.softmax(self.scores)
        self.loss = T.nnet.categorical_crossentropy(probabilities, self.y).mean()

    def rows(self, count):
        """Return `count` random rows, and their classes."""
        random = np.random.RandomState(2)
        x = random.rand(count, *self.shape).astype("float32")
        return x, random.randint(0, CLASSES, count).astype("int32")

    @property
    def n_numbers(self):
        """The number of elements of all parameters."""
        return sum(param.get_value(borrow=True).size for param in self.params)

    def _build(self, x):
        raise NotImplementedError

    def _weights(self, *shape, fan_in):
        values = self._random.normal(scale=(2 / fan_in) ** 0.5, size=shape)
        return self._param(values)

    def _param(self, values):
        name = "wb"[len(self.params) % 2] + str(len(self.params) // 2)
        self.params.append(library.shared(np.asarray(values, "float32"), name))
        return self.params[-1]

    def _dense(self, x, n_in, n_out):
        return T.dot(x, self._weights(n_in, n_out, fan_in=n_in)) + self._param(np.zeros(n_out))


class Mlp(Network):
    """Dense layers with rectifiers, from 784 to 10."""

    shape = (784,)

    def __init__(self, units=(512, 512)):
        self.units = units
        self.title = f"mlp 784-{'-'.join(map(str, units))}-{CLASSES}"
        super().__init__()

    def _build(self, x):
        n_in = self.shape[0]
        for n_out in self.units:
            x, n_in = T.nnet.relu(self._dense(x, n_in, n_out)), n_out
        return self._dense(x, n_in, CLASSES)


class Dense(Mlp):
    """784 to 10 layers of 1024, to 10: 41 MB of gradients in 22 arrays."""

    def __init__(self):
        super().__init__([1024] * 10)
        self.title = "dense 784-10x1024-10"


class Cnn(Network):
    """Two convolutions of 32 channels and 5x5, each with pooling of 2x2, and 256 units."""

    title = "cnn 32 5x5, pool, 32 5x5, pool, 256, 10"
    shape = (1, 28, 28)

    def _build(self, x):
        for n_in in (1, 32):
            x = T.nnet.conv2d(x, self._weights(32, n_in, 5, 5, fan_in=25 * n_in))
            x = T.nnet.relu(x + self._param(np.zeros(32)).dimshuffle("x", 0, "x", "x"))
            x = pool_2d(x, (2, 2), ignore_border=True)
        x = T.nnet.relu(self._dense(x.flatten(2), 32 * 4 * 4, 256))
        return self._dense(x, 256, CLASSES)


class ResNet(Network):
    """Three stages of one residual block each, of 8, 16 and 32 channels, with batch normalisation.

    The blocks are those of two 3x3 convolutions of He et al., "Deep residual learning for image
    recognition", arXiv:1512.03385; with the first convolution and the dense layer it is 8 deep.
    """

    title = "ResNet-8 of 8-16-32 channels, 3x16x16"
    shape = (3, 16, 16)

    def _build(self, x):
        x = T.nnet.relu(self._convolve(x, 3, 8, 3))
        n_in = 8
        for n_out, stride in ((8, 1), (16, 2), (32, 2)):
            branch = T.nnet.relu(self._convolve(x, n_in, n_out, 3, stride))
            branch = self._convolve(branch, n_out, n_out, 3)
            shortcut = x if n_in == n_out else self._convolve(x, n_in, n_out, 1, stride)
            x, n_in = T.nnet.relu(branch + shortcut), n_out
        return self._dense(x.mean(axis=(2, 3)), n_in, CLASSES)

    def _convolve(self, x, n_in, n_out, size, stride=1):
        weights = self._weights(n_out, n_in, size, size, fan_in=n_in * size * size)
        x = T.nnet.conv2d(x, weights, border_mode="half", subsample=(stride, stride))
        scale, shift = self._param(np.ones(n_out)), self._param(np.zeros(n_out))
        running = [library.shared(np.zeros(n_out, "float32")) for _ in range(2)]
        channels = ("x", 0, "x", "x")
        x, _, _, mean, variance = bn.batch_normalization_train(
            x,
            scale.dimshuffle(channels),
            shift.dimshuffle(channels),
            "spatial",
            running_mean=running[0].dimshuffle(channels),
            running_var=running[1].dimshuffle(channels),
        )
        mean, variance = mean.flatten(), variance.flatten()
        self.averages += zip(running, (mean, variance))
        return x


NETWORKS = {"mlp": Mlp, "cnn": Cnn, "resnet": ResNet}  # of ``synkhronos bench training``
