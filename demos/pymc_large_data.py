"""Sample a PyMC model of many rows with all cores, and compare with plain PyMC.

The rows are visits to shops, made up: what a visitor has done before (some numbers), the shop, and
whether the visitor bought. The model is a logistic regression with an intercept for each shop. One
line gives the likelihood of the rows to all ranks: ``with parallel.likelihood(model): ...``.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pymc as pm

from synkhronos.extensions import pymc as parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import picture, positive, seed
from demos._tables import table

PROGRAM = Path(__file__).stem
N_SHOWN = 4  # slopes in the table


@dataclass
class Visits:
    """The rows, and the slopes with which they were made up."""

    history: np.ndarray  # of each visitor, shape (rows, slopes)
    shop: np.ndarray  # numbers from 0
    bought: np.ndarray  # 0 or 1
    slopes: np.ndarray


def make_up(n_rows, n_slopes, n_shops, number):
    """Return visits of random visitors."""
    draw = np.random.default_rng(number)
    slopes = 0.5 * draw.normal(size=n_slopes)
    intercepts = -1 + 0.7 * draw.normal(size=n_shops)
    history = draw.normal(size=(n_rows, n_slopes))
    shop = draw.integers(n_shops, size=n_rows)
    chance = 1 / (1 + np.exp(-(intercepts[shop] + history @ slopes)))
    return Visits(history, shop, (draw.random(n_rows) < chance).astype("int64"), slopes)


def build(visits):
    """Return the model: plain PyMC, which knows nothing about ranks."""
    with pm.Model() as model:
        slopes = pm.Normal("slopes", 0, 1, shape=visits.history.shape[1])
        mean, spread = pm.Normal("mean", 0, 2), pm.HalfNormal("spread", 1)
        intercepts = pm.Normal("intercepts", mean, spread, shape=int(visits.shop.max()) + 1)
        score = intercepts[visits.shop] + pm.math.dot(visits.history, slopes)
        pm.Bernoulli("bought", logit_p=score, observed=visits.bought)
    return model


@dataclass
class Run:
    """A posterior, and the time that it took."""

    label: str
    evaluation: float  # seconds of one value with its gradients
    sampling: float  # seconds
    posterior: dict  # parameter -> draws, shape (chains * draws, ...)


def sample(arguments, **options):
    """Call pm.sample as the command line says, but for some options."""
    given = {
        "draws": arguments.draws,
        "tune": arguments.tune,
        "chains": arguments.chains,
        "cores": 1,
        "random_seed": arguments.seed,
        "progressbar": sys.stderr.isatty(),
        "compute_convergence_checks": False,
    }
    return pm.sample(**{**given, **options})


def measure(label, model, arguments):
    """Sample one chain after the other; return a Run."""
    with model:
        density = model.logp_dlogp_function(ravel_inputs=True)
        density.set_extra_values({})
        point = pm.blocking.DictToArrayBijection.map(model.initial_point())
        density(point)  # compiles
        begin = time.perf_counter()
        for _ in range(20):
            density(point)
        evaluation = (time.perf_counter() - begin) / 20
        sample(arguments, draws=1, tune=1, chains=1, quiet=True)  # compiles
        begin = time.perf_counter()
        result = sample(arguments)
        sampling = time.perf_counter() - begin
    draws = {
        name: values.to_numpy().reshape(-1, *values.shape[2:])
        for name, values in result.posterior.data_vars.items()
    }
    return Run(label, evaluation, sampling, draws)


def parameters(run):
    """Return the draws of the parameters that the table shows, by name."""
    shown = {name: run.posterior[name] for name in ("mean", "spread")}
    slopes = run.posterior["slopes"].T[:N_SHOWN]
    return {**{f"slopes[{number}]": draws for number, draws in enumerate(slopes)}, **shown}


def posterior_table(runs):
    """Return a table of means and standard deviations, one column for each run."""
    rows = []
    for name in parameters(runs[0]):
        draws = [parameters(run)[name] for run in runs]
        rows.append([name, *(f"{each.mean():.4f} ± {each.std():.4f}" for each in draws)])
    return table(["posterior", *(run.label for run in runs)], rows)


def times_table(runs):
    """Return a table of the times of runs, and of their speed beside the first."""
    rows = [
        [
            run.label,
            f"{1e3 * run.evaluation:.2f}",
            f"{runs[0].evaluation / run.evaluation:.2f}",
            f"{run.sampling:.1f}",
            f"{runs[0].sampling / run.sampling:.2f}",
        ]
        for run in runs
    ]
    return table(["", "ms/evaluation", "speedup", "s of sampling", "speedup"], rows)


def plot(file, runs, visits):
    """Draw the posterior of the first slopes, of each run, and times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for number, run in enumerate(runs):
        for place, draws in enumerate(parameters(run).values()):
            low, high = np.quantile(draws, [0.03, 0.97])
            at = place + 0.25 * number
            left.plot([low, high], [at, at], f"C{number}", label="" if place else run.label)
            left.plot([draws.mean()], [at], f"oC{number}", markersize=4)
    names = list(parameters(runs[0]))
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.plot(visits.slopes[:N_SHOWN], range(N_SHOWN), "k|", markersize=12, label="true")
    left.set_title("posterior: mean and 94 % interval")
    left.legend()
    right.bar([run.label for run in runs], [run.sampling for run in runs], color=["C0", "C1"])
    right.set_title("seconds of pm.sample")
    figure.savefig(file, dpi=120)
    print(f"Drew {file}")


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", type=positive, default=100_000, metavar="N", help="visits (100000)")
    add("--slopes", type=positive, default=10, metavar="N", help="numbers of each visitor (10)")
    add("--shops", type=positive, default=30, metavar="N", help="intercepts (30)")
    add("--ranks", type=positive, metavar="N", help="how many (one for each core)")
    add("--draws", type=positive, default=100, metavar="N", help="of each chain (100)")
    add("--tune", type=positive, default=100, metavar="N", help="steps before the draws (100)")
    add("--chains", type=positive, default=1, metavar="N", help="one after the other (1)")
    add("--no-plain", action="store_true", help="leave out plain PyMC")
    add("--seed", type=seed, default=1, metavar="N", help="of all random numbers (1)")
    add("--plot", type=picture, metavar="FILE.png", help="draw the posterior, and times")
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return the runs."""
    arguments = parse(argv)
    visits = make_up(arguments.rows, arguments.slopes, arguments.shops, arguments.seed)
    model = build(visits)
    print(f"{arguments.rows:,} visits to {arguments.shops} shops")
    runs = []
    if not arguments.no_plain:
        runs.append(measure("plain PyMC", model, arguments))
    with parallel.likelihood(model, ranks=arguments.ranks) as divided:
        label = f"{divided.ranks} rank{'s' * (divided.ranks > 1)}"
        runs.append(measure(label, model, arguments))
    print("\n" + posterior_table(runs) + "\n\n" + times_table(runs))
    if arguments.plot:
        plot(arguments.plot, runs, visits)
    return runs


if __name__ == "__main__":
    main()
