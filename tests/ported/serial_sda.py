"""Stacked denoising autoencoders: each layer is trained alone, and then all are fine-tuned."""

import numpy as np
import theano
import theano.tensor as T
from theano import function
from theano.sandbox.rng_mrg import MRG_RandomStreams


def gradient_descent(cost, params, rate):
    grads = T.grad(cost, params)
    return [(param, param - rate * g) for param, g in zip(params, grads)]


class Layer:
    def __init__(self, random, below, inside, outside):
        self.w = theano.shared(random.normal(0, 0.3, (inside, outside)), "w")
        self.b = theano.shared(np.zeros(outside), "b")
        self.back = theano.shared(np.zeros(inside), "back")
        self.below, self.output = below, self.encode(below)

    def encode(self, values):
        return T.nnet.sigmoid(T.dot(values, self.w) + self.b)

    def cost(self, streams, corruption):
        mask = streams.binomial(self.below.shape, p=1 - corruption, dtype="float64")
        z = T.nnet.sigmoid(T.dot(self.encode(self.below * mask), self.w.T) + self.back)
        return T.nnet.binary_crossentropy(z, self.below).sum(axis=1).mean()


def main(size=12, sizes=(8, 6, 4), classes=3, epochs=3):
    random, streams = np.random.RandomState(1), MRG_RandomStreams(5)
    rows = random.uniform(size=(size * 2, sizes[0]))
    labels = random.randint(classes, size=size * 2).astype("int32")
    minibatches = [slice(0, size), slice(size, 2 * size)]

    x, y = T.dmatrix("x"), T.ivector("y")
    corruption, rate = T.dscalar("corruption"), T.dscalar("rate")
    layers, top = [], x
    for inside, outside in zip(sizes, sizes[1:]):
        layers.append(Layer(random, top, inside, outside))
        top = layers[-1].output

    costs, inputs = [], [x, theano.In(corruption, value=0.2), theano.In(rate, value=0.02)]
    for layer in layers:
        cost = layer.cost(streams, corruption)
        updates = gradient_descent(cost, [layer.w, layer.b, layer.back], rate)
        pretrain = function(inputs, cost, updates=updates)
        for _ in range(epochs):
            costs += [pretrain(rows[chosen], corruption=0.1) for chosen in minibatches]

    v = theano.shared(np.zeros((sizes[-1], classes)), "v")
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(top, v)), y).mean()
    params = [v] + [param for layer in layers for param in (layer.w, layer.b)]
    updates = gradient_descent(loss, params, rate)
    tune = function([x, y, theano.In(rate, value=0.5)], loss, updates=updates)
    losses = [tune(rows[chosen], labels[chosen]) for _ in range(epochs) for chosen in minibatches]
    return {"costs": costs, "losses": losses, "w": layers[0].w.get_value(), "v": v.get_value()}


if __name__ == "__main__":
    print(main())
