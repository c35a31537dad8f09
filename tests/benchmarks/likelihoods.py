"""The likelihood of PyMC models on devices of JAX, beside JAX alone there, and beside CPU ranks.

Value and gradient, in turns: the whole model in a likelihood(devices=...) block; what its ranks
compute of it; one call of jax.jit for the same graph and rows. Then the whole model in a block of
CPU ranks, and by JAX's own gradient, as numpyro has it.

Draws per second: of one chain, and of several: nutpie in either block, nutpie with its JAX backend,
and numpyro, whose chains are vectorized. Each samples twice, with so many draws and with five times
as many, and the difference counts: without compilation and tuning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time

import numpy as np

from benchmarks.jax import in_jax
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, pymc

_MODELS = {
    "logistic": 500_000,
    "hierarchical": 1_000_000,
    "mixture": 500_000,
    "ordered": 500_000,
}
_CHAINS = 4
_MOST_IN_JAX = 1_000_000  # rows: PyMC gives JAX the data as constants, which it compiles with


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(
        parser, "--devices", options.devices_of_ranks, ["jax:cpu"], "the device of each rank"
    )
    options.add(parser, "--ranks", options.whole, 0, "CPU ranks to compare with; 0: none")
    options.add(parser, "--models", options.names(_MODELS, "model"), list(_MODELS), "models")
    options.add(parser, "--rows", options.count, None, "rows of each model, instead of its own")
    options.add(parser, "--seconds", options.positive, 3.0, "to measure each model")
    options.add(parser, "--draws", options.whole, 0, "draws of each chain; 0: no sampling")


def measure(args, report):
    """Measure all, and show the tables."""
    missing = [each for each in ("jax", "pymc") if importlib.util.find_spec(each) is None]
    if missing:
        raise frame.Refused("bench likelihoods needs PyMC and JAX: 'synkhronos[pymc,jax]'")
    found = report.results["evaluations"] = [
        {"model": name, "rows": args.rows or _MODELS[name]} for name in args.models
    ]
    where = ", ".join(args.devices)
    _table(report, f"On {where}", ("block", "ranks", "jit"), found, _on_devices, args)
    if args.ranks:
        _table(report, f"On {args.ranks} CPU ranks", ("cpu",), found, _on_cores, args)
    few = [each for each in found if each["rows"] <= _MOST_IN_JAX]
    _table(report, "JAX's own gradient of the model", ("jax",), few, _by_jax, args)
    found = report.results["sampling"] = []
    for name in args.models if args.draws else ():
        for way, chains in [(way, chains) for way in _WAYS for chains in (1, _CHAINS)]:
            if way == "CPU ranks" and not args.ranks:
                continue
            rate = _draws_per_second(name, args.rows or _MODELS[name], way, chains, args)
            found.append({"model": name, "way": way, "chains": chains, "draws_per_s": rate})
            shown = rate if isinstance(rate, str) else f"{rate:.1f} draws/s"
            report.show(f"{name}, {way}, {chains} chains: {shown}")


def make_model(name, rows):
    """Return a PyMC model with random data."""
    import pymc as pm

    if name in pymc.MODELS:
        return pymc.make_model(name, rows)[0]
    random = np.random.default_rng(0)
    with pm.Model() as model:
        if name == "mixture":
            y = np.where(random.random(rows) < 0.3, -2.0, 1.0) + random.normal(size=rows)
            weights = pm.Dirichlet("weights", np.ones(2))
            centers = pm.Normal("centers", [-1.0, 1.0], 1, shape=2)
            pm.NormalMixture("y", weights, centers, pm.HalfNormal("sigma", 1, shape=2), observed=y)
        else:
            x = random.normal(size=(rows, 5))
            latent = x @ random.normal(size=5) + random.logistic(size=rows)
            y = np.digitize(latent, [-2.0, 0.0, 2.0])
            cuts = pm.Normal(
                "cuts", [-1.0, 0.0, 1.0], 2, shape=3,
                transform=pm.distributions.transforms.ordered, initval=[-1.0, 0.0, 1.0],
            )  # fmt: skip
            eta = pm.math.dot(x, pm.Normal("weights", 0, 1, shape=5))
            pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=y, compute_p=False)
    return model


def _table(report, title, ways, found, measured, args):
    """Measure each model, and show a table of its milliseconds."""
    table = frame.Table("  model", "rows", *ways, first=16)
    report.show(f"{title}: value and gradient, medians in milliseconds\n{table.head}")
    for each in found:
        begin = time.monotonic()
        each.update(measured(each, args))
        each[f"{ways[0]}_seconds"] = time.monotonic() - begin
        times = [f"{each[f'{way}_ms']:.3f}" for way in ways]
        report.show(table.line(f"  {each['model']}", f"{each['rows']:,}", *times))


def _on_devices(each, args):
    from synkhronos.extensions import pymc as parallel
    from synkhronos.extensions.pymc.advice import compiled

    name, rows = each["model"], each["rows"]
    model, begin = make_model(name, rows), time.monotonic()
    with parallel.likelihood(model, devices=args.devices) as ours:
        entered = time.monotonic() - begin
        [evaluator] = ours.evaluators
        calls = {"block": compiled(model)}
        values = evaluator.values
        calls["ranks"] = lambda: evaluator.evaluate("gradients", values)
        # After the workers have been forked: here JAX starts in this process.
        calls["jit"] = _jitted(evaluator, values, args.devices[0])
        one, other = (calls[key]() for key in ("ranks", "jit"))
        if len(args.devices) == 1 and not np.allclose(one, other, rtol=1e-9):
            raise frame.Failed(f"{name}: {one} on ranks, {other} by jax.jit")
        return {"entered_s": entered, **_medians(calls, f"{name}, {rows:,} rows", args.seconds)}


def _on_cores(each, args):
    from synkhronos.extensions import pymc as parallel
    from synkhronos.extensions.pymc.advice import compiled

    model = make_model(each["model"], each["rows"])
    with parallel.likelihood(model, ranks=args.ranks):
        return _medians({"cpu": compiled(model)}, f"{each['model']}, CPU ranks", args.seconds)


def _by_jax(each, args):
    _start(args.devices[0])
    call = in_jax(make_model(each["model"], each["rows"]))
    return _medians({"jax": call}, f"{each['model']}, JAX", args.seconds)


def _medians(calls, what, seconds):
    measured = turns.Turns(seconds, 20, most=1000)
    measured.add_calls(calls)
    measured.take_all(f"{what}: turns")
    return {
        f"{key}_ms": 1e3 * float(np.median([np.median(each) for each in of]))
        for key, of in measured.rounds_of.items()
    }


@functools.lru_cache
def _start(device):
    from synkhronos._host.pytensor import jax_devices

    jax_devices.start(device, 0)


def _jitted(evaluator, values, device):
    """Return a call of one function of JAX, for the graph of the ranks and all rows."""
    import jax

    from synkhronos.extensions.pymc.runs import compiled

    _start(device)
    [term] = evaluator.terms
    function = compiled(term, True, mode="JAX").vm.jit_fn
    [(_, arrays)] = evaluator._read_data()
    rows = [jax.device_put(each) for each in arrays]
    shapes = [each.type.shape for each in term.parameters]
    sizes = [int(np.prod(shape)) for shape in shapes]

    def vector(flat, *rows):
        parts = jax.numpy.split(flat, np.cumsum(sizes)[:-1])
        return function(*(part.reshape(shape) for part, shape in zip(parts, shapes)), *rows)[0]

    jitted = jax.jit(vector)
    return lambda: np.asarray(jitted(values[: sum(sizes)], *rows))


_WAYS = {
    "nutpie on devices": ("nutpie", {}),
    "CPU ranks": ("nutpie", {}),
    "nutpie with JAX": ("nutpie", {"backend": "jax", "gradient_backend": "jax"}),
    "numpyro": ("numpyro", {"chain_method": "vectorized"}),
}


def _draws_per_second(name, rows, way, chains, args):
    from synkhronos.extensions import pymc as parallel

    model, (sampler, more) = make_model(name, rows), _WAYS[way]
    if importlib.util.find_spec(sampler) is None:
        return "not installed"
    block = contextlib.nullcontext()
    if way == "nutpie on devices":
        block = parallel.likelihood(model, devices=args.devices)
    elif way == "CPU ranks":
        block = parallel.likelihood(model, ranks=args.ranks)
    seconds = []
    try:
        with model, block:
            sample = _sampling(sampler, model, chains, more)
            for draws in (5, args.draws, 5 * args.draws):  # the first compiles
                with turns.shown(f"{name}, {way}, {chains} chains, {draws} draws"):
                    begin = time.monotonic()
                    sample(draws)
                    seconds.append(time.monotonic() - begin)
    except Exception as error:  # of any kind, from a sampler that does not fit this PyMC
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return 4 * args.draws * chains / (seconds[2] - seconds[1])


def _sampling(sampler, model, chains, more):
    """Return a function of a number of draws; nutpie compiles here, numpyro in each call."""
    if sampler == "nutpie":
        import nutpie

        compiled = nutpie.compile_pymc_model(model, **more)
        given = {"tune": 100, "chains": chains, "seed": 1, "progress_bar": False}
        return lambda draws: nutpie.sample(compiled, draws=draws, **given)
    import pymc as pm

    return lambda draws: pm.sample(
        draws, tune=100, chains=chains, cores=chains, random_seed=1, nuts_sampler=sampler,
        nuts_sampler_kwargs=more, progressbar=False, compute_convergence_checks=False, quiet=True,
    )  # fmt: skip
