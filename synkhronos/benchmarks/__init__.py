"""Benchmarks, run as ``synkhronos bench NAME``; what each compares is measured in one run."""

BENCHMARKS = {
    "call": "synkhronos.benchmarks.call",
    "function": "synkhronos.benchmarks.function",
}
