"""Small networks, in Theano and in Keras."""

import numpy as np
import theano
import theano.tensor as T

from support.losses.data import columns, rows, zipped
from support.losses.training import KerasTraining, Training


class Network:
    """Layers that note their parameters."""

    def __init__(self, seed=0):
        self.params, self._rng = [], np.random.RandomState(seed)

    def weight(self, *shape, scale=0.6):
        """Return a new parameter of random numbers."""
        self.params.append(theano.shared(scale * self._rng.normal(size=shape), "w"))
        return self.params[-1]

    def dense(self, x, n_in, n_out):
        """Return a linear layer."""
        return T.dot(x, self.weight(n_in, n_out)) + self.weight(n_out, scale=0.1)

    def hidden(self, x, n_in=4, n_out=5):
        """Return a layer with tanh."""
        return T.tanh(self.dense(x, n_in, n_out))

    def states(self, x, n_in=4, n_out=5):
        """Return the states of a recurrent layer by scan: step, row, unit."""
        w, u = self.weight(n_in, n_out), self.weight(n_out, n_out)
        states, _ = theano.scan(
            lambda now, h, w, u: T.tanh(T.dot(now, w) + T.dot(h, u)),
            x.dimshuffle(1, 0, 2),
            T.zeros((x.shape[0], n_out)),
            non_sequences=[w, u],
            strict=True,
        )
        return states


def of_column(criterion, repeats=True, targets=None, output=T.nnet.sigmoid, **more):
    """Return the training of a network with one output, by a loss of targets and outputs."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    p = output(net.dense(net.hidden(x), 5, 1))
    targets = columns(repeats=repeats) if targets is None else targets
    batches = zipped(rows(repeats=repeats), targets)
    return Training([x, y], criterion(y, p), net.params, batches, **more)


def in_keras(criterion, repeats=True, targets=None, metrics=(), layers=None, **more):
    """Return what makes the training of the same network in Keras, with the same data."""

    def build():
        import keras

        model = keras.models.Sequential(
            [
                *(layers or keras_hidden)(keras.layers),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        return compiled(model, criterion, metrics)

    def make():
        made = columns(repeats=repeats) if targets is None else targets()
        return KerasTraining(build, zipped(rows(repeats=repeats), made), **more)

    return make


def keras_hidden(layers):
    """Return a list of the first layer, made of the layers of Keras."""
    return [layers.Dense(5, activation="tanh", input_shape=(4,))]


def compiled(model, loss, metrics=()):
    """Return a Keras model with weights of a seed, compiled without a C compiler."""
    import keras

    rng = np.random.RandomState(0)
    for layer in model.layers:
        n_trained, values = len(layer.trainable_weights), layer.get_weights()
        trained = [0.6 * rng.normal(size=value.shape) for value in values[:n_trained]]
        layer.set_weights(trained + values[n_trained:])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics), mode="FAST_COMPILE")
    return model


def of_two_views(criterion, repeats=True, common=(), **more):
    """Return the training of a network that both of two views go through."""
    x, other, net = T.dmatrix("x"), T.dmatrix("other"), Network()
    w, v = net.weight(4, 5), net.weight(5, 3)
    a, b = (T.dot(T.tanh(T.dot(each, w)), v) for each in (x, other))
    x_rows = rows(repeats=repeats)
    noise = rows(repeats=repeats, seed=4)
    batches = [(each, each + 0.3 * shift) for each, shift in zip(x_rows, noise)]
    return Training([x, other], criterion(a, b), net.params, batches, **more)
