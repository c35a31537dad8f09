"""Benchmarks that compare with other libraries, or make a figure of the documentation.

``make bench`` lists them, and ``make bench BENCH="collectives --sizes 1K"`` runs one. Those that
users run on their own machine are in ``synkhronos.tools.bench``, whose frame these use.
"""

BENCHMARKS = {
    "busy": "benchmarks.busy",
    "chaos": "benchmarks.chaos",
    "clusters": "benchmarks.clusters",
    "collectives": "benchmarks.collectives",
    "compile": "benchmarks.compiling",
    "counts": "benchmarks.counts",
    "figures": "benchmarks.figures",
    "import": "benchmarks.imports",
    "gallery": "benchmarks.gallery",
    "jax": "benchmarks.jax",
    "likelihoods": "benchmarks.likelihoods",
    "losses": "benchmarks.losses",
    "overlap": "benchmarks.overlap",
    "parameter_server": "benchmarks.parameter_server",
    "pymc": "benchmarks.pymc",
    "programs": "benchmarks.foreign",
    "resnet": "benchmarks.resnet",
    "rules": "benchmarks.rules",
    "simulate": "benchmarks.simulate",
    "start": "benchmarks.start",
    "threads": "benchmarks.threads",
    "training": "benchmarks.training",
    "updates": "benchmarks.updates",
}
