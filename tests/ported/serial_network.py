"""A class in the style of nolearn: fit, predict and score, as scikit-learn's estimators."""

import numpy as np
import theano
import theano.tensor as T
from theano import function


class Network:
    """A classifier with one hidden layer, trained by Adam."""

    def __init__(self, hidden=9, rate=0.02, epochs=3, size=16):
        self.hidden, self.rate, self.epochs, self.size = hidden, rate, epochs, size

    def initialize(self, columns, classes):
        random = np.random.RandomState(4)
        x, y = T.matrix("x"), T.ivector("y")
        w = theano.shared(random.normal(0, 0.3, (columns, self.hidden)), "w")
        v = theano.shared(random.normal(0, 0.3, (self.hidden, classes)), "v")
        p = T.nnet.softmax(T.dot(T.nnet.relu(T.dot(x, w)), v))
        loss = T.nnet.categorical_crossentropy(p, y).mean()
        self.params = [w, v]
        self.train = function([x, y], loss, updates=self.adam(loss, self.params))
        self.evaluate = function([x, y], [loss, T.eq(T.argmax(p, axis=1), y).mean()])
        self.probabilities = function([x], p)

    def adam(self, loss, params):
        count = theano.shared(0.0)
        updates = [(count, count + 1)]
        grads = T.grad(loss, params)
        for param, g in zip(params, grads):
            m, s = (theano.shared(np.zeros_like(param.get_value())) for _ in range(2))
            new_m, new_s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * T.sqr(g)
            step = self.rate * T.sqrt(1 - 0.999 ** (count + 1)) / (1 - 0.9 ** (count + 1))
            updates += [
                (m, new_m),
                (s, new_s),
                (param, param - step * new_m / T.sqrt(new_s + 1e-8)),
            ]
        return updates

    def fit(self, rows, labels):
        self.initialize(rows.shape[1], labels.max() + 1)
        held = len(rows) // 5
        self.history = []
        for _ in range(self.epochs):
            for start in range(held, len(rows), self.size):
                chosen = slice(start, start + self.size)
                self.history.append(float(self.train(rows[chosen], labels[chosen])))
            self.history += [float(value) for value in self.evaluate(rows[:held], labels[:held])]
        return self

    def predict_proba(self, rows):
        return np.concatenate([self.probabilities(rows[k : k + 7]) for k in range(0, len(rows), 7)])

    def predict(self, rows):
        return self.predict_proba(rows).argmax(axis=1)


def main(rows=80, columns=5, classes=3, **options):
    random = np.random.RandomState(1)
    inputs = random.normal(size=(rows, columns))
    labels = inputs[:, :classes].argmax(axis=1).astype("int32")
    network = Network(**options).fit(inputs, labels)
    probabilities, classes = network.predict_proba(inputs), network.predict(inputs)
    return {"history": network.history, "probabilities": probabilities, "classes": classes}


if __name__ == "__main__":
    print(main())
