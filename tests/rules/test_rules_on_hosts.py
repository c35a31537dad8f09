"""Rules on several hosts, whose ranks share memory on each host only."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import hosts, rules

pytestmark = [pytest.mark.mpi, pytest.mark.slow("two hosts")]
CASES = str(Path(rules.MODEL).with_name("rule_cases.py"))


def run(these, folder, rule, *arguments, n=2, model=(rules.MODEL, "Model"), status=0):
    """Run a rule with `n` CPU ranks on each host; return its output."""
    network = these.reached_by[3].replace("tcp,self", "tcp,sm,self")
    devices = [each for name in these.addresses for each in ("--devices", f"{name}:{cpus(n)}")]
    done = subprocess.run(
        [sys.executable, "-m", "synkhronos", "rule", rule, *devices]
        + [*these.reached_by[:3], network, *model]
        + ["--snapshot-freq", "0", *map(str, arguments)],
        cwd=folder,
        env=these.environment(THEANO_FLAGS=rules.QUICKLY),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr * bool(status)


def cpus(n):
    return ",".join(["cpu"] * n)


def params(folder, rank):
    with np.load(folder / f"result_{rank}.npz") as file:
        return np.concatenate([file[f"p{n}"].ravel() for n in range(4)])


def test_bsp_on_two_hosts_is_one_rank_with_all_rows(two_hosts, tmp_path):
    """In Theano-MPI no exchange could cross hosts but one, and that one built NCCL's clique."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    settings = {"n_rows": 206, "n_epochs": 3}
    given = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
    run(two_hosts, there, "BSP", *given, "--warm-up-epochs", "0")
    rules.run("BSP", 1, here, settings={**settings, "batch_size": 4 * 8})
    for rank in range(1, 4):
        np.testing.assert_array_equal(params(there, rank), params(there, 0))
    np.testing.assert_allclose(params(there, 0), params(here, 0), atol=1e-5)


def test_an_average_weighs_the_rows_of_all_hosts(two_hosts, tmp_path):
    """Ranks with 2, 1, 3 and 2 rows: the weight is the mean of all of them."""
    rows = "rows=[[[1.0, 3.0]], [[8.0]], [[4.0, 4.0, 2.0]], [[5.0, 5.0]]]"
    given = ["--sync-type", "avg", "--warm-up-epochs", "0", "--set", rows, "--set", "how=inputs"]
    run(two_hosts, tmp_path, "BSP", *given, model=(CASES, "Trains"))
    for rank in range(4):
        with np.load(tmp_path / f"result_{rank}.npz") as file:
            np.testing.assert_allclose(file["values"], [32 / 8], rtol=1e-6)


def test_parameters_in_another_order_on_another_host_are_refused(two_hosts, tmp_path):
    given = ["--set", "how=as a set"]
    said = run(two_hosts, tmp_path, "GOSGD", *given, n=1, model=(CASES, "Collects"), status=1)
    assert "params has another order on rank 1 than on rank 0" in said


@pytest.mark.parametrize(("rule", "n"), [("EASGD", 2), ("GOSGD", 1)])
def test_asynchronous_rules_on_two_hosts(two_hosts, tmp_path, rule, n):
    """With two ranks on each host, the server has workers on both."""
    output = run(two_hosts, tmp_path, rule, "--set", "n_epochs=6", n=n)
    costs = [line for line in output.splitlines() if line.startswith("validation cost")]
    # Not less than the first one printed: that may come late, when all ranks but one have ended.
    assert float(costs[-1].split()[-1]) < 0.99 * rules.untrained_cost()


def test_a_rank_whose_cable_is_cut_ends_bsp(two_hosts, tmp_path, monkeypatch):
    for name, value in two_hosts.environment(**hosts.IMPATIENT).items():
        monkeypatch.setenv(name, value)
    launched = OnHosts(two_hosts, tmp_path)
    launched.wait_for("adjusts rank 0")
    two_hosts.cut(2)
    status = launched.wait()
    two_hosts.mend(2)  # its daemon could not be told before
    assert status == 1
    lost = f"rank 1 (cpu on synk{two_hosts.net}-2)"
    assert f"{lost} can't be reached any more, which has ended the run" in launched.output
    assert "rank 1 has not been heard of for 4 s, so this rank ends too" in launched.output
    assert two_hosts.is_empty()


class OnHosts(rules.Launched):
    """BSP with a rank on each host, which does not end by itself."""

    def __init__(self, these, folder):
        devices = [word for each in these.addresses for word in ("--devices", f"{each}:cpu")]
        line = [sys.executable, "-m", "synkhronos", "rule", "BSP", *devices, *these.reached_by]
        settings = ["--set", "n_epochs=1000000", "--set", "n_rows=32", "--snapshot-freq", "0"]
        self._start([*line, rules.MODEL, "Model", *settings], folder)
