"""The likelihood of PyMC models on ranks beside JAX with all its threads, and beside plain PyMC.

Value and gradient of the log-probability, in 64 bits. JAX has the function that PyMC makes of its
graph for numpyro; the three take turns. It needs an environment with JAX, such as .venv-samplers.
"""

import importlib.util

import numpy as np

from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, pymc

_MODELS = {"negative_binomial": 200_000, **pymc.MODELS, "logistic": 200_000}
_COLUMNS, _GROUPS = 5, 200


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--ranks", options.count, 2, "ranks")
    options.add(parser, "--models", options.names(_MODELS, "model"), list(_MODELS), "models")
    options.add(parser, "--rows", options.count, None, "rows of each model, instead of its own")
    options.add(parser, "--seconds", options.positive, 5.0, "to measure each")


def measure(args, report):
    """Measure all, and show the table."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("pymc") is None:
        raise frame.Refused("bench jax needs PyMC and JAX: pip install 'synkhronos[pymc]' jax")
    table = frame.Table(
        "  model", "rows", "plain", "JAX", "ranks", "plain / ranks", "JAX / ranks", first=20
    )
    report.show(f"Value and gradient, {args.ranks} ranks; milliseconds, medians\n{table.head}")
    found = report.results["evaluations"] = []
    for name in args.models:
        each = _evaluation(name, args.rows or _MODELS[name], args)
        found.append(each)
        ms = [each[f"{way}_ms"] for way in ("plain", "jax", "ranks")]
        times = [*(f"{one:.3f}" for one in ms), *(f"{one / ms[2]:.2f}" for one in ms[:2])]
        report.show(table.line(f"  {name}", f"{each['rows']:,}", *times))


def _evaluation(name, rows, args):
    from synkhronos.extensions import pymc as parallel
    from synkhronos.extensions.pymc.advice import compiled

    model = _negative_binomial(rows) if name == "negative_binomial" else None
    model = model or pymc.make_model(name, rows)[0]
    calls = {"plain": compiled(model), "jax": in_jax(model)}
    with parallel.likelihood(model, ranks=args.ranks):
        calls["ranks"] = compiled(model)
        values = [float(call()[0]) for call in calls.values()]
        if not np.allclose(values, values[0], rtol=1e-10):
            raise frame.Failed(f"{name}: log-probabilities differ: {values}")
        measured = turns.Turns(args.seconds, 20, most=1000)
        measured.add_calls(calls)
        measured.take_all(f"{name}, {rows:,} rows: turns")
    ms = {
        f"{key}_ms": 1e3 * float(np.median([np.median(each) for each in of]))
        for key, of in measured.rounds_of.items()
    }
    return {"model": name, "rows": rows, **ms}


def in_jax(model):
    """Return a call of JAX's value and gradient of a model."""
    import jax
    from pymc.sampling.jax import get_jaxified_logp

    jax.config.update("jax_enable_x64", True)
    start = model.initial_point(random_seed=0)
    point = [np.asarray(start[each.name]) + 0.01 for each in model.value_vars]
    function = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
    return lambda: jax.block_until_ready(function(point))


def _negative_binomial(rows):
    """Return a hierarchical model of counts."""
    import pymc as pm

    random = np.random.default_rng(0)
    group, x = random.integers(0, _GROUPS, rows), random.normal(size=(rows, _COLUMNS))
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
        effect = pm.Normal("effect", 0, 1, shape=_GROUPS)
        weights = pm.Normal("weights", 0, 1, shape=_COLUMNS)
        mean = pm.math.exp(mu + tau * effect[group] + x @ weights)
        y = random.poisson(2, rows)
        pm.NegativeBinomial("y", mu=mean, alpha=pm.Exponential("alpha", 1), observed=y)
    return model
