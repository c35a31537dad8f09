"""An LSTM by scan that reads sequences with time on axis 0."""

import numpy as np
import theano
import theano.tensor as T
from theano import function


def main(rows=10, times=4, columns=3, hidden=5, steps=4):
    random = np.random.RandomState(1)
    sequences = random.normal(size=(times, rows, columns))
    kept = (np.arange(times)[:, None] < random.randint(1, times + 1, rows)).astype("float64")
    labels = (sequences[0, :, 0] > 0).astype("float64")

    x, mask, y = T.dtensor3("x"), T.dmatrix("mask"), T.dvector("y")
    w = theano.shared(random.normal(0, 0.5, (columns, 4 * hidden)), "w")
    u = theano.shared(random.normal(0, 0.5, (hidden, 4 * hidden)), "u")
    v = theano.shared(random.normal(0, 0.5, hidden), "v")
    params = [w, u, v]

    def step(x_t, mask_t, h, c):
        gates = T.dot(x_t, w) + T.dot(h, u)
        i, f, o = (T.nnet.sigmoid(gates[:, k * hidden : (k + 1) * hidden]) for k in range(3))
        new = f * c + i * T.tanh(gates[:, 3 * hidden :])
        new = mask_t[:, None] * new + (1 - mask_t)[:, None] * c
        return o * T.tanh(new), new

    first = T.zeros((x.shape[1], hidden))
    (h, _), _ = theano.scan(step, sequences=[x, mask], outputs_info=[first, first])
    pooled = (h * mask[:, :, None]).sum(axis=0) / mask.sum(axis=0)[:, None]
    cost = T.nnet.binary_crossentropy(T.nnet.sigmoid(T.dot(pooled, v)), y).mean()

    updates = [(param, param - 0.5 * g) for param, g in zip(params, T.grad(cost, params))]
    train = function([x, mask, y], cost, updates=updates)

    costs = [train(sequences, kept, labels) for _ in range(steps)]
    return {"costs": costs, **{param.name: param.get_value() for param in params}}


if __name__ == "__main__":
    print(main())
