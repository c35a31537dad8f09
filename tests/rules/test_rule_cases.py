"""Cases that users of data parallel trainers have reported, with numbers computed by hand.

Models of ``support.rule_cases`` have one weight, which a step with rate 1 sets to the mean of the
rows, so an average over ranks is right when it is the mean of the rows of all ranks.
"""

import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support import rules

pytestmark = pytest.mark.slow("several processes")
CASES = str(Path(__file__).parents[1] / "support" / "rule_cases.py")
ROWS = [[[1.0, 3.0]], [[8.0]], [[4.0, 4.0, 2.0]]]  # of three ranks; their means are 2, 8, 10/3
MEAN = {1: 2.0, 2: 4.0, 3: 22 / 6}  # of the rows of so many ranks


def run(rule, n, folder, modelclass, status=0, given=(), **settings):
    settings = {"rows": ROWS, **settings}
    given = {"warm_up_epochs": 0, **dict(given)} if rule == "BSP" else dict(given)
    return rules.run(rule, n, folder, modelclass, settings, file=CASES, status=status, **given)


def values(launched):
    """Return what each rank has at its end."""
    return [launched.result(rank)["values"].tolist() for rank in range(launched.n)]


# 1: what ranks must have alike


@pytest.mark.parametrize("rule", ["BSP", "EASGD", "GOSGD", "ASGD"])
def test_parameters_in_another_order_are_refused(tmp_path, rule):
    """They have no names and equal shapes; they were mixed up, 3 1 4 2 for 1 2 3 4."""
    n = 2 if rule in ("BSP", "GOSGD") else 3
    ended = run(rule, n, tmp_path, "Collects", status=1, how="as a set")
    assert "params has another order on" in ended.output
    assert "list the variables in the order of the layers" in ended.output


@pytest.mark.parametrize("how", ["named", "listed", "sorted"])
def test_parameters_in_the_order_of_a_list(tmp_path, how):
    """Each weight follows a multiple of the mean of the rows."""
    ended = run("BSP", 2, tmp_path, "Collects", how=how)
    right = MEAN[2] * np.arange(1, 5)
    for rank, found in enumerate(values(ended)):  # in the order of their making
        order = {0: [3, 0, 2, 1], 1: [1, 2, 0, 3]}[rank] if how == "sorted" else slice(None)
        np.testing.assert_allclose(found, right[order], rtol=1e-6)


@pytest.mark.parametrize(("rule", "name"), [("BSP", "n_epochs"), ("GOSGD", "n_subb")])
def test_numbers_that_differ_between_ranks_are_refused(tmp_path, rule, name):
    """Epochs that differed were "IndexError: too many indices"."""
    ended = run(rule, 2, tmp_path, "Epochs", status=1, how=name)
    said = rf"{name} is (1 on rank 0 and 2 on rank 1|2 on rank 1 and 1 on rank 0)"
    assert re.search(f"{said}: all ranks must have the same", ended.output), ended.output


@pytest.mark.parametrize("rule", ["EASGD", "GOSGD"])
def test_workers_without_batches_or_with_other_numbers_are_refused(tmp_path, rule):
    for last, said in (
        ([], "n_batch_train is 0 on rank 2"),
        ([[1.0]] * 2, "n_batch_train is [12] on"),
    ):
        ended = run(rule, 3, tmp_path, "Mean", status=1, rows=[[[1.0]], [[1.0]], last])
        assert re.search(said, ended.output), ended.output


# 3: a look at the data has no effects


@pytest.mark.parametrize("how", ["generator", "nested", "file", "mapped", "deque"])
def test_data_that_can_be_read_once_are_read_once(tmp_path, how):
    """Two batches, read in turn, by rates of 1: the weight is the last batch."""
    rows = [[[1.0], [3.0], [5.0]]]
    ended = run("BSP", 1, tmp_path, "Reads", how=how, rows=rows, lr=0.5)
    right = 0.0
    for x in (1.0, 3.0, 5.0):
        right += 0.5 * (x - right)
    assert values(ended) == [[right]]


def test_fewer_batches_than_ranks(tmp_path):
    """One rank has a batch, others none: they take its step."""
    ended = run("BSP", 3, tmp_path, "Mean", rows=[[[1.0, 3.0]], [], []])
    assert values(ended) == [[2.0]] * 3


# 4: where the data were


@pytest.mark.parametrize(
    "how", ["random", "nested", "a frozen object", "an object with slots", "many objects"]
)
def test_a_run_that_goes_on_reads_on(tmp_path, how):
    rows, options, draws = [1.0, 3.0, 5.0, 2.0], {"snapshot_freq": 1}, random.Random(3)
    settings = {"how": how, "rows": [[[x] for x in rows]], "lr": 0.25}
    run("BSP", 1, tmp_path, "Reads", given=options, n_epochs=2, **settings)
    again = {**options, "resume": True}
    ended = run("BSP", 1, tmp_path, "Reads", given=again, n_epochs=3, **settings)
    assert "starts over" not in ended.output
    right = 0.0
    for number in range(12):
        x = rows[draws.randrange(4) if how == "random" else number % 4]
        right += 0.25 * (x - right)
    np.testing.assert_allclose(values(ended), [[right]], rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("generator", "data.stream (generator)"),
        ("deque", "data.at (deque)"),
        ("int keys", "data.at (dict)"),
        ("late", "data.reader.at"),
    ],
)
def test_what_a_snapshot_cannot_keep_is_named_when_it_is_written_or_read(tmp_path, how, named):
    rows, options = [[[1.0], [3.0], [2.0]]], {"snapshot_freq": 1}
    settings = {"how": how, "rows": rows, "data.n_batch_train": 2}
    first = run("BSP", 1, tmp_path, "Reads", given=options, n_epochs=2, **settings)
    said = f"snapshots don't store the position of {named}"
    assert (said in first.output) == (how != "late"), first.output
    again = {**options, "resume": True}
    ended = run("BSP", 1, tmp_path, "Reads", given=again, n_epochs=3, **settings)
    assert f"but {named}" in ended.output and "starts over" in ended.output


# 5: averages weigh rows


@pytest.mark.parametrize(("n", "how"), [(2, "inputs"), (3, "shared"), (3, "numbers and step_rows")])
def test_an_average_weighs_the_rows_of_a_function_of_the_models_own(tmp_path, n, how):
    ended = run("BSP", n, tmp_path, "Trains", given={"sync_type": "avg"}, how=how)
    np.testing.assert_allclose(values(ended), [[MEAN[n]]] * n, rtol=1e-6)
    assert "weigh the same" not in ended.output


def test_step_rows_that_are_no_number_of_rows_are_refused(tmp_path):
    settings = {"how": "numbers", "step_rows": 0}
    ended = run("BSP", 2, tmp_path, "Trains", given={"sync_type": "avg"}, status=1, **settings)
    assert "step_rows must be the number of rows of a step, above 0, got 0" in ended.output


def test_rows_that_are_not_known_are_told(tmp_path):
    ended = run("BSP", 2, tmp_path, "Trains", given={"sync_type": "avg"}, how="numbers")
    assert values(ended) == [[5.0]] * 2  # the mean of 2 and 8
    assert ended.output.count("all ranks weigh the same") == 1
    assert "set self.step_rows = len(x) in train_iter()" in ended.output


# 7: the warm-up's factor is not the model's


@pytest.mark.parametrize(
    ("how", "right"),
    [
        ("constant", [1, 2**0.5, 2, 2, 2]),
        ("polynomial", [1, 2**0.5 * 0.8, 2 * 0.6, 2 * 0.4, 2 * 0.2]),
        ("decay", [1, 2**0.5 / 2, 2 / 4, 2 / 8, 2 / 16]),
    ],
)
def test_a_warm_up_multiplies_what_the_model_sets(tmp_path, how, right):
    ended = run("BSP", 2, tmp_path, "Adjusts", given={"warm_up_epochs": 2}, how=how, n_epochs=5)
    for rank in range(2):
        np.testing.assert_allclose(ended.result(rank)["rates"], right, rtol=1e-6)


def test_a_run_that_goes_on_with_another_number_of_ranks_scales_its_rate(tmp_path):
    options = {"warm_up_epochs": 1, "snapshot_freq": 1}
    run("BSP", 2, tmp_path, "Adjusts", given=options, lr=0.1, n_epochs=3)
    again = {**options, "resume": True}
    ended = run("BSP", 3, tmp_path, "Adjusts", given=again, lr=0.1, n_epochs=4)
    assert ended.result()["rates"][-1] == pytest.approx(0.3, rel=1e-6)
    assert "the learning rate is 0.3, for 3 ranks" in ended.output


# 9: what is no parameter


@pytest.mark.parametrize("rule", ["BSP", "ASGD"])
def test_an_integer_among_the_parameters_is_refused(tmp_path, rule):
    ended = run(rule, 2, tmp_path, "Counts", status=1)
    assert "its params must be of floats, but n_steps is of int64" in ended.output


# 11: running statistics


def test_a_rank_without_a_batch_does_not_count_its_first_statistics(tmp_path):
    ended = run("BSP", 2, tmp_path, "Normalizes", rows=[[[1.0, 0.0]], []])
    for rank in range(2):
        assert ended.result(rank)["running_mean"] == 0.5


def test_a_center_is_validated_with_the_mean_statistics_of_all_workers(tmp_path):
    rows, settings = [[], [[2.0]], [[6.0]]], {"how": 2, "n_epochs": 20}
    ended = run("EASGD", 3, tmp_path, "Normalizes", rows=rows, **settings)
    # The worker that came first validates.
    seen = [ended.result(rank)["seen"] for rank in (1, 2)]
    assert [each[-1] for each in seen if each.size] == [4.0]


# And what else was silent


def test_labels_of_several_axes_weigh_as_many_as_they_are(tmp_path):
    """Of shape (time, batch), they weighed by time: -3 for -4."""
    ended = run("BSP", 2, tmp_path, "Sequences", rows=[[[1.0, 3.0]], [[8.0]]])
    np.testing.assert_allclose(values(ended), [[MEAN[2]]] * 2, rtol=1e-6)


@pytest.mark.parametrize("rule", ["BSP", "ASGD"])
def test_a_cost_that_is_not_finite_is_told_once_by_each_rank(tmp_path, rule):
    ended = run(rule, 2, tmp_path, "Mean", rows=[[["nan"], [1.0], [2.0]]], n_epochs=2)
    n_workers = 2 if rule == "BSP" else 1
    assert ended.output.count("the cost of training batch 0 is nan") == n_workers


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the link of another user")
def test_a_link_of_another_user_in_place_of_a_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "snapshots").symlink_to("mine")
    os.lchown(tmp_path / "snapshots", 65534, 65534)
    tmp_path.chmod(0o777)
    ended = run("BSP", 1, tmp_path, "Mean", status=2)
    assert "snapshots' belongs to another user, in a folder to which all users" in ended.output
    assert "Traceback" not in ended.output and "--snapshot-path FOLDER" in ended.output
    assert not list((tmp_path / "mine").iterdir())


def test_a_second_run_in_the_folders_of_one_is_refused(tmp_path):
    """The last one won: both wrote ``inforec.pkl`` and the snapshots."""
    first = rules.Launched("BSP", 1, tmp_path, "Reads", {"how": "slow"}, file=CASES)
    first.wait_for("logs in")
    second = run("BSP", 1, tmp_path, "Mean", status=2)
    assert "another run writes into './snapshots/'" in second.output
    assert "--snapshot-path FOLDER" in second.output
    elsewhere = {"snapshot_path": "other", "inforec_path": "other"}
    run("BSP", 1, tmp_path, "Mean", given=elsewhere)
    (tmp_path / "end").touch()
    assert first.wait() == 0, first.output
    run("BSP", 1, tmp_path, "Mean")
    assert sorted(each.name for each in (tmp_path / "other").iterdir()) == [
        "inforec.pkl", "snapshot_0001.npz",
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["BSP", "ASGD"])
def test_a_package_that_all_ranks_lack_is_told_once(tmp_path, rule):
    """It was a traceback for each of them."""
    (tmp_path / "needs.py").write_text("import no_package\nclass Model: pass\n")
    n = 2 if rule == "BSP" else 3
    ended = rules.run(rule, n, tmp_path, file="needs.py", status=1)
    said = f"No module named 'no_package' ({tmp_path}/needs.py, line 1)\n"
    assert ended.output.count(f"synkhronos rule: {said}") == ended.output.count("no_package") == 1
    assert "Traceback" not in ended.output
    [name] = re.findall(r"output is in (.*)\.\n", ended.output)
    [shown] = (tmp_path / name).parent.glob("rank_1.log")
    assert "Traceback (most recent" in shown.read_text() and shown.read_text().endswith(said)


class OnTerminal(rules.Launched):
    before = sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"


def test_a_terminal_is_told_which_function_compiles(tmp_path):
    """It was silent for minutes; a file gets no such line."""
    launched = OnTerminal("BSP", 2, tmp_path)
    assert launched.wait() == 0
    said = "synkhronos rule: the ranks load the model and its data"
    for number in (1, 2, 3):
        said += f".*\ncompiling function {number} of 3: up to a minute, the first time only\r?"
    assert re.search(said, launched.output, re.DOTALL), launched.output
    launched = OnTerminal("BSP", 1, tmp_path, "Descends", sync_type="avg")
    assert launched.wait() == 0 and "compiling function 1: up to" in launched.output
    assert "compiling" not in rules.run("BSP", 1, tmp_path, sync_type="avg").output
