"""A small LeNet with momentum, whose graph has the size of the minibatch in it."""

import numpy as np
import theano
import theano.tensor as T
from theano import function
from theano.tensor.nnet import conv2d
from theano.tensor.signal.pool import pool_2d


def main(size=12, steps=4, side=10, filters=(2, 3)):
    random = np.random.RandomState(1)
    pictures = random.uniform(size=(size * steps, side * side))
    labels = random.randint(4, size=size * steps).astype("int32")

    x, y = T.matrix("x"), T.ivector("y")
    params = []

    def parameter(*shape):
        params.append(theano.shared(random.normal(0, 0.3, size=shape)))
        return params[-1]

    top, width, channels = x.reshape((size, 1, side, side)), side, 1
    for number in filters:
        top = conv2d(top, parameter(number, channels, 3, 3))
        width, channels = (width - 2) // 2, number
        top = T.tanh(pool_2d(top, (2, 2), ignore_border=True))
        top = top + parameter(number).dimshuffle("x", 0, "x", "x")
    top = T.tanh(T.dot(top.flatten(2), parameter(channels * width * width, 8)))
    p = T.nnet.softmax(T.dot(top, parameter(8, 4)))
    cost = T.nnet.categorical_crossentropy(p, y).mean()

    grads = T.grad(cost, params)
    updates = []
    for param, g in zip(params, grads):
        velocity = theano.shared(np.zeros_like(param.get_value()))
        step = 0.9 * velocity - 0.1 * g
        updates += [(velocity, step), (param, param + step)]
    train = function([x, y], [cost, T.neq(T.argmax(p, axis=1), y).mean()], updates=updates)

    found = []
    for number in range(steps):
        chosen = slice(number * size, (number + 1) * size)
        found.append(train(pictures[chosen], labels[chosen]))
    return {"found": found, "filters": params[0].get_value(), "last": params[-1].get_value()}


if __name__ == "__main__":
    print(main())
