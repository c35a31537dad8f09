"""`parallel`: random graphs have serial values on all ranks, or stay Theano's."""

import collections
import os

import pytest
from support import compiling, random_graphs
from support.layouts import ON_DEVICES, Layout

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="graphs of the CPU")
LAYOUTS = [Layout(2), Layout(3, master=1)]
GRAPHS = int(os.environ.get("SYNKHRONOS_GRAPHS", 60))


def assert_serial(seeds, **kwargs):
    """Compare graphs with serial Theano; all kinds must be among them, if they are many."""
    outcomes = collections.Counter(random_graphs.compare(seed, **kwargs) for seed in seeds)
    print(dict(outcomes))
    assert sum(outcomes.values()) < 30 or len(outcomes) == 3


@pytest.mark.usefixtures("ranks")
def test_random_graphs_have_serial_values():
    with compiling.quickly():
        assert_serial(range(GRAPHS * 2 // 3))


@pytest.mark.usefixtures("ranks")
def test_optimized_random_graphs_have_serial_values():
    with compiling.in_python():
        assert_serial(range(10**6, 10**6 + GRAPHS // 3))


@pytest.mark.slow("compiles C code")
@pytest.mark.usefixtures("ranks")
def test_compiled_random_graphs_have_serial_values():
    assert_serial(range(2 * 10**6, 2 * 10**6 + 10 + GRAPHS // 100), is_compiled=True)
