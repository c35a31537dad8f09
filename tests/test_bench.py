"""The benchmarks run, and measure what they say."""

import json
import subprocess
import sys

from synkhronos.benchmarks import call


def test_bench_call_prints_every_figure():
    command = [sys.executable, "-m", "synkhronos", "bench", "call", "--json"]
    options = ["--calls", "200", "--idle", "0.5", "--megabytes", "8"]
    done = subprocess.run(command + options, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 0 < figures["theano_us"] < figures["call_us"]
    assert figures["pipe_us"] > 0
    assert figures["distribute_s"] > 0
    assert figures["compile_s"] > 0
    assert figures["data_bytes"] == 8_000_000
    # The Data is there once, not once for each rank; the margin is what small processes wobble.
    assert 0.9 < figures["pss_per_data"] < 2
    assert figures["idle_cpu_percent"] < 10


def test_the_echo_answers():
    echo = call._Echo()
    try:
        echo()
        echo()
    finally:
        echo.close()
    assert echo._process.exitcode == 0
