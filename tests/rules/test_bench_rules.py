"""``synkhronos bench rules``: its figures, its curves, mistakes."""

import argparse
import json

import pytest

from synkhronos.tools.bench import BENCHMARKS, rules


@pytest.fixture
def bench(monkeypatch):
    """Return a function that runs the benchmark; ranks compile in Python."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("THEANO_FLAGS", "cxx=,mode=FAST_COMPILE")

    def run(*arguments):
        parser = argparse.ArgumentParser()
        rules.add_arguments(parser)
        return rules.main(parser.parse_args(arguments))

    return run


def test_rates_are_of_the_time_in_which_all_ranks_train():
    first = [[float(at), 10] for at in range(20)]
    late = [[at + 0.5, 10] for at in range(4, 24)]
    rate, of_steps = rules.rates([first, late])
    assert rate == pytest.approx(10 * (10 + 9) / (19 - 9.5)) and of_steps == 20
    with pytest.raises(rules.RunFailed, match="did not train at the same time: give more --steps"):
        rules.rates([first, [[at + 100.0, 10] for at in range(20)]])


def test_shares_are_of_all_rows_but_the_first():
    rows = [[2, 100.0, 100.0, 0, 0, 0], [4, 2.0, 1.0, 0.25, 0.25, 0.25], [6, 2.0, 1.0, 0, 0, 0]]
    found = rules.shares_of(rows)
    assert found == {"calc": 0.5, "sync": 0.0625, "comm": 0.0625, "wait": 0.0625, "rest": 0.3125}
    with pytest.raises(rules.RunFailed, match="give more --steps"):
        rules.shares_of([])


@pytest.mark.slow("starts processes for each rule")
def test_a_small_run_prints_every_figure(bench, tmp_path, capsys):
    path = tmp_path / "figures.json"
    given = ("--ranks", "2", "--steps", "30", "--batch", "8", "--units", "4", "--pairs", "1")
    given += ("--rules", "GOSGD,ASGD")  # the pair that is compared has BSP
    assert bench(*given, "--json", str(path)) == 0, capsys.readouterr().err
    figures = json.loads(path.read_text())
    assert [(row["rule"], row["ranks"]) for row in figures["rules"]] == [
        (rule, 2) for rule in ("GOSGD", "ASGD")
    ]
    for row in figures["rules"]:
        assert row["images_per_second"] > 0 and row["images_per_second_of_steps"] > 0
        shares = [row[name] for name in ("calc", "sync", "comm", "wait", "rest")]
        assert sum(shares) == pytest.approx(1) and row["calc"] > 0 and min(shares) > -0.05
    [(one, other)] = figures["pairs"]
    assert figures["ratio"] == one / other
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["rule", "ranks", "images/s"] and len(lines) == 5
    assert lines[-1].startswith("BSP on 2 ranks, beside make_train_step on 2 ranks: ")


@pytest.mark.slow("starts processes for each rule")
def test_rules_learn_digits(bench, tmp_path):
    """The validation cost falls; tests of the rules have the same of all of them."""
    path, plot = tmp_path / "figures.json", tmp_path / "curves.png"
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    given = ("--convergence", "--ranks", "2", "--epochs", "4", "--rules", "BSP,EASGD")
    assert bench(*given, "--plot", str(plot), "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert set(figures["curves"]) == {"BSP", "EASGD"}
    for points in figures["curves"].values():
        images, costs, errors = zip(*points)
        assert list(images) == sorted(images) and images[-1] >= 4 * 1400
        # From log(10).
        assert min(costs) < 1.5 and min(errors) < 0.5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_mistakes(bench, capsys, tmp_path):
    assert bench("--plot", str(tmp_path / "a.png")) == 2
    assert "--plot draws the curves of --convergence: add it" in capsys.readouterr().err
    for arguments in (("--rules", "BSQ"), ("--ranks", "0"), ("--steps", "x"), ("--pairs", "-1")):
        with pytest.raises(SystemExit):
            bench(*arguments)


def test_a_run_that_fails_is_told(bench, monkeypatch, capsys):
    monkeypatch.setattr(rules, "_MODEL", rules._MODEL.with_name("options.py"))
    assert bench("--rules", "BSP", "--ranks", "1", "--pairs", "0") == 1
    shown = capsys.readouterr().err
    assert "BSP on 1 rank has failed (2)" in shown and "has no class 'Perceptron'" in shown


def test_it_is_listed():
    assert BENCHMARKS["rules"] == rules.__name__
