"""``parallel.advise``: what is measured, and what follows from it."""

import dataclasses
import time

import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc.advice import Measured, predict  # noqa: E402

pytestmark = models.MARKS

ON_16_CORES = Measured(
    cores=16,
    plain=20.0,
    likelihood=16.0,
    rest=1.0,
    round=0.5,
    reading=1.0,
    gain_of_reading=4.0,
)


def test_ranks_and_chains_at_the_same_time_that_are_fastest():
    advice = predict(ON_16_CORES, 4)
    assert advice.predicted[0, 4] == 20
    assert advice.predicted[0, 1] == 80
    assert advice.predicted[1, 4] == 1 + 16
    assert advice.predicted[4, 4] == 1 + 16 / 4 + 0.5
    assert advice.predicted[8, 2] == 2 * (1 + 16 / 8 + 0.5)
    assert advice.predicted[16, 1] == 4 * (1 + 16 / 16 + 0.5)
    assert max(max(ranks, 1) * at_once for ranks, at_once in advice.predicted) == 16
    assert (advice.ranks, advice.cores, advice.gain) == (4, 4, 20 / 5.5)


@pytest.mark.parametrize(
    "changes, lines",
    [
        ({}, "with parallel.likelihood(model, ranks=4):\n    pm.sample(chains=4, cores=4)"),
        ({"round": 30.0, "likelihood": 18.5}, "pm.sample(chains=4, cores=4)"),
        ({"reading": 20.0}, "pm.sample(chains=4, cores=4)"),  # the memory is the limit
        (
            {"ranks_of_machines": 32, "on_machines": 1.0},
            "with parallel.likelihood(model):\n    pm.sample(chains=4, cores=1)",
        ),
    ],
)
def test_the_lines_to_write(changes, lines):
    advice = predict(dataclasses.replace(ON_16_CORES, **changes), 4)
    assert advice.lines == lines
    assert lines.split("\n")[-1] in str(advice)


def test_what_is_measured():
    model, point = models.logistic_at_a_point()
    function = model.compile_logp()
    begin = time.perf_counter()
    function(point)
    advice = parallel.advise(model, chains=2)
    found = advice.measured
    seconds = time.perf_counter() - begin
    assert 0 < found.likelihood < found.likelihood + found.rest < seconds
    assert min(found.plain, found.round, found.reading, found.gain_of_reading) > 0
    assert {at_once for _, at_once in advice.predicted} == set(range(1, min(2, found.cores) + 1))
    assert "logp" not in vars(model)
