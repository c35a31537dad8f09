"""An example in the style of Lasagne's MNIST: layers, dropout, and minibatches in random order."""

import lasagne
import numpy as np
import theano.tensor as T
from lasagne.layers import DenseLayer, DropoutLayer, InputLayer, get_all_params, get_output
from theano import function


def minibatches(inputs, targets, size, random):
    order = random.permutation(len(inputs))
    for start in range(0, len(inputs) - size + 1, size):
        chosen = order[start : start + size]
        yield inputs[chosen], targets[chosen]


def main(rows=60, columns=10, hidden=12, classes=4, size=15, epochs=3):
    random = np.random.RandomState(1)
    lasagne.random.set_rng(random)
    pictures = random.normal(size=(rows, columns))
    labels = random.randint(classes, size=rows).astype("int32")

    x, y = T.matrix("x"), T.ivector("y")
    network = DenseLayer(DropoutLayer(InputLayer((None, columns), x), p=0.2), hidden)
    network = DenseLayer(
        DropoutLayer(network), classes, nonlinearity=lasagne.nonlinearities.softmax
    )
    params = get_all_params(network, trainable=True)

    loss = lasagne.objectives.categorical_crossentropy(get_output(network), y).mean()
    grads = T.grad(loss, params)
    updates = lasagne.updates.nesterov_momentum(grads, params, learning_rate=0.1, momentum=0.9)
    train = function([x, y], loss, updates=updates)

    sure = get_output(network, deterministic=True)
    test_loss = lasagne.objectives.categorical_crossentropy(sure, y).mean()
    accuracy = T.mean(T.eq(T.argmax(sure, axis=1), y), dtype="float64")
    validate = function([x, y], [test_loss, accuracy])

    losses, scores = [], []
    for _ in range(epochs):
        losses += [train(*each) for each in minibatches(pictures, labels, size, random)]
        scores.append(validate(pictures, labels))
    return {"losses": losses, "scores": scores, "w": params[0].get_value()}


if __name__ == "__main__":
    print(main())
