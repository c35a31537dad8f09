"""An LSTM that classifies sentences, in plain Theano, in Theano-MPI's contract.

    words ──▶ embedding ──▶ LSTM ──▶ mean over the words ──▶ dropout ──▶ softmax

Adadelta updates the parameters, so BSP takes it with sync type avg. Validation asks for the end of
training when the error has not fallen for `patience` epochs.

References
----------
Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9, 1997.
Zeiler, "Adadelta: an adaptive learning rate method", arXiv:1212.5701.
"""

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theanompi.models.data import IMDB_data
from theanompi.models.model import Model, refuse_cdd


class LSTM(Model):
    """One layer of LSTM units over the words of a sentence."""

    n_epochs = 20
    batch_size = 16
    n_words = 10000
    maxlen = 100  # words of the longest sentence that is taken
    units = 128
    learning_rate = 1.0  # adadelta's own rates are multiplied with it
    dropout = 0.5
    patience = 10

    def make_data(self):
        return IMDB_data(self.verbose, self.n_words, self.maxlen)

    def build(self):
        self.words, self.mask, self.labels = T.lmatrix("words"), T.matrix("mask"), T.lvector("y")
        random = np.random.RandomState(self.seed)
        units, classes = self.units, self.data.n_class

        def parameter(value, name):
            return theano.shared(value.astype(theano.config.floatX), name)

        def orthogonal():
            return np.linalg.svd(random.normal(size=(units, units)))[0]

        self.embedding = parameter(0.01 * random.normal(size=(self.n_words, units)), "embedding")
        # Columns of the three gates, and of what is written into the cells.
        self.W = parameter(np.hstack([orthogonal() for _ in range(4)]), "W")
        self.U = parameter(np.hstack([orthogonal() for _ in range(4)]), "U")
        self.b = parameter(np.zeros(4 * units), "b")
        self.V = parameter(0.01 * random.normal(size=(units, classes)), "V")
        self.c = parameter(np.zeros(classes), "c")
        self.params = [self.embedding, self.W, self.U, self.b, self.V, self.c]
        means = self.mean_of_states()
        self.random = MRG_RandomStreams(self.seed)
        kept = 1 - self.dropout
        dropped = means * self.random.binomial(means.shape, p=kept, dtype=means.dtype) / kept
        self.graphs = [self.costs(each) for each in (dropped, means)]
        self.best, self.worse_epochs, self.errors = np.inf, 0, []

    def mean_of_states(self):
        """Return for each sentence the mean of the LSTM's outputs after each word."""
        rows, units = self.words.shape[1], self.units
        inputs = T.dot(self.embedding[self.words], self.W) + self.b

        def step(mask, inputs, state, cells, U):
            gates = inputs + T.dot(state, U)
            into, forget, out = (
                T.nnet.sigmoid(gates[:, number * units : (number + 1) * units])
                for number in range(3)
            )
            new_cells = forget * cells + into * T.tanh(gates[:, 3 * units :])
            new_state = out * T.tanh(new_cells)
            mask = mask.dimshuffle(0, "x")
            return [mask * new + (1 - mask) * old
                    for new, old in ((new_state, state), (new_cells, cells))]  # fmt: skip

        zeros = T.zeros((rows, units), theano.config.floatX)
        (states, _), _ = theano.scan(
            step, [self.mask, inputs], [zeros, zeros], [self.U], strict=True
        )
        mask = self.mask.dimshuffle(0, 1, "x")
        return (states * mask).sum(axis=0) / mask.sum(axis=0)

    def costs(self, means):
        """Return the cost, and the fraction of sentences that are classified wrongly."""
        probabilities = T.nnet.softmax(T.dot(means, self.V) + self.c)
        cost = T.nnet.categorical_crossentropy(probabilities, self.labels).mean()
        wrong = T.neq(probabilities.argmax(axis=1), self.labels)
        return cost, T.cast(wrong, theano.config.floatX).mean()

    def compile_iter_fns(self, *args, **kwargs):
        refuse_cdd(self, kwargs.get("sync_type"))
        (cost, error), tested = self.graphs
        inputs = [self.words, self.mask, self.labels]
        updates = adadelta(cost, self.params, self.shared_lr)
        self.train_iter_fn = theano.function(inputs, [cost, error], updates=updates)
        self.val_iter_fn = theano.function(inputs, list(tested))

    def load(self, mode, number):
        (words, mask), labels = self.data.batch(mode, number)
        self.loaded = words, mask.astype(theano.config.floatX), labels

    def part(self, number):
        """Return a sub-batch."""
        bounds = [each * len(self.loaded[2]) // self.n_subb for each in (number, number + 1)]
        return [each[..., slice(*bounds)] for each in self.loaded]

    def train_batch(self, part):
        return self.train_iter_fn(*self.part(part))

    def val_batch(self, part):
        cost, error = self.val_iter_fn(*self.part(part))
        self.errors.append(float(error))
        return cost, error, 0.0

    def val_iter(self, count, recorder):
        """Validate with a sub-batch; return "stop" after the last one if training should end."""
        super().val_iter(count, recorder)
        if self.current_v or self.subb_v:
            return None
        error, self.errors = np.mean(self.errors), []
        self.worse_epochs = 0 if error < self.best else self.worse_epochs + 1
        self.best = min(self.best, error)
        return "stop" if self.worse_epochs >= self.patience else None

    def reset_iter(self, mode):
        super().reset_iter(mode)
        self.errors = []

    def print_info(self, recorder, verbose=False):
        if verbose:
            print(f"lowest validation error of this worker: {self.best:.4f}")


def adadelta(cost, params, rate, rho=0.95, epsilon=1e-6):
    """Return updates; their state stays on each rank."""
    updates = []
    for param, gradient in zip(params, T.grad(cost, params)):
        zeros = np.zeros_like(param.get_value(borrow=True))
        squares, steps = theano.shared(zeros, "squares"), theano.shared(zeros, "steps")
        new_squares = rho * squares + (1 - rho) * gradient**2
        step = T.sqrt(steps + epsilon) / T.sqrt(new_squares + epsilon) * gradient
        updates += [
            (squares, new_squares),
            (steps, rho * steps + (1 - rho) * step**2),
            (param, param - T.cast(rate, param.dtype) * step),
        ]
    return updates
