"""Which mode makes the serial value of what each rank computes alone, found in the graph."""

import sys

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos import _host, ops

X, Y, M, LABELS = T.dmatrix("x"), T.dvector("y"), T.dvector("m"), T.lvector("labels")
W, V = theano.shared(np.ones((3, 4)), "W"), theano.shared(np.ones(3), "v")
H, ERRORS = T.tanh(X.dot(W)), T.sqr(X.dot(V) - Y)
CENTRED = H - H.mean(axis=0)


def examined(*outputs, **kwargs):
    return _host.examine(dict.fromkeys([X, Y, M, LABELS], 0), [X, Y, M, LABELS], outputs, **kwargs)


def likelihood():
    return -T.mean(T.log(T.nnet.softmax(X.dot(W)))[T.arange(LABELS.shape[0]), LABELS])


def recurrent():
    states, _ = theano.scan(
        lambda x, h: T.tanh(x[:, None] + h), X.T, outputs_info=T.zeros((X.shape[0], 4))
    )
    return T.sqr(states[-1].dot(W.T) - X).mean()


def cut_to_a_length():
    return ERRORS.sum() / (X.shape[0] * X[:, : LABELS.max() + 1].shape[1])


def histogram():
    return T.inc_subtensor(T.zeros((4,))[LABELS], 1.0) + 1


def bias_gradient():
    bias = theano.shared(np.zeros(4), "bias")
    p = T.nnet.softmax(X.dot(W) + bias)
    return T.grad(T.nnet.categorical_crossentropy(p, LABELS).mean(), bias)


def means_in_steps():
    totals, _ = theano.scan(lambda x, total: total + x.mean(), X.T, outputs_info=T.zeros(()))
    return totals[-1]


MEANS = {
    "mean": lambda: ERRORS.mean(),
    "of all items": lambda: T.sqr(H).mean(),
    "of means": lambda: T.sqr(H).mean(axis=1).mean(),
    "of columns": lambda: T.sqr(H).mean(axis=0).sum(),
    "sum by length": lambda: ERRORS.sum() / X.shape[0],
    "sum by cast length": lambda: ERRORS.sum() / T.cast(Y.shape[0], "float64"),
    "sum by size": lambda: T.sqr(H).sum() / H.size,
    "sum by ones": lambda: ERRORS.sum() / T.ones_like(Y).sum(),
    "weights by length": lambda: (ERRORS / X.shape[0]).sum(),
    "product": lambda: T.dot(ERRORS, T.ones_like(ERRORS) / ERRORS.shape[0]),
    "with nothing": lambda: ERRORS.mean() + 0 * M.sum(),
    "with a penalty": lambda: ERRORS.mean() + 0.1 * T.sqr(V).sum(),
    "clipped": lambda: T.clip(ERRORS, 0, 10).mean(),
    "chosen": lambda: T.switch(T.gt(M, 0), ERRORS, 0).mean(),
    "cross-entropy": lambda: T.nnet.categorical_crossentropy(
        T.nnet.softmax(X.dot(W)), LABELS
    ).mean(),
    "likelihood": likelihood,
    "dropout": lambda: (H * RandomStreams(1).binomial(H.shape, p=0.5)).mean(),
    "dropout of MRG": lambda: (H * MRG_RandomStreams(1).binomial(H.shape, p=0.5)).mean(),
    "noise": lambda: (H + MRG_RandomStreams(1).normal(H.shape)).mean(),
    "recurrent": recurrent,
    "printed": lambda: theano.printing.Print("errors")(ERRORS).mean(),
    "half precision": lambda: T.cast(ERRORS, "float16").mean(),
}


@pytest.mark.parametrize("name", MEANS)
def test_the_average_of_means_and_of_their_gradients_is_that_of_all_rows(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    loss = MEANS[name]()
    [param] = [each for each in (V, W) if each in theano.gof.graph.inputs([loss])]
    found = examined(loss, T.grad(loss, param), ops.all_reduce(T.grad(loss, param)))
    assert [each.right_mode for each in found.outputs] == ["avg"] * 3 and not found.mistakes
    assert found.outputs[2].is_equal


OTHERS = {
    "sum": (lambda: ERRORS.sum(), "sum"),
    "printed sum": (lambda: theano.printing.Print("sum")(ERRORS.sum()), "sum"),
    "printed length": (lambda: theano.printing.Print("n")(X.shape)[0], "sum"),
    "sum by a constant": (lambda: ERRORS.sum() / 32, "sum"),
    "length": (lambda: X.shape[0], "sum"),
    "largest": (lambda: ERRORS.max(), "max"),
    "largest of rows": (lambda: H.max(axis=0).max(), None),
    "sum of the largest": (lambda: H.max(axis=0).sum(), None),
    "two of the largest": (lambda: ERRORS.max() + Y.max(), None),
    "less than the largest": (lambda: -ERRORS.max(), "min"),
    "smallest": (lambda: ERRORS.min(), "min"),
    "root of the largest": (lambda: T.sqrt(ERRORS.max()), None),
    "exponential of the largest": (lambda: T.exp(Y.max()), "max"),
    "rows of the largest": (lambda: T.fill(X, X.max()).sum(), None),
    "whole numbers": (lambda: T.cast(Y.sum(), "int32"), None),
    "largest length": (lambda: ERRORS.sum() / (X.shape[0] * LABELS.max()), None),
    "cut to a length": (lambda: cut_to_a_length(), None),
    "ones of a length": (
        lambda: (ERRORS / T.ones((X.shape[0], LABELS.max())).sum(axis=1)).mean(),
        None,
    ),
    "histogram": (lambda: T.inc_subtensor(T.zeros((9,))[LABELS], 1.0).sum(), "sum"),
    "classes by their size": (lambda: (ERRORS / histogram()[LABELS]).mean(), None),
    "filled, selected": (
        lambda: T.sqr(T.fill(H, W[0])[T.arange(LABELS.shape[0]), LABELS].mean() - 1),
        None,
    ),
    "gradient of a bias": (lambda: bias_gradient().sum(), "avg"),
    "square of the largest": (lambda: T.sqr(Y.max()), None),
    "running sum of the largest": (lambda: T.cumsum(H.max(axis=0)), None),
    "square of lengths": (lambda: T.zeros((X.shape[0], X.shape[0])).sum() + 0 * ERRORS.sum(), None),
    "means in steps": (lambda: means_in_steps(), None),
    "product": (lambda: ERRORS.prod(), "prod"),
    "cut off product": (lambda: T.cast(ERRORS.prod(), "int32"), None),
    "cut off largest": (lambda: T.cast(ERRORS.max(), "int32"), "max"),
    "masked": (lambda: (M * ERRORS).sum() / M.sum(), None),
    "root": (lambda: T.sqrt(ERRORS.mean()), None),
    "sum and mean": (lambda: ERRORS.mean() + ERRORS.sum(), None),
    "covariance": (lambda: T.sqr(T.dot(CENTRED.T, CENTRED) / X.shape[0]).sum(), None),
    "centred": (lambda: T.sqr(CENTRED).mean(), None),
    "selected": (lambda: ERRORS[M.nonzero()].mean(), None),
    "noise of columns": (lambda: (H * RandomStreams(1).normal((4,))).mean(), None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_average(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    make, mode = OTHERS[name]
    assert examined(make()).outputs[0].right_mode == mode


def test_a_wrong_reduction_is_a_mistake():
    grad, total = T.grad(ERRORS.mean(), V), T.grad(ERRORS.sum(), V)
    masked = T.grad((M * ERRORS).sum() / M.sum(), V)
    right = T.grad((M * ERRORS).sum() / ops.all_reduce(M.sum(), "sum"), V)
    reduced = [
        ops.all_reduce(each, op) for each in (grad, total, masked, right) for op in ("sum", "avg")
    ]
    mistakes = {(each.variable.owner.inputs[1], each.op) for each in examined(*reduced).mistakes}
    assert len(mistakes) == 5  # the sum of a mean, the average of a sum, ...
    outputs = examined(*reduced).outputs
    assert [i for i, each in enumerate(outputs) if each.is_equal] == [1, 2, 6]


def test_reductions_of_what_all_ranks_have():
    reduced = [ops.all_reduce(T.sqr(V).sum(), op) for op in ("avg", "max", "min", "sum", "prod")]
    found = examined(*reduced)
    assert [each.is_equal for each in found.outputs] == [True, True, True, False, False]
    assert not found.mistakes  # the number of ranks may be meant


def test_statistics_of_each_rank_may_be_meant():
    rows = CENTRED / T.sqrt(H.var(axis=0) + 1e-4)
    theirs, mean, _ = T.nnet.bn.batch_normalization_train(H, T.ones((4,)), T.zeros((4,)))
    losses = [T.sqr(rows.sum(axis=1) - Y).mean(), T.sqr(theirs.sum(axis=1) - Y).mean()]
    assert [each.right_mode for each in examined(*losses).outputs] == [None, None]
    found = examined(*losses, mean, own_statistics=True)
    assert [each.right_mode for each in found.outputs] == ["avg"] * 3


def test_updates_that_differ_between_ranks():
    shared = [theano.shared(0.0, name) for name in "abcd"]
    grad = T.grad(ERRORS.mean(), V).sum()
    random = RandomStreams(1).normal((), ndim=0)
    values = [shared[0] + 1, grad, ops.all_reduce(grad), random]
    found = examined(ERRORS.mean(), updates=[*zip(shared, values)])
    assert [differs for _, _, differs in found.updates][:4] == [False, True, False, True]


def test_a_penalty_is_told_from_a_small_number():
    with_penalty = examined(ERRORS.sum() + T.sqr(V).sum()).outputs[0]
    small = examined((M * ERRORS).sum() / (M.sum() + 1e-8)).outputs[0]
    assert with_penalty.is_mixed and not small.is_mixed and small.right_mode is None
