"""Random training functions, each made twice from its seed: one is serial, one runs on ranks.

    parts of a model ──▶ errors of rows ──▶ terms of a loss ──▶ gradients ──▶ update rule

Most of the losses are no mean over rows. A function is called with three or four minibatches of
different numbers of rows, masks, weights and classes, which may be fewer rows than ranks. In
between the script changes learning rates and weights of terms, of which some are 0 at first.
"""

import warnings

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.extensions import train, update_rules

CLASSES, UNITS, TIMES = 3, 5, 4
TOLERANCE = 1e-8  # relative to the largest number of an array
GROWTH = 100  # of that by which a serial training changes if its inputs change in the last bit
ILL = 1e-4  # trainings in which this is more are not compared
RATES = {"sgd": 0.05, "momentum": 0.03, "nesterov_momentum": 0.03, "adagrad": 0.05,
         "rmsprop": 0.02, "adadelta": 1.0, "adam": 0.02, "adamax": 0.02}  # fmt: skip


class Training:
    """A model, its loss, a rule and minibatches. `parts` has the names of what was drawn."""

    def __init__(self, seed, is_compiled=False):
        self.rng = rng = np.random.RandomState(seed)
        self.is_compiled, self.parts = is_compiled, []
        self.inputs, self.common, self._makers = [], [], {}
        self.begins_full = rng.rand() < 0.5
        self.params, self.averages, self.schedule, self.draws = [], [], {}, False
        self.n_steps = 3 + rng.randint(2)
        self.sizes = [int(rng.choice([12, 9, 6]))]
        self.sizes += [int(rng.choice([12, 10, 7, 5, 3, 2, 1])) for _ in range(self.n_steps - 1)]
        self.x = self._input("x", T.dmatrix, lambda rng, n, _: rng.normal(size=(n, 4)))
        self.y = self._input("y", T.dvector, lambda rng, n, _: rng.uniform(-1, 1, n))
        self.hidden = self.drop(self.normalize(self.features()))
        self.p = T.dot(self.hidden, self.weight(UNITS)) + self.weight()
        self.errors = self.drawn(ERRORS)(self, rng)
        self.loss = self._sum_of_terms()
        gradients = zip(self.params, self._gradients(self.loss))
        self.trained = [param for param, gradient in gradients if gradient is not None]
        self.rule, self.rule_options = self._rule()
        self.outputs = [self.drawn(OUTPUTS)(self, rng) for _ in range(rng.randint(3))]
        self._seed = rng.randint(1 << 30)

    def drawn(self, functions):
        """Return one of some functions, and note its name."""
        chosen = functions[self.rng.randint(len(functions))]
        self.parts.append(chosen.__name__)
        return chosen

    def _input(self, name, kind, make):
        for each in self.inputs:
            if each.name == name:
                return each
        self.inputs.append(kind(name))
        self._makers[name] = make
        return self.inputs[-1]

    @property
    def mask(self):
        """Zeros and ones, with one at least; in half of the trainings all are ones at first."""
        return self._input("mask", T.dvector, self._mask)

    def _mask(self, rng, n, number):
        if self.begins_full and number == 0:
            return np.ones(n)
        mask = (rng.rand(n) < rng.choice([0.3, 0.7])).astype(float)
        mask[rng.randint(n)] = 1
        return mask

    @property
    def weights(self):
        """Return weights of rows; those of the first minibatch are equal."""
        return self._input(
            "weights", T.dvector, lambda rng, n, i: rng.uniform(0, 2, n) if i else np.ones(n)
        )

    @property
    def labels(self):
        """Return classes, which take turns at first."""
        return self._input(
            "labels",
            T.lvector,
            lambda rng, n, i: np.sort(rng.randint(0, CLASSES, n)) if i else np.arange(n) % CLASSES,
        )

    def weight(self, *shape):
        """Return a new parameter."""
        value = 0.6 * self.rng.normal(size=shape)
        self.params.append(theano.shared(value, f"w{len(self.params)}"))
        return self.params[-1]

    def features(self):
        """Return UNITS numbers of each row."""
        return T.tanh(self.drawn(FEATURES)(self, self.rng))

    def normalize(self, h):
        """Return numbers that are normalized in one way, or as they are."""
        return self.drawn(NORMALS)(self, h)

    def drop(self, h):
        """Return numbers of which some are 0, or all."""
        return self.drawn(DROPS)(self, h)

    def gate(self):
        """Return a factor that is 0 for the first minibatch: a shared variable, or an input."""
        values = [0.0] + [0.5] * (self.n_steps - 1)
        if self.rng.rand() < 0.5:
            gate = theano.shared(0.0, f"gate{len(self.schedule)}")
            self.schedule[gate] = values
            return gate
        self.common.append(T.dscalar(f"given{len(self.common)}"))
        return self.common[-1]

    def _sum_of_terms(self):
        rng, terms = self.rng, []
        for _ in range(1 + rng.randint(3)):
            term = self.drawn(TERMS)(self, rng)
            term = rng.choice([0.3, 0.7, 1]) * (self.gate() if rng.rand() < 0.15 else 1) * term
            try:
                is_trained = any(each is not None for each in self._gradients(term))
            except Exception:  # Theano has no derivative of it
                continue
            terms += [term] * is_trained
        if not terms or rng.rand() < 0.3:
            terms.append(mean(self, rng))
        return sum(terms)

    def _gradients(self, loss):
        """Return gradients, and None for parameters that the loss does not depend on."""
        ignoring = {"disconnected_inputs": "ignore", "return_disconnected": "None"}
        return T.grad(loss, self.params, **ignoring)

    def _rule(self):
        rng, name = self.rng, sorted(RATES)[self.rng.randint(len(RATES))]
        self.parts.append(name)
        rate = RATES[name]
        if rng.rand() < 0.2:
            shared = theano.shared(0.0, "rate")
            self.schedule[shared] = [0.0] + [rate] * (self.n_steps - 1)
            rate = shared
        self.max_norm = 0.4 if rng.rand() < 0.3 else None
        return getattr(update_rules, name), {"learning_rate": rate}

    def minibatches(self):
        """Return the values of all inputs for each step."""
        rng = np.random.RandomState(self._seed)
        return [
            [
                *(self._makers[each.name](rng, n, number) for each in self.inputs),
                *(0.5 * min(number, 1) for _ in self.common),
            ]
            for number, n in enumerate(self.sizes)
        ]

    def compile_serially(self):
        """Return a Theano function."""
        params = self.trained
        grads = T.grad(self.loss, params)
        if self.max_norm is not None:
            grads = train.clip_by_global_norm(grads, self.max_norm)
        updates = [*self.rule(grads, params, **self.rule_options).items(), *self.averages]
        outputs = [self.loss, *(each for each, _ in self.outputs)]
        inputs = [*self.inputs, *self.common]
        return theano.function(inputs, outputs, updates=updates, on_unused_input="ignore")

    def compile_for_ranks(self):
        """Return the step on ranks."""
        options = {"bcast_inputs": self.common, "serial_random": self.draws}
        return train.make_train_step(
            self.inputs, self.loss, self.trained, self.rule, max_norm=self.max_norm,
            outputs=self.outputs, averages=self.averages, **self.rule_options,
            options={**options, "on_unused_input": "ignore"},
        )  # fmt: skip

    @property
    def variables(self):
        """What is compared: parameters and running averages."""
        return [*self.trained, *(variable for variable, _ in self.averages)]


def compare(seed, is_compiled=False):
    """Compare a training on all ranks with serial Theano.

    Return "equal", or "whole" if a warning said that each rank computes all; "told" for a
    difference that a warning came with, or before; "refused" for an exception on ranks alone, or
    earlier, and "raises" for one of serial Theano, too; or "ill" if serial training grows
    differences in the last bit.
    """
    theirs, ours = Training(seed, is_compiled), Training(seed, is_compiled)
    where = f"training {seed}: {', '.join(ours.parts)}; rows {ours.sizes}"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected, allowed = _serial_steps(theirs)
        if max((float(np.max(each)) for step in allowed for each in step), default=0) > ILL:
            return "ill"
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        number = -1
        try:
            step = ours.compile_for_ranks()
            for number, batch in enumerate(ours.minibatches()):
                _set(ours, number, synk.broadcast)
                found = _numbers(step(*batch), ours)
                assert number < len(expected), f"{where}, step {number}: serial Theano raises"
                for place, each in enumerate(zip(found, expected[number], allowed[number])):
                    what = f"{where}, step {number}, number {place} of {len(found)}"
                    _assert_close(*each, what)
        except AssertionError:
            if "average the gradients of their own" in _told(caught):
                return "told"
            raise
        except Exception:
            return "raises" if number == len(expected) else "refused"
    for variable in ours.variables:
        for value in synk.gather(variable, nd_up=1):
            np.testing.assert_array_equal(value, variable.get_value(), f"{where}, {variable}")
    return "whole" if _told(caught) else "equal"


def _told(caught):
    return " ".join(
        str(each.message) for each in caught if issubclass(each.category, synk.PortingWarning)
    )


def _set(training, number, give):
    for variable, values in training.schedule.items():
        give(variable, np.asarray(values[number]))


def _numbers(outputs, training):
    return [*map(np.asarray, outputs), *(each.get_value() for each in training.variables)]


def _serial_steps(training):
    """Return the numbers of each step, until one raises, and how much they may differ."""
    f = training.compile_serially()
    shared = f.get_shared()
    before = [each.get_value() for each in shared]
    runs = []
    for is_changed in (False, True):
        for variable, value in zip(shared, before):
            variable.set_value(value)
        runs.append([])
        rng = np.random.RandomState(0)
        try:
            for number, batch in enumerate(training.minibatches()):
                _set(training, number, lambda variable, value: variable.set_value(value))
                values = [_changed(each, rng) if is_changed else each for each in batch]
                runs[-1].append(_numbers(f(*values), training))
        except Exception:  # in both runs, at the same step
            continue
    allowed = [[GROWTH * abs(one - other) for one, other in zip(*steps)] for steps in zip(*runs)]
    return runs[0], allowed


def _changed(value, rng):
    value = np.asarray(value)
    if value.dtype.kind != "f":
        return value
    return value * (1 + np.finfo(value.dtype).eps * rng.choice([-1, 1], value.shape))


def _assert_close(found, expected, allowed, what):
    assert found.shape == expected.shape, what
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-2)
    largest = TOLERANCE * scale + np.nanmax(allowed, initial=0)
    np.testing.assert_allclose(found, expected, 0, largest, err_msg=what)


def dense(g, rng):
    return T.dot(g.x, g.weight(4, UNITS)) + g.weight(UNITS)


def two_layers(g, rng):
    return T.dot(T.tanh(T.dot(g.x, g.weight(4, 6)) + g.weight(6)), g.weight(6, UNITS))


def reshaped(g, rng):
    return T.dot(g.x.reshape((-1, 2)), g.weight(2, UNITS)).reshape((g.x.shape[0], 2, UNITS)).sum(1)


def of_fixed_size(g, rng):
    return T.dot(g.x.reshape((g.sizes[0], 4)), g.weight(4, UNITS))


def embedded(g, rng):
    words = g._input("words", T.lmatrix, lambda rng, n, _: rng.randint(0, 7, (n, 3)))
    return dense(g, rng) + g.weight(7, UNITS)[words].mean(axis=1)


def recurrent(g, rng):
    steps = g._input("steps", T.dtensor3, lambda rng, n, _: rng.normal(size=(n, TIMES, 3)))
    w, u = g.weight(3, UNITS), g.weight(UNITS, UNITS)
    states, _ = theano.scan(
        lambda now, h, w, u: T.tanh(T.dot(now, w) + T.dot(h, u)),
        steps.dimshuffle(1, 0, 2),
        T.zeros((steps.shape[0], UNITS)),
        non_sequences=[w, u],
        strict=True,
    )
    return states[-1] + states.mean(axis=0)


def convolved(g, rng):
    if not g.is_compiled:
        return dense(g, rng)
    images = g._input("images", T.dtensor4, lambda rng, n, _: rng.normal(size=(n, 1, 4, 4)))
    maps = T.tanh(T.nnet.conv2d(images, g.weight(2, 1, 3, 3)))
    return T.dot(maps.flatten(2), g.weight(8, UNITS))


def plain(g, h):
    return h


def by_hand(g, h):
    return g.weight(UNITS) * (h - h.mean(axis=0)) / T.sqrt(h.var(axis=0) + 0.1)


def centered(g, h):
    return h - h.mean(axis=0, keepdims=True)


def of_rows(g, h):
    return (h - h.mean(axis=1, keepdims=True)) / T.sqrt(h.var(axis=1, keepdims=True) + 0.1)


def by_running_mean(g, h):
    mean = theano.shared(np.zeros(UNITS), "mean")
    g.averages.append((mean, 0.9 * mean + 0.1 * h.mean(axis=0)))
    return h - mean


def by_theano(g, h):
    mean, variance = theano.shared(np.zeros(UNITS), "mean"), theano.shared(np.ones(UNITS), "var")
    h, _, _, new_mean, new_variance = T.nnet.bn.batch_normalization_train(
        h, g.weight(UNITS), g.weight(UNITS), epsilon=0.1, running_mean=mean, running_var=variance
    )
    g.averages += [(mean, new_mean), (variance, new_variance)]
    return h


def dropped(g, h):
    g.draws = True
    return 2 * h * MRG_RandomStreams(5).binomial(h.shape, p=0.5, dtype="float64")


def noisy(g, h):
    g.draws = True
    return h + 0.1 * RandomStreams(6).normal(h.shape, dtype="float64")


def squared(g, rng):
    return T.sqr(g.p - g.y)


def absolute(g, rng):
    return T.sqrt(T.sqr(g.p - g.y) + 0.1)


def logistic(g, rng):
    return T.nnet.softplus(-g.p * T.sgn(g.y))


def of_classes(g, rng):
    scores = T.nnet.softmax(T.dot(g.hidden, g.weight(UNITS, CLASSES)))
    return T.nnet.categorical_crossentropy(scores, g.labels) + 0.1 * T.sqr(g.p)


def by_index(g, rng):
    scores = T.nnet.softmax(T.dot(g.hidden, g.weight(UNITS, CLASSES)))
    chosen = scores[T.arange(g.labels.shape[0]), g.labels]
    return -T.log(chosen) + 0.1 * abs(g.p)


def mean(g, rng):
    return g.errors.mean()


def mean_by_shape(g, rng):
    return g.errors.sum() / T.cast(g.x.shape[0], "float64")


def mean_by_ones(g, rng):
    return g.errors.sum() / T.ones_like(g.errors).sum()


def mean_with_weights(g, rng):
    return (g.weights * g.errors).mean()


def summed(g, rng):
    return 0.1 * g.errors.sum()


def summed_with_weights(g, rng):
    return 0.1 * T.dot(g.weights, g.errors)


def masked(g, rng):
    counts = [g.mask.sum(), T.maximum(1, g.mask.sum()), g.mask.sum() + 1e-6]
    return (g.errors * g.mask).sum() / counts[rng.randint(3)]


def mask_mean(g, rng):
    return (g.errors * g.mask).mean() / g.mask.mean()


def selected(g, rng):
    return g.errors[g.mask.nonzero()].mean()


def by_weights(g, rng):
    return (g.weights * g.errors).sum() / g.weights.sum()


def by_positives(g, rng):
    return 0.3 * g.errors.sum() / T.maximum(1, (g.y > 0).sum())


def of_each_class(g, rng):
    one_hot = T.extra_ops.to_one_hot(g.labels, CLASSES)
    return (T.dot(g.errors, one_hot) / (one_hot.sum(axis=0) + 0.1)).mean()


def root(g, rng):
    return T.sqrt(g.errors.mean() + 0.01)


def log_of_mean(g, rng):
    return T.log(T.exp(g.errors / 4).mean())


def log_of_sum(g, rng):
    return T.log(T.exp(g.errors / 4).sum())


def largest(g, rng):
    return g.errors.max()


def range_of(g, rng):
    return 0.3 * (g.p.max() - g.p.min())


def product(g, rng):
    return g.errors.mean() * T.sqr(g.p).mean()


def variance(g, rng):
    return g.p.var() if rng.rand() < 0.5 else g.hidden.var(axis=0).mean()


def covariances(g, rng):
    h = g.hidden - g.hidden.mean(axis=0)
    covariance = T.dot(h.T, h) / h.shape[0]
    return T.sqr(covariance).sum() - T.sqr(T.diag(covariance)).sum()


def correlation(g, rng):
    p, y = g.p - g.p.mean(), g.y - g.y.mean()
    return -(p * y).mean() / T.sqrt((p**2).mean() * (y**2).mean() + 0.1)


def overlap(g, rng):
    p, y = T.nnet.sigmoid(g.p), (g.y + 1) / 2
    return 1 - 2 * (p * y).sum() / (p + y).sum()


def hard_half(g, rng):
    return T.sort(g.errors)[g.errors.shape[0] // 2 :].mean()


def pairs(g, rng):
    return T.tanh(T.sqr(g.p[:, None] - g.p[None, :])).mean()


def contrasted(g, rng):
    scores = T.nnet.softmax(T.outer(g.p, g.p) + g.hidden.sum() / 100)
    return T.nnet.categorical_crossentropy(scores, T.arange(g.p.shape[0])).mean() / 4


def in_order(g, rng):
    return ((T.log(T.extra_ops.cumsum(T.exp(g.p))) - g.p) * g.mask).mean()


def normalized_targets(g, rng):
    return -(g.p * (g.y - g.y.mean()) / (g.y.std() + 0.1)).mean() / 2


def entropy_of_mean(g, rng):
    p = T.nnet.softmax(g.hidden).mean(axis=0)
    return (p * T.log(p)).sum()


def softmax_over_rows(g, rng):
    weights = T.exp(g.y - g.y.max())
    return (weights * g.errors).sum() / weights.sum()


def gradients_of_rows(g, rng):
    gradients = T.grad(g.p.sum(), g.x, disconnected_inputs="ignore")
    return T.sqr(gradients).sum(axis=1).mean()


def gradient_of_all(g, rng):
    gradients = T.grad(g.p.sum(), g.x, disconnected_inputs="ignore")
    return 0.1 * T.sqrt(T.sqr(gradients).sum() + 0.1)


def l2(g, rng):
    return 0.05 * sum(T.sqr(each).sum() for each in g.params)


def l1(g, rng):
    return 0.02 * sum(T.sqrt(T.sqr(each) + 0.1).sum() for each in g.params)


def outputs_of_rows(g, rng):
    return g.p, "gather"


def errors_of_rows(g, rng):
    return T.stack([g.errors, g.p], axis=1), "gather"


def mean_output(g, rng):
    return T.sqr(g.p).mean(), "avg"


def sum_output(g, rng):
    return (g.p > 0).sum(), "sum"


def largest_output(g, rng):
    return g.errors.max(), "max"


def another_output(g, rng):
    return g.p.std(), "avg"


FEATURES = [dense, two_layers, reshaped, embedded, recurrent, convolved] * 2 + [of_fixed_size]
NORMALS = [plain, plain, plain, by_hand, centered, of_rows, by_running_mean, by_theano]
DROPS = [plain, plain, plain, plain, dropped, noisy]
ERRORS = [squared, absolute, logistic, of_classes, by_index]
TERMS = [mean, mean, mean_by_shape, mean_by_ones, mean_with_weights, summed, summed_with_weights,
         masked, masked, mask_mean, selected, by_weights, by_positives, of_each_class, root,
         log_of_mean, log_of_sum, largest, range_of, product, variance, covariances, correlation,
         overlap, hard_half, pairs, contrasted, in_order, normalized_targets, entropy_of_mean,
         softmax_over_rows, gradients_of_rows, gradient_of_all, l2, l1]  # fmt: skip
OUTPUTS = [outputs_of_rows, errors_of_rows, mean_output, sum_output, largest_output, another_output]
