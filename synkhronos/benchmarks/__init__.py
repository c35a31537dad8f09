"""Benchmarks, run as ``synkhronos bench NAME``; what each compares is measured in one run."""

BENCHMARKS = {
    "call": "synkhronos.benchmarks.call",
    "collectives": "synkhronos.benchmarks.collectives",
    "function": "synkhronos.benchmarks.function",
    "import": "synkhronos.benchmarks.imports",
    "scaling": "synkhronos.benchmarks.scaling",
    "training": "synkhronos.benchmarks.training",
}
