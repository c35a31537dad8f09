"""An RBM trained by persistent contrastive divergence; its chain is a shared variable."""

import numpy as np
import theano
import theano.tensor as T
from theano import function
from theano.sandbox.rng_mrg import MRG_RandomStreams


def main(size=10, visible=8, hidden=5, k=2, steps=6):
    random = np.random.RandomState(1)
    rows = random.binomial(1, 0.3, size=(steps * size, visible)).astype("float64")
    streams = MRG_RandomStreams(7)

    x = T.dmatrix("x")
    w = theano.shared(random.normal(0, 0.2, (visible, hidden)), "w")
    b, c = theano.shared(np.zeros(visible), "b"), theano.shared(np.zeros(hidden), "c")
    chain = theano.shared(random.binomial(1, 0.5, (size, visible)).astype("float64"), "chain")
    params = [w, b, c]

    def free_energy(v):
        return -T.dot(v, b) - T.nnet.softplus(T.dot(v, w) + c).sum(axis=1)

    def drawn(p):
        return streams.binomial(p.shape, p=p, dtype="float64")

    end = chain
    for _ in range(k):
        h = drawn(T.nnet.sigmoid(T.dot(end, w) + c))
        end = drawn(T.nnet.sigmoid(T.dot(h, w.T) + b))

    cost = T.mean(free_energy(x)) - T.mean(free_energy(end))
    grads = T.grad(cost, params, consider_constant=[end])
    updates = [(param, param - 0.1 * g) for param, g in zip(params, grads)]
    train = function([x], cost, updates=[*updates, (chain, end)])

    costs = [train(rows[number * size : (number + 1) * size]) for number in range(steps)]
    return {"costs": costs, "chain": chain.get_value(), "w": w.get_value(), "b": b.get_value()}


if __name__ == "__main__":
    print(main())
