"""A library in the style of downhill: a class that calls theano.function, and monitors."""

import numpy as np
import theano
import theano.tensor as T


class Trainer:
    """Train by RMSProp with the given loss, inputs and parameters, until patience ends."""

    def __init__(self, loss, inputs, params, monitors, rate=0.005, decay=0.9):
        updates = []
        for param, grad in zip(params, theano.grad(loss, params)):
            mean = theano.shared(np.zeros_like(param.get_value()))
            new = decay * mean + (1 - decay) * T.sqr(grad)
            updates += [(mean, new), (param, param - rate * grad / T.sqrt(new + 1e-6))]
        self.params = params
        self.step = theano.function(inputs, [loss, *monitors], updates=updates, name="step")
        self.evaluate = theano.function(inputs, [loss, *monitors], name="evaluate")

    def iterate(self, train, valid, patience, epochs):
        best, lowest, waited = None, np.inf, 0
        for _ in range(epochs):
            monitored = [self.step(*each) for each in train]
            score = np.mean([self.evaluate(*each)[0] for each in valid])
            yield monitored, score
            waited += 1
            if score < lowest - 1e-3:
                best, lowest, waited = [param.get_value() for param in self.params], score, 0
            if waited == patience:
                break
        for param, value in zip(self.params, best):
            param.set_value(value)


def main(rows=60, columns=6, hidden=7, size=15, epochs=6, patience=2):
    random = np.random.RandomState(1)
    x, y = T.dmatrix("x"), T.dmatrix("y")
    w = theano.shared(random.normal(0, 0.5, (columns, hidden)), "w")
    v = theano.shared(random.normal(0, 0.5, (hidden, 2)), "v")
    h = T.tanh(T.dot(x, w))
    loss = T.sqr(T.dot(h, v) - y).mean() + 1e-3 * abs(w).sum()

    inputs, targets = random.normal(size=(2 * rows, columns)), random.normal(size=(2 * rows, 2))
    parts = [(inputs[k : k + size], targets[k : k + size]) for k in range(0, 2 * rows, size)]
    train, valid = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    trainer = Trainer(loss, [x, y], [w, v], [abs(h).mean(), T.sqr(h).sum()])
    monitored, scores = zip(*trainer.iterate(train, valid, patience, epochs))
    best = np.mean([trainer.evaluate(*each) for each in valid], axis=0)
    return {"monitored": monitored, "scores": scores, "best": best, "w": w.get_value()}


if __name__ == "__main__":
    print(main())
