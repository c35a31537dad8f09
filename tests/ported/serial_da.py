"""A denoising autoencoder whose function has inputs with values: corruption and learning rate."""

import numpy as np
import theano
import theano.tensor as T
from theano import function
from theano.tensor.shared_randomstreams import RandomStreams


def main(size=10, visible=8, hidden=5, epochs=3, minibatches=4):
    random = np.random.RandomState(1)
    rows = random.uniform(size=(size * minibatches, visible))
    streams = RandomStreams(5)

    x, corruption, rate = T.dmatrix("x"), T.dscalar("corruption"), T.dscalar("rate")
    w = theano.shared(random.normal(0, 0.3, (visible, hidden)), "w")
    b, c = theano.shared(np.zeros(visible), "b"), theano.shared(np.zeros(hidden), "c")
    params = [w, b, c]

    mask = streams.binomial(x.shape, n=1, p=1 - corruption, dtype="float64")
    z = T.nnet.sigmoid(T.dot(T.nnet.sigmoid(T.dot(x * mask, w) + c), w.T) + b)
    cost = T.nnet.binary_crossentropy(z, x).sum(axis=1).mean()

    grads = T.grad(cost, params)
    updates = [(param, param - rate * g) for param, g in zip(params, grads)]
    inputs = [x, theano.In(corruption, value=0.3), theano.In(rate, value=0.1)]
    train = function(inputs, cost, updates=updates)

    costs = []
    for epoch in range(epochs):
        for number in range(minibatches):
            chosen = rows[number * size : (number + 1) * size]
            costs.append(train(chosen, rate=0.1 / (epoch + 1)) if epoch else train(chosen))
    return {"costs": costs, **{param.name: param.get_value() for param in params}}


if __name__ == "__main__":
    print(main())
