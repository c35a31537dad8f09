"""Cases that users of stores reported, with the right numbers by NumPy."""

from pathlib import Path

import numpy as np
import pytest
from support import nodes, store_cases
from support.store_cases import CASES

from synkhronos import parameter_server as ps

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SCRIPT = Path(store_cases.__file__).read_text()
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def check(name, n, found):
    right = CASES[name].right(n)
    assert len(found) == len(right)
    for one, other in zip(found, right):
        np.testing.assert_allclose(np.asarray(one, "f8"), np.asarray(other, "f8"), **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ps.create("local") as store:
        check(name, 1, CASES[name].run(store))


def run(folder, name, kind, n, servers):
    launched = nodes.run(folder, SCRIPT, name, kind, servers=servers, workers=n)
    for rank in range(n):
        with np.load(folder / f"found_{rank}.npz") as file:
            found = [file[each] for each in sorted(file.files)]
        check(name, n, found)
    return launched


# Those for which servers do no more than in one process.
AS_IN_ONE = {
    "a_mean_of_float16_does_not_overflow",
    "a_number_and_a_text_as_keys",
    "a_rate_by_the_name_of_a_key",
    "a_schedule_in_the_updater_counts_rounds_and_not_devices",
    "a_value_for_a_key_that_is_there",
    "a_whole_number_and_then_a_fraction",
    "gradients_that_are_accumulated",
    "hyperparameters_that_are_not_there",
    "shared_variables_are_pushed_and_pulled",
    "the_tutorial_of_kvstore",
    "what_is_not_there_says_what_to_write",
    "workers_that_have_no_rows_left_push_zeros",
}


@pytest.mark.parametrize("name", sorted({*CASES} - AS_IN_ONE))
@pytest.mark.slow("several processes")
def test_on_two_servers(name, tmp_path):
    told = run(tmp_path, name, "dist_sync", 2, 2).output
    assert ("must compute each element by itself" in told) == (name in UNKNOWN), told


UNKNOWN = {"pushes_one_after_another"}  # whether it computes each element by itself


@pytest.mark.parametrize(
    "name", ["a_rate_that_is_set", "a_schedule_of_each_step", "a_norm_of_columns"]
)
@pytest.mark.parametrize(
    ("kind", "n", "servers"), [("dist_sync", 3, 1), ("dist_async", 1, 2), ("dist_sync", 1, 1)]
)
@pytest.mark.slow("several processes")
def test_on_other_numbers_of_processes(name, kind, n, servers, tmp_path):
    run(tmp_path, name, kind, n, servers)
