"""Benchmarks, run as ``synkhronos bench NAME``; a run measures all systems that it compares."""

BENCHMARKS = {
    "call": "synkhronos.benchmarks.call",
    "collectives": "synkhronos.benchmarks.collectives",
    "function": "synkhronos.benchmarks.function",
    "import": "synkhronos.benchmarks.imports",
    "scaling": "synkhronos.benchmarks.scaling",
    "training": "synkhronos.benchmarks.training",
}
