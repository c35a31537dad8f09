"""EASGD, ASGD and GOSGD in processes of their own; one worker compared with plain Theano."""

import signal

import numpy as np
import pytest
from support import rules
from support.compatible import restored
from support.rules import Serial

from synkhronos.rules import compatible

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SETTINGS = {"n_rows": 96, "n_epochs": 4, "lr": 0.05}
RULES = ["EASGD", "ASGD", "GOSGD"]
# EASGD and ASGD differ in what is exchanged: their servers and workers begin, fail and end alike.


@pytest.fixture(scope="module")
def model():
    with restored():
        yield compatible.import_model(rules.MODEL)


def batches(model, n_rows, n_epochs, tau):
    """Yield the batches of a lone worker, in its epochs, which begin at an exchange."""
    x, y = model.rows(n_rows)
    n_batches, done, epoch = n_rows // 8, 0, 0
    while done < n_batches * n_epochs:
        order = model.order_of_epoch(epoch, n_rows)
        for begin in range(0, n_rows, 8):
            yield x[order[begin : begin + 8]], y[order[begin : begin + 8]]
            done += 1
            if done % tau == 0:
                epoch = done // n_batches
            if done >= n_batches * n_epochs and done % tau == 0:
                return


@pytest.mark.slow("compiles, in several processes")
def test_elastic_steps_of_one_worker(model, tmp_path):
    """Alpha and tau were constants of the source; with 0.5 both ends became equal."""
    settings = {**SETTINGS, "mu": 0.0, "eta": 0.0}
    run = rules.run("EASGD", 2, tmp_path, settings=settings, alpha=0.25, tau=4)
    serial = Serial(model, 0.05)
    center = serial.values.astype("float64")
    for number, batch in enumerate(batches(model, 96, 4, 4), 1):
        serial.step(*batch)
        if number % 4 == 0:
            own = serial.values.astype("float64")
            serial.values = own - 0.25 * (own - center)
            center = center + 0.25 * (own - center)
    # The worker's own parameters: the validation of the center must not have changed them.
    np.testing.assert_allclose(run.params(1), serial.values, atol=2e-5)
    assert not np.allclose(center, serial.values, atol=1e-3)


@pytest.mark.parametrize("learning_rate_rule", ["staleness", "adagrad", "constant"])
@pytest.mark.sample(1)
def test_pushed_updates_of_one_worker(model, tmp_path, learning_rate_rule):
    """In Theano-MPI ASGD was a stub."""
    settings = {**SETTINGS, "mu": 0.0, "eta": 0.0}
    given = {"tau": 4, "gamma": 0.02, "learning_rate_rule": learning_rate_rule}
    run = rules.run("ASGD", 2, tmp_path, settings=settings, **given)
    serial = Serial(model, 0.05)
    center = serial.values.astype("float64")
    squares = np.zeros_like(center)
    for number, batch in enumerate(batches(model, 96, 4, 4), 1):
        serial.step(*batch)
        if number % 4 == 0:
            delta = serial.values - center
            if learning_rate_rule == "adagrad":
                squares += delta**2
                delta = 0.02 * delta / np.sqrt(np.maximum(squares, 1e-38))
            center = center + delta
            serial.values = center
    np.testing.assert_allclose(run.params(1), serial.values, atol=2e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow("several processes")
def test_several_workers_learn_together(model, tmp_path, rule):
    """Each adjusts its hyper-parameters once an epoch, whole numbers, whenever it comes."""
    given = {"GOSGD": {"p": 0.5}, "EASGD": {"tau": 3}, "ASGD": {"tau": 3, "gamma": 0.05}}[rule]
    settings = {**SETTINGS, "n_epochs": 12, "seconds": 0.5, "pause": 0.03}
    first = 0 if rule == "GOSGD" else 1
    run = rules.run(rule, first + 3, tmp_path, "Sleeps", settings, **given)
    adjusted = []
    for rank in range(first, run.n):
        calls = run.result(rank)["calls"].tolist()
        epochs = [int(each.split()[1]) for each in calls if each.startswith("adjust")]
        assert epochs == list(range(len(epochs)))
        assert "train" in calls
        adjusted.append(len(epochs))
    assert max(adjusted) >= 12
    costs = [line for line in run.lines if line.startswith("validation cost")]
    assert float(costs[-1].split()[-1]) < 0.8 * rules.untrained_cost()
    assert "snapshot ./snapshots/snapshot_0012.npz" in run.output
    if rule == "GOSGD":
        [line] = [line for line in run.lines if line.startswith("sum of the weights")]
        assert abs(float(line.split()[-1]) - 1) < 1e-12


@pytest.mark.slow("several processes")
def test_gossip_of_all_to_all_cannot_block(tmp_path):
    """With every batch pushed, pushes are mutual and cyclic; Theano-MPI's workers blocked."""
    run = rules.run("GOSGD", 3, tmp_path, settings={**SETTINGS, "n_epochs": 10}, p=1)
    [line] = [line for line in run.lines if line.startswith("sum of the weights")]
    assert abs(float(line.split()[-1]) - 1) < 1e-12


@pytest.mark.slow("waits for several processes")
@pytest.mark.parametrize("rule", ["EASGD", "GOSGD"])
def test_a_worker_that_is_killed_is_left_out(tmp_path, rule):
    """The first worker, which records, or another one."""
    settings = {"n_rows": 96, "n_epochs": 20, "pause": 0.02}
    victim = 0 if rule == "GOSGD" else 1
    run = rules.Launched(rule, victim + 3, tmp_path, "Sleeps", settings, print_freq=4)
    run.wait_for("examples/s")
    run.send(victim, signal.SIGKILL)
    run.wait_for(f"rank {victim} (cpu)")
    assert run.wait() == 137
    assert "training goes on without it" in run.output
    assert "snapshot ./snapshots/snapshot_0020.npz" in run.output
    assert not (tmp_path / f"result_{victim}.npz").exists()


@pytest.mark.parametrize("rule", ["ASGD", "GOSGD"])
@pytest.mark.slow("several processes")
def test_a_worker_that_raises_is_left_out(tmp_path, rule):
    settings = {"n_rows": 96, "n_epochs": 12, "pause": 0.02, "fails": 2}
    run = rules.run(rule, 3, tmp_path, "Fails", settings, status=1)
    assert "ValueError: this batch is bad" in run.output
    assert "training goes on without it" in run.output
    assert "snapshot ./snapshots/snapshot_0012.npz" in run.output


@pytest.mark.parametrize(
    ("rule", "fails", "after"),
    [("GOSGD", 0, 0.1), ("GOSGD", 1, 0.1), ("EASGD", 1, 5.0), ("ASGD", 2, 0.1)],
)
@pytest.mark.slow("several processes")
def test_a_worker_that_never_begins_is_left_out(tmp_path, rule, fails, after):
    """The first worker, when the other has done all batches, or the second."""
    settings = {"n_rows": 96, "n_epochs": 6, "fails": fails, "early": after}
    run = rules.run(rule, 3, tmp_path, "Fails", settings, status=1, patience=20)
    assert "ValueError: this model is bad" in run.output
    assert "training goes on without it" in run.output
    assert "snapshot ./snapshots/snapshot_0006.npz" in run.output, run.output


@pytest.mark.slow("several processes")
def test_workers_end_when_the_server_has_died(tmp_path):
    settings = {"n_rows": 96, "n_epochs": 99, "pause": 0.02}
    run = rules.Launched("EASGD", 3, tmp_path, "Sleeps", settings, print_freq=4)
    run.wait_for("examples/s")
    run.send(0, signal.SIGKILL)
    assert run.wait() not in (0, None)
    assert "rank 0 has died, so this rank ends too" in run.output


@pytest.mark.parametrize("rule", ["ASGD", "GOSGD"])
@pytest.mark.slow("several processes")
def test_an_interrupt_writes_a_snapshot_from_which_the_run_goes_on(tmp_path, rule):
    settings = {"n_rows": 96, "n_epochs": 5, "pause": 0.05}
    given = {"learning_rate_rule": "adagrad"} if rule == "ASGD" else {}
    run = rules.Launched(rule, 3, tmp_path, "Sleeps", settings, print_freq=4, **given)
    run.wait_for("examples/s")
    run.interrupt()
    assert run.wait() == 130, run.output
    assert "snapshot ./snapshots/snapshot_000" in run.output
    done = [line for line in run.lines if line.startswith("adjusts")]
    again = rules.run(rule, 3, tmp_path, "Sleeps", {**settings, "pause": 0.0}, resume=True, **given)
    assert "resumed from snapshots/snapshot_000" in again.output
    [path, *_] = sorted((tmp_path / "snapshots").iterdir())
    with np.load(path) as file:
        sums_of_squares = [name for name in file.files if name.startswith("0/rule/")]
        assert len(sums_of_squares) == (rule == "ASGD")
        assert all(file[name].any() for name in sums_of_squares)
    assert "snapshot ./snapshots/snapshot_0005.npz" in again.output
    # The hyper-parameters of an epoch are adjusted once, before the interrupt or after it.
    both = done + [line for line in again.lines if line.startswith("adjusts")]
    of_first = [line for line in both if line.startswith(f"adjusts rank {int(rule != 'GOSGD')} ")]
    epochs = [int(line.split()[-1]) for line in of_first]
    # The worker that wrote the file may have been ahead of this one, or behind it.
    written = int(path.stem.rpartition("_")[2])
    assert epochs == sorted(epochs)
    assert all(epochs.count(epoch) <= 1 + (epoch > written) for epoch in epochs)
