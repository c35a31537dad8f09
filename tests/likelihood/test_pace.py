"""Evaluations by this process alone, where ranks would wait for cores that others use."""

import logging
import os
import signal

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402

from synkhronos import WorkerDied, WorkerError  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import pace  # noqa: E402

pytestmark = models.MARKS

ALONE, QUIET, BUSY = 1e-3, 0.6e-3, 60e-3  # seconds of an evaluation: alone, and by ranks


def spend(ours, seconds, of_a_round, alone=ALONE):
    """Let evaluations pass for so many seconds; return the number of rounds of ranks."""
    rounds, left = 0, seconds
    while left > 0:
        rounds += not ours.is_alone
        took = alone if ours.is_alone else of_a_round
        ours.note(took)
        left -= took
    return rounds


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(pace, "_told", [])
    return pace.Pace(ALONE)


def test_ranks_compute_where_they_are_faster(ours, caplog):
    spend(ours, 10, QUIET)
    assert not ours.is_alone
    assert not caplog.text


def test_a_busy_machine_and_a_quiet_one_again(ours, caplog):
    with caplog.at_level(logging.WARNING, "synkhronos"):
        spend(ours, 1, QUIET)
        rounds = spend(ours, 100, BUSY)
        assert ours.is_alone
        assert rounds * BUSY < 3  # of 100 seconds, for trials
        assert rounds > 5
        spend(ours, 8, QUIET)
        assert not ours.is_alone
        spend(ours, 10, BUSY)
    assert caplog.text.count("other programs, or other chains") == 1


def test_a_slow_round_changes_little(ours):
    for _ in range(50):
        ours.note(20 * ALONE)
        spend(ours, 0.5, QUIET)
        assert not ours.is_alone
    before = spend(ours, 1, QUIET)
    assert before > 0.99 / QUIET


def test_alone_is_slow_too(ours):
    """As beside busy programs that slow down this process as much as ranks."""
    spend(ours, 1, 3 * ALONE, alone=5 * ALONE)
    assert not ours.is_alone


def test_little_is_computed_alone_without_a_word(caplog):
    ours = pace.Pace(1e-5)
    spend(ours, 0.1, 3e-5, alone=1e-5)
    assert ours.is_alone
    assert not caplog.text


def numbers(model, points):
    return np.hstack([each for pair in models.evaluate(model, points) for each in pair])


class Always:
    """Takes the place of a `Pace`: this process alone."""

    is_alone = True

    def note(self, seconds):
        """Change nothing."""


@pytest.mark.parametrize("definition", [models.hierarchical, models.two_lengths])
def test_the_same_bits(definition):
    model = models.make(definition)
    points = models.points(model, 3)
    with parallel.likelihood(model, ranks=3) as ours:
        by_ranks = numbers(model, points)
        [evaluator] = ours.evaluators
        runs = evaluator.compute
        evaluator._paces = dict.fromkeys(evaluator._commands, Always())
        evaluator.compute = None
        alone = numbers(model, points)
        evaluator.compute = runs
        evaluator._paces.clear()
        again = numbers(model, points)
    np.testing.assert_array_equal(alone, by_ranks)
    np.testing.assert_array_equal(again, by_ranks)


def test_failures_are_those_of_ranks():
    model, point = models.logistic_at_a_point()
    with pytest.raises(WorkerDied, match="rank 1"), parallel.likelihood(model, ranks=2) as ours:
        numbers(model, [point])
        [evaluator] = ours.evaluators
        evaluator._paces = dict.fromkeys(evaluator._commands, Always())
        numbers(model, [point])
        os.kill(ours.worker_pids[0], signal.SIGKILL)
        while True:
            numbers(model, [point])


def test_errors_are_those_of_ranks(monkeypatch):
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2) as ours:
        expected = numbers(model, [point])
        [evaluator] = ours.evaluators
        evaluator._paces = dict.fromkeys(evaluator._commands, Always())
        for runs in evaluator._runs["gradients"]:
            for run in runs:
                monkeypatch.setattr(run, "run", lambda: 1 / 0)
        with pytest.raises(WorkerError, match="division by zero"):
            numbers(model, [point])
        monkeypatch.undo()
        np.testing.assert_array_equal(numbers(model, [point]), expected)
