"""Two small networks with their minibatches, and how serial Theano trains them on the CPU.

As a program it is the reference: ``python networks.py cnn 20 48 result.npz``.
"""

import sys

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.signal.pool import pool_2d

RATE, MOMENTUM = 0.05, 0.9
CLASSES = 10
SIDE = 16  # of the images


class Network:
    """The graph of a network: nothing in it knows about ranks or devices.

    kind : "mlp" or "cnn"
    """

    def __init__(self, kind, seed=1):
        self._random = np.random.RandomState(seed)
        self.params = []
        self.x, self.y = (T.fmatrix("x") if kind == "mlp" else T.ftensor4("x")), T.ivector("y")
        layers = self._mlp if kind == "mlp" else self._cnn
        scores = layers(self.x)
        self.loss = T.nnet.categorical_crossentropy(T.nnet.softmax(scores), self.y).mean()
        self.grads = T.grad(self.loss, self.params)

    def _mlp(self, x):
        hidden = T.tanh(self._dense(x, SIDE * SIDE, 128))
        hidden = T.nnet.relu(self._dense(hidden, 128, 64))
        return self._dense(hidden, 64, CLASSES)

    def _cnn(self, x):
        layer = self._convolution(x, (8, 1, 3, 3))
        layer = self._convolution(layer, (16, 8, 3, 3))
        return self._dense(layer.flatten(2), 16 * 2 * 2, CLASSES)

    def _convolution(self, x, shape):
        filters = self._weights(shape, np.prod(shape[1:]))
        bias = self._shared(np.zeros(shape[0], "float32"))
        layer = T.nnet.conv2d(x, filters, filter_shape=shape) + bias.dimshuffle("x", 0, "x", "x")
        return pool_2d(T.nnet.relu(layer), (2, 2), ignore_border=True)

    def _dense(self, x, n_in, n_out):
        return T.dot(x, self._weights((n_in, n_out), n_in)) + self._shared(
            np.zeros(n_out, "float32")
        )

    def _weights(self, shape, n_in):
        return self._shared(self._random.normal(scale=n_in**-0.5, size=shape).astype("float32"))

    def _shared(self, value):
        self.params.append(theano.shared(value, f"p{len(self.params)}"))
        return self.params[-1]


def momentum(params, grads):
    """Return the updates of gradient descent with momentum."""
    updates = []
    for param, grad in zip(params, grads):
        velocity = theano.shared(np.zeros_like(param.get_value()), f"v_{param}")
        step = np.float32(MOMENTUM) * velocity - np.float32(RATE) * grad
        updates += [(velocity, step), (param, param + step)]
    return updates


def minibatches(kind, steps, n_rows=None, seed=2):
    """Return (images, labels) of each step, which can be learnt; their rows vary by default."""
    random = np.random.RandomState(seed)
    prototypes = random.normal(size=(CLASSES, 1, SIDE, SIDE))
    batches = []
    for step in range(steps):
        rows = n_rows or (48, 47, 33, 5, 1)[step % 5]
        labels = random.randint(0, CLASSES, size=rows).astype("int32")
        images = prototypes[labels] + random.normal(size=(rows, 1, SIDE, SIDE))
        images = images.astype("float32")
        batches.append((images.reshape(rows, -1) if kind == "mlp" else images, labels))
    return batches


def serial(kind, steps, n_rows):
    """Train with plain Theano; return the losses and the parameters."""
    network = Network(kind)
    updates = momentum(network.params, network.grads)
    step = theano.function([network.x, network.y], network.loss, updates=updates)
    losses = [float(step(x, y)) for x, y in minibatches(kind, steps, n_rows)]
    return losses, [param.get_value() for param in network.params]


if __name__ == "__main__":
    kind, steps, n_rows, file = sys.argv[1:]
    losses, params = serial(kind, int(steps), int(n_rows))
    np.savez(file, losses, *params)
