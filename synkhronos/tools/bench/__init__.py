"""Benchmarks, run as ``synkhronos bench NAME``; a run measures all systems that it compares."""

BENCHMARKS = {
    "call": "synkhronos.tools.bench.call",
    "collectives": "synkhronos.tools.bench.collectives",
    "compile": "synkhronos.tools.bench.compiling",
    "function": "synkhronos.tools.bench.function",
    "import": "synkhronos.tools.bench.imports",
    "machines": "synkhronos.tools.bench.machines",
    "parameter_server": "synkhronos.tools.bench.parameter_server",
    "pymc": "synkhronos.tools.bench.pymc",
    "rules": "synkhronos.tools.bench.rules",
    "scaling": "synkhronos.tools.bench.scaling",
    "training": "synkhronos.tools.bench.training",
    "updates": "synkhronos.tools.bench.updates",
}
