"""The likelihood of PyMC models on ranks, beside the plain model with one thread.

Value and gradient: the log-probability of the whole model with its gradients, as NUTS evaluates
it; "one rank" is this process alone, with the function that ranks have. Plain model and ranks take
turns. A gain is the median of the ratios of neighboring turns, a time that of the fifth of turns
that are fastest: other guests of the same machine slow down whole seconds, to half of the speed.
"Reading" is how much faster all ranks read their data than one rank all of them: no division of
work over cores gains more where memory is the limit and the data are read from it.

Sampling: pm.sample, without compilation: one chain, plain and on ranks; and as many chains as
ranks, plain in a process each, which is what PyMC does by itself, and one after the other on ranks.

Samplers (--samplers, in place of all else): one chain of each that pm.sample has, plain and on
ranks: draws, and the smallest effective sample size, for each second. The seconds of those of JAX
include its compilation, and all have those of tuning.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools

import numpy as np

from synkhronos._host import pythons
from synkhronos._wording import count
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

SAMPLERS = ("pymc", "nutpie", "numpyro", "blackjax")
MODELS = {"logistic": 500_000, "hierarchical": 200_000, "poisson": 200_000, "student": 100_000}
_ROWS = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
_TURNS = 50  # of each way, for one measurement
_COLUMNS, _GROUPS = 20, 300


def add_arguments(parser):
    """Add the options of this benchmark."""
    what = "ranks, or several numbers, such as 16,4: the first for all but the first table"
    options.add(parser, "--ranks", options.counts, [2], what)
    options.add(parser, "--models", options.names(MODELS, "model"), list(MODELS), "models")
    options.add(parser, "--rows", options.count, None, "rows of each model, instead of its own")
    what = "rows of each model, to find where ranks begin to pay"
    options.add(parser, "--pays", options.counts, _ROWS, what)
    options.add(parser, "--seconds", options.positive, 5.0, "to measure each evaluation")
    what = "draws of a chain, after as many to tune; 0: no sampling"
    options.add(parser, "--draws", options.whole, 150, what)
    what = "measure one chain of each sampler that is installed, and nothing else"
    parser.add_argument("--samplers", action="store_true", help=what)


def measure(args, report):
    """Measure without other libraries."""
    measure_beside(lambda model, data: {}, args, report)


def measure_beside(peer, args, report):
    """Measure all; ``peer(model, data)`` returns further figures of an evaluation."""
    if importlib.util.find_spec("pymc") is None:
        raise frame.Refused(f"bench pymc needs PyMC: {pythons.install('pymc')}")
    from threadpoolctl import threadpool_limits

    importlib.import_module("pymc")  # and the BLAS libraries whose threads are limited
    found = report.results
    n_ranks = args.ranks[0]
    found.update(ranks=n_ranks, evaluations=[], pays=[], sampling=[])
    heads = "  model", "rows", "plain", "one rank", "ranks", "gain", "of ranks", "reading"
    table = frame.Table(*heads, first=16 if len(args.ranks) == 1 else 26)
    numbers = ", ".join(map(str, args.ranks))
    head = f"Value and gradient, {numbers} ranks; {found['cores']} cores; milliseconds"
    if args.samplers:
        found["samplers"] = []
        with threadpool_limits(1):
            for name in args.models:
                for sampler in SAMPLERS:
                    each = _one_sampler(sampler, name, args.rows or MODELS[name], n_ranks, args)
                    found["samplers"].append(each)
                    report.show(_text_of_sampler(each))
        return
    with threadpool_limits(1):
        report.show(f"{head}\n{table.head}")
        for name in args.models:
            model, data = make_model(name, args.rows or MODELS[name])
            for each in _evaluations(name, model, data, args.ranks, args.seconds):
                found["evaluations"].append(each)
                title = name if len(args.ranks) == 1 else f"{name}, {count(each['ranks'], 'rank')}"
                report.show(_line(table, each, title))
            found["evaluations"][-len(args.ranks)].update(peer(name, data))
        report.show("Where ranks begin to pay; the last columns are gains")
        for name, rows in itertools.product(args.models, args.pays):
            [each] = _evaluations(name, *make_model(name, rows), args.ranks[:1], args.seconds)
            del each["reading"]  # little data stay in caches
            found["pays"].append(each)
            report.show(_line(table, each, name))
        fewest = min(found["pays"], key=lambda each: each["rows"])
        over = fewest["ranks_us"] - fewest["plain_us"]
        report.show(f"  an evaluation of {fewest['rows']:,} rows takes {over:+.1f} us with ranks")
        for name in args.models if args.draws else ():
            each = _sampling(name, args.rows or MODELS[name], n_ranks, args.draws)
            found["sampling"].append(each)
            report.show(_text_of_sampling(each))


def plot(results, path):
    """Draw rows against gains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for model, measured in itertools.groupby(results["pays"], lambda each: each["model"]):
        measured = list(measured)
        gains = [each["gain_of_ranks"] for each in measured]
        axes.semilogx([each["rows"] for each in measured], gains, "o-", label=model)
    axes.axhline(1, color="0.5", linewidth=0.8)
    speed = f"speed of {results['ranks']} ranks / plain PyMC"
    axes.set(xlabel="rows", ylabel=speed, ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def make_model(name, rows):
    """Return a PyMC model, and its random data by the names that programs of Stan have for them."""
    import pymc as pm

    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 1 if name == "hierarchical" else _COLUMNS))
    data = {"n": rows, "k": x.shape[1], "x": x}
    linear = x @ (random.normal(size=x.shape[1]) / 5)
    with pm.Model() as model:
        weights = pm.Normal("weights", 0, 1, shape=x.shape[1])
        if name == "logistic":
            y = (random.random(rows) < 1 / (1 + np.exp(-linear))).astype("int64")
            pm.Bernoulli("y", logit_p=pm.math.dot(x, weights), observed=y)
        elif name == "poisson":
            y = random.poisson(np.exp(linear / 2))
            pm.Poisson("y", pm.math.exp(pm.math.dot(x, weights)), observed=y)
        elif name == "student":
            y = linear + random.standard_t(4, rows)
            nu, sigma = pm.Gamma("nu", 2, 0.1), pm.HalfNormal("sigma", 1)
            pm.StudentT("y", nu=nu, mu=pm.math.dot(x, weights), sigma=sigma, observed=y)
        else:
            group = random.integers(0, _GROUPS, rows)
            y = random.normal(size=_GROUPS)[group] + linear + random.normal(size=rows)
            mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
            effect = mu + tau * pm.Normal("effect", 0, 1, shape=_GROUPS)
            mean = effect[group] + weights[0] * x[:, 0]
            pm.Normal("y", mean, pm.HalfNormal("sigma", 1), observed=y)
            data.update(k=_GROUPS, x=x[:, 0], g=group + 1)
    return model, {**data, "y": y}


def _evaluations(name, model, data, numbers, seconds):
    """Yield the microseconds of an evaluation, for each number of ranks: plain, one rank, ranks.

    Plain and one or several ranks take turns.
    """
    from synkhronos.extensions import pymc as parallel
    from synkhronos.extensions.pymc.advice import QUANTILE, compiled, seconds_of

    plain = compiled(model)
    result, reading_of_one = {"model": name, "rows": data["n"]}, 0.0
    for n_ranks in [1, *numbers]:
        with parallel.likelihood(model, ranks=n_ranks) as ours:
            measured = turns.Turns(seconds / 2, _TURNS, most=100_000)
            measured.add_calls({"plain": plain, "divided": compiled(model)})
            measured.take_all(f"{name}, {data['n']:,} rows: ranks={n_ranks}, turns")
            reading = seconds_of(ours.evaluators[0].read)
        turn = {key: [np.median(each) for each in of] for key, of in measured.rounds_of.items()}
        plain_us, us = (1e6 * float(np.percentile(each, QUANTILE)) for each in turn.values())
        gain = float(np.median(np.divide(turn["plain"], turn["divided"])))
        if not reading_of_one:
            reading_of_one = reading
            result.update(one_us=us, gain_of_one=gain)
            continue
        result.update(plain_us=plain_us, ranks=n_ranks, ranks_us=us, gain_of_ranks=gain)
        yield {**result, "reading": reading_of_one / reading}


def _sampling(name, rows, n_ranks, draws):
    """Return the seconds that pm.sample takes, and the means of the posterior."""
    import pymc as pm

    from synkhronos.extensions import pymc as parallel

    model, _ = make_model(name, rows)
    result = {"model": name, "rows": rows, "draws": draws, "chains": n_ranks}
    given = {
        "draws": draws, "tune": draws, "random_seed": 1, "progressbar": False,
        "nuts_sampler": "pymc", "compute_convergence_checks": False, "quiet": True,
    }  # fmt: skip

    def sample(way, chains, cores):
        with turns.shown(f"{name}, {rows:,} rows: {way}"):
            idata = pm.sample(chains=chains, cores=cores, **given)
        result[f"{way}_s"] = float(idata.posterior.attrs["sampling_time"])
        result[f"{way}_means"] = [
            float(idata.posterior[each].mean()) for each in sorted(idata.posterior.data_vars)
        ]

    with model:
        sample("plain", 1, 1)
        sample("plain_chains", n_ranks, n_ranks)
    with parallel.likelihood(model, ranks=n_ranks):
        sample("ranks", 1, 1)
        sample("ranks_chains", n_ranks, 1)
    return result


def _one_sampler(sampler, name, rows, n_ranks, args):
    """Return draws and effective samples a second, plain and on ranks, or why there are none."""
    import pymc as pm
    from arviz import ess

    from synkhronos.extensions import pymc as parallel

    result = {"sampler": sampler, "model": name, "rows": rows, "ranks": n_ranks}
    if importlib.util.find_spec(sampler) is None:
        return {**result, "refused": "not installed"}
    model, _ = make_model(name, rows)

    def sample(way):
        with turns.shown(f"{name}, {rows:,} rows, {sampler}: {way}"):
            idata = pm.sample(
                chains=1, cores=1, draws=args.draws, tune=args.draws, random_seed=1,
                nuts_sampler=sampler, progressbar=False, compute_convergence_checks=False,
                quiet=True,
            )  # fmt: skip
        seconds = float(idata.posterior.attrs["sampling_time"])
        fewest = min(float(each.min()) for each in ess(idata).data_vars.values())
        result[f"{way}_draws_per_s"] = args.draws / seconds
        result[f"{way}_ess_per_s"] = fewest / seconds

    try:
        with model:
            sample("plain")
        with parallel.likelihood(model, ranks=n_ranks):
            sample("ranks")
    except Exception as error:  # of any kind, from a sampler that does not fit this PyMC
        first = str(error).strip().split("\n")[0]
        where = "on ranks" if "plain_ess_per_s" in result else "without ranks, too"
        result["refused"] = f"{type(error).__name__}: {first} ({where})"
    return result


def _text_of_sampler(each):
    head = f"{each['sampler']}, {each['model']}, {each['rows']:,} rows, one chain: "
    if "refused" in each:
        return f"{head}{each['refused']}"
    ways = [
        f"{each[f'{way}_draws_per_s']:.1f} draws/s, {each[f'{way}_ess_per_s']:.1f} ESS/s {where}"
        for way, where in (("plain", "plain"), ("ranks", f"on {each['ranks']} ranks"))
    ]
    gain = each["ranks_draws_per_s"] / each["plain_draws_per_s"]
    return f"{head}{'; '.join(ways)} ({gain:.2f} times as fast)"


def _line(table, each, title):
    times = [f"{each[f'{way}_us'] / 1e3:.3f}" for way in ("plain", "one", "ranks")]
    gains = [each["gain_of_ranks"], each["gain_of_ranks"] / each["gain_of_one"]]
    gains += [each["reading"]] if "reading" in each else []
    shown = [f"{gain:.2f}" for gain in gains]
    return table.line(f"  {title}", f"{each['rows']:,}", *times, *shown)


def _text_of_sampling(each):
    chains = each["chains"]
    return (
        f"pm.sample, {each['model']}, {each['rows']:,} rows, {each['draws']} + {each['draws']} "
        f"draws: one chain {each['plain_s']:.1f} s plain, {each['ranks_s']:.1f} s on ranks "
        f"({each['plain_s'] / each['ranks_s']:.2f} times as fast); {chains} chains "
        f"{each['plain_chains_s']:.1f} s plain in {chains} processes, "
        f"{each['ranks_chains_s']:.1f} s one after the other on ranks "
        f"({each['plain_chains_s'] / each['ranks_chains_s']:.2f})"
    )
