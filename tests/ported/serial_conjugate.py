"""Logistic regression by conjugate gradients of SciPy, which sets the parameters before calls."""

import numpy as np
import theano
import theano.tensor as T
from scipy.optimize import fmin_cg
from theano import function


def main(rows=90, columns=5, classes=3, maxiter=6):
    random = np.random.RandomState(1)
    pictures = random.normal(size=(rows, columns))
    labels = random.randint(classes, size=rows, dtype="int32")

    x, y = T.dmatrix("x"), T.ivector("y")
    theta = theano.shared(np.zeros((columns + 1) * classes), "theta")
    w = theta[: columns * classes].reshape((columns, classes))
    p = T.nnet.softmax(T.dot(x, w) + theta[columns * classes :])
    loss = T.nnet.categorical_crossentropy(p, y).mean() + 0.01 * T.sqr(theta).sum()
    cost, grad = function([x, y], loss), function([x, y], T.grad(loss, theta))

    def cost_at(value):
        theta.set_value(value, borrow=True)
        return float(cost(pictures, labels))

    def gradient_at(value):
        theta.set_value(value, borrow=True)
        return grad(pictures, labels)

    costs = []
    best = fmin_cg(
        cost_at,
        np.zeros((columns + 1) * classes),
        gradient_at,
        callback=lambda value: costs.append(cost_at(value)),
        disp=False,
        maxiter=maxiter,
    )
    return {"costs": costs, "best": best}


if __name__ == "__main__":
    print(main())
