"""Logistic regression or an MLP on minibatches by index, with early stopping, as in tutorials."""

import numpy as np
import theano
import theano.tensor as T
from theano import function


def load(rows, columns, classes, seed):
    random = np.random.RandomState(seed)
    pictures = random.normal(size=(rows, columns))
    scores = pictures.dot(np.random.RandomState(0).normal(size=(columns, classes)))
    labels = (scores + random.normal(scale=3, size=scores.shape)).argmax(axis=1)
    return theano.shared(pictures), T.cast(theano.shared(labels.astype("float64")), "int32")


def main(length=120, sizes=(8, 3), size=20, epochs=8, patience=3):
    train_x, train_y = load(length, sizes[0], sizes[-1], seed=1)
    valid_x, valid_y = load(length, sizes[0], sizes[-1], seed=2)
    index, x, y = T.lscalar("index"), T.matrix("x"), T.ivector("y")
    random = np.random.RandomState(3)
    params, top = [], x
    for inside, outside in zip(sizes, sizes[1:]):
        top = T.tanh(top) if params else top
        params.append(theano.shared(random.normal(0, 0.1, (inside, outside)), "w"))
        params.append(theano.shared(np.zeros(outside), "b"))
        top = T.dot(top, params[-2]) + params[-1]
    p = T.nnet.softmax(top)
    cost = -T.mean(T.log(p)[T.arange(y.shape[0]), y])
    errors = T.mean(T.neq(T.argmax(p, axis=1), y))

    grads = [T.grad(cost, param) for param in params]
    batch = slice(index * size, (index + 1) * size)
    train = function(
        [index],
        cost,
        updates=[(param, param - 0.5 * g) for param, g in zip(params, grads)],
        givens={x: train_x[batch], y: train_y[batch]},
    )
    validate = function([index], errors, givens={x: valid_x[batch], y: valid_y[batch]})

    costs, scores, best_score, best = [], [], np.inf, None
    for epoch in range(epochs):
        costs += [train(number) for number in range(length // size)]
        scores.append(np.mean([validate(number) for number in range(length // size)]))
        if scores[-1] < 0.995 * best_score:
            best_score, best_epoch = scores[-1], epoch
            best = [param.get_value() for param in params]
        if epoch - best_epoch >= patience:
            break
    for param, value in zip(params, best):
        param.set_value(value)
    again = np.mean([validate(number) for number in range(length // size)])
    return {"costs": costs, "scores": scores, "again": again, "w": params[0].get_value()}


if __name__ == "__main__":
    print(main())
