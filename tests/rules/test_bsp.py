"""BSP in processes of its own, compared with plain Theano in this one."""

import re
import signal

import numpy as np
import pytest
from support import rules
from support.compatible import restored
from support.rules import Serial
from support.waiting import wait_until

from synkhronos.rules import compatible

pytestmark = pytest.mark.usefixtures("quickly_compiled")
RATE, MU, DECAY, BATCH = 0.1, 0.9, 1e-3, 8


@pytest.fixture(scope="module")
def model():
    """Return the module of the model, which imports theanompi."""
    with restored():
        yield compatible.import_model(rules.MODEL)


def train_serially(model, n_ranks, n_rows, n_epochs, serial, warm_up=0):
    """Take the steps of `n_ranks` ranks, each with all rows that they have together."""
    x, y = model.rows(n_rows)
    n_steps = 0
    for epoch in range(n_epochs):
        if 1 <= epoch <= warm_up:
            rate = serial.rate.get_value() * n_ranks ** (1.0 / warm_up)
            serial.rate.set_value(np.float32(rate))
        order = model.order_of_epoch(epoch, n_rows)
        for begin in range(0, n_rows, n_ranks * BATCH):
            chosen = order[begin : begin + n_ranks * BATCH]
            serial.step(x[chosen], y[chosen])
            n_steps += 1
    return n_steps


def equal_on_all_ranks(run):
    first = run.params(0)
    for rank in range(1, run.n):
        np.testing.assert_array_equal(run.params(rank), first)
    return first


@pytest.mark.parametrize(
    ("n_ranks", "strategy"), [(2, "ar"), (3, "nccl32"), (2, "asa32"), (1, "ar")]
)
@pytest.mark.sample(1)
def test_cdd_is_momentum_sgd_on_all_rows(model, tmp_path, n_ranks, strategy):
    """No step is late by one, and batches of other sizes, or none, weigh as many rows as they have.

    In Theano-MPI the first iteration applied nothing, and the last of an epoch was pending.
    """
    n_rows = 206  # 26 batches, the last of 6 rows
    settings = {"n_rows": n_rows, "n_epochs": 6, "mu": MU, "eta": DECAY, "lr": RATE}
    run = rules.run(
        "BSP",
        n_ranks,
        tmp_path,
        settings=settings,
        exch_strategy=strategy,
        warm_up_epochs=2,
        seed=1,
    )
    serial = Serial(model, RATE, MU, DECAY)
    n_steps = train_serially(model, n_ranks, n_rows, 6, serial, warm_up=2)
    assert n_steps > 50
    found = equal_on_all_ranks(run)
    np.testing.assert_allclose(found, serial.values, atol=1e-5)
    assert np.abs(found).max() > 0.5
    assert run.result()["lr"] == pytest.approx(RATE * n_ranks, rel=1e-5)


@pytest.mark.slow("several processes")
def test_16_bits_differ_only_in_rounding(model, tmp_path):
    settings = {"n_rows": 96, "n_epochs": 2, "mu": MU, "eta": DECAY, "lr": RATE}
    run = rules.run("BSP", 2, tmp_path, settings=settings, exch_strategy="asa16", warm_up_epochs=0)
    serial = Serial(model, RATE, MU, DECAY)
    train_serially(model, 2, 96, 2, serial)
    found = equal_on_all_ranks(run)
    np.testing.assert_allclose(found, serial.values, atol=2e-3)
    assert not np.array_equal(found, serial.values)


@pytest.mark.slow("several processes")
def test_avg_of_plain_sgd_is_sgd_on_all_rows(model, tmp_path):
    """In Theano-MPI the parameters of models with lib.opt never moved under avg."""
    settings = {"n_rows": 90, "n_epochs": 2, "mu": 0.0, "eta": 0.0, "lr": RATE}
    run = rules.run("BSP", 2, tmp_path, settings=settings, sync_type="avg", warm_up_epochs=0)
    serial = Serial(model, RATE)
    train_serially(model, 2, 90, 2, serial)
    np.testing.assert_allclose(equal_on_all_ranks(run), serial.values, atol=1e-5)


@pytest.mark.slow("several processes")
def test_parameters_are_averaged_before_each_validation(tmp_path):
    """Also if the batches of an epoch are fewer than those between two exchanges."""
    settings = {"n_rows": 80, "n_epochs": 2, "eta": 0.0}
    run = rules.run("BSP", 2, tmp_path, settings=settings, sync_type="avg", exchange_freq=99)
    equal_on_all_ranks(run)


@pytest.mark.slow("several processes")
@pytest.mark.parametrize(
    ("modelclass", "given", "message"),
    [
        ("Model", {"settings": {"n_epoch": 3}}, "n_epoch=3: Model has no attribute 'n_epoch'"),
        ("Descends", {}, "must leave the lists vels and vels2"),
    ],
)
def test_what_can_not_be_trained_is_refused(tmp_path, modelclass, given, message):
    run = rules.run("BSP", 2, tmp_path, modelclass, status=1, **given)
    assert message in run.output


@pytest.mark.slow("several processes")
def test_other_numbers_of_ranks_go_on_from_the_end_of_an_epoch(tmp_path):
    rules.run("BSP", 2, tmp_path, settings={"n_epochs": 1})
    for n, sync_type in ((3, "cdd"), (1, "cdd"), (2, "avg")):
        resumed = {"resume": "snapshots/snapshot_0001.npz", "sync_type": sync_type}
        run = rules.run("BSP", n, tmp_path, **resumed)
        assert "is of BSP cdd on 2 ranks: this run goes on with its" in run.output
        assert "train" in run.result()["calls"]
    run = rules.run("EASGD", 2, tmp_path, resume="snapshots/snapshot_0001.npz")
    assert "goes on with its parameters" in run.output


@pytest.mark.slow("several processes")
def test_swap_exchanges_the_parameters_of_pairs(model, tmp_path):
    """It read a list of parameters that Theano-MPI had never set."""
    settings = {"n_rows": 40, "n_epochs": 1, "mu": 0.0, "eta": 0.0, "lr": RATE}
    run = rules.run("BSP", 2, tmp_path, settings=settings, sync_type="swap", warm_up_epochs=0)
    pair = [Serial(model, RATE) for _ in range(2)]
    x, y = model.rows(40)
    order = model.order_of_epoch(0, 40)
    for number in range(0, 5, 2):
        for rank, serial in enumerate(pair):
            chosen = order[(number + rank) * BATCH :][:BATCH]
            if len(chosen):
                serial.step(x[chosen], y[chosen])
        pair.reverse()
    for rank in range(2):
        np.testing.assert_allclose(run.params(rank), pair[rank].values, atol=1e-5)


@pytest.mark.slow("several processes, three times")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    """It was stopped by a Ctrl-C in the middle of an epoch."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    settings = {"n_rows": 206, "n_epochs": 3}
    expected = equal_on_all_ranks(rules.run("BSP", 2, whole, settings=settings))

    slow = {**settings, "pause": 0.05}
    stopped = rules.Launched("BSP", 2, parts, "Sleeps", slow, print_freq=2)
    stopped.wait_for("global epoch 0 took")
    stopped.interrupt()
    assert stopped.wait() == 130
    assert re.search(r"snapshot_000\d_0000\d\d\.npz", stopped.output)  # in an epoch
    resumed = rules.run("BSP", 2, parts, settings=settings, resume=True)
    np.testing.assert_array_equal(equal_on_all_ranks(resumed), expected)


@pytest.mark.slow("several processes")
def test_all_ranks_stop_when_one_asks_and_all_of_the_validation_set_is_read(tmp_path):
    """Theano-MPI looped for ever after 'stop', and read 1/n_subb of the validation set."""
    settings = {"n_rows": 40, "n_epochs": 9, "n_subb": 2, "n_batch_val": 3}
    run = rules.run("BSP", 2, tmp_path, "Stops", settings=settings)
    for rank, n_batches in ((0, 3), (1, 2)):
        calls = run.result(rank)["calls"].tolist()
        epoch = ["train"] * n_batches * 2 + ["reset train"] + ["val"] * 6 + ["reset val"]
        info = ["info"] * (rank == 0)
        assert calls == [*epoch, "adjust 0", *info, *epoch, "adjust 1", *info]


@pytest.mark.slow("several processes")
def test_a_rank_that_raises_ends_the_run_with_its_traceback(tmp_path):
    run = rules.run("BSP", 2, tmp_path, "Fails", {"fails": 1, "n_rows": 206}, status=1)
    assert "rank 1 (cpu) on " in run.output
    assert "ValueError: this batch is bad" in run.output


@pytest.mark.slow("several processes twice")
def test_a_run_goes_on_from_its_last_snapshot_after_a_rank_was_killed(tmp_path):
    settings = {"pause": 0.05, "n_epochs": 6, "n_rows": 96}
    given = {"snapshot_freq": 1, "restarts": 1}
    run = rules.Launched("BSP", 2, tmp_path, "Sleeps", settings, **given)
    run.wait_for("snapshot ./snapshots/snapshot_0002.npz")
    run.send(1, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "attempt 2 of 2 on localhost. Lost before: rank 1 (cpu on" in run.output
    assert "resumed from snapshots/snapshot_000" in run.output
    assert (tmp_path / "snapshots" / "snapshot_0006.npz").exists()
    undisturbed = rules.run("BSP", 2, tmp_path, "Sleeps", {**settings, "pause": 0.0})
    np.testing.assert_array_equal(run.params(), undisturbed.params())


@pytest.mark.slow("several processes")
def test_a_rank_that_never_comes_ends_the_run(tmp_path):
    settings = {"pause": 0.05, "n_epochs": 999}
    run = rules.Launched("BSP", 2, tmp_path, "Sleeps", settings, patience=2, print_freq=2)
    run.wait_for("examples/s")
    stopped = run.pid_of(1)
    try:
        run.send(1, signal.SIGSTOP)
        assert run.wait() == 1
        assert "waited 2 s for rank 1: is one of them stopped?" in run.output
    finally:
        if run.process.poll() is None:
            run.send(1, signal.SIGCONT)
    wait_until(lambda: not is_alive(stopped))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow("several processes")
def test_a_model_with_updates_of_its_own_averages_its_parameters(tmp_path):
    # Ranks have six batches in an epoch: two after the last exchange.
    equal_on_all_ranks(rules.run("BSP", 2, tmp_path, "Descends", sync_type="avg", exchange_freq=4))


@pytest.mark.slow("starts a rank")
@pytest.mark.parametrize("rate, told", [(1e-9, 1), (0.1, 0)])
def test_an_error_that_does_not_fall_is_told_once(tmp_path, rate, told):
    """ASGD did not learn at its defaults, and nothing said so."""
    made = rules.run("BSP", 1, tmp_path, settings={"n_epochs": 6, "lr": rate})
    assert made.output.count("the validation error does not fall") == told
    assert ("learning_rate 1e-09" in made.output) == bool(told)
