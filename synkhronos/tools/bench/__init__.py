"""Benchmarks that users run on their own machine, as ``synkhronos bench NAME``.

Comparisons with other libraries, and benchmarks behind single figures of the documentation, are in
``tests/benchmarks``; they use the same frame.
"""

BENCHMARKS = {
    "advise": "synkhronos.tools.bench.advise",
    "call": "synkhronos.tools.bench.call",
    "collectives": "synkhronos.tools.bench.collectives",
    "function": "synkhronos.tools.bench.function",
    "machines": "synkhronos.tools.bench.machines",
    "pymc": "synkhronos.tools.bench.pymc",
    "scaling": "synkhronos.tools.bench.scaling",
    "training": "synkhronos.tools.bench.training",
}
