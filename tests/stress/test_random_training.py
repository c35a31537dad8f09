"""make_train_step: random trainings have serial losses, outputs and parameters, or it says so."""

import collections
import os

import pytest

pytest.importorskip("synkhronos.extensions")

from support import compiling, random_training
from support.layouts import ON_DEVICES, Layout

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="graphs of the CPU")
LAYOUTS = [Layout(2), Layout(3, master=1)]
GRAPHS = int(os.environ.get("SYNKHRONOS_GRAPHS", 9))


def assert_serial(seeds, **kwargs):
    """Compare trainings with serial Theano; most must be compared, if they are many."""
    outcomes = collections.Counter(random_training.compare(seed, **kwargs) for seed in seeds)
    print(dict(outcomes))
    assert sum(outcomes.values()) < 20 or outcomes["equal"] > outcomes["ill"]


@pytest.mark.usefixtures("ranks")
def test_random_trainings_are_serial():
    with compiling.quickly():
        assert_serial(range(GRAPHS * 2 // 3))


@pytest.mark.usefixtures("ranks")
def test_optimized_random_trainings_are_serial():
    with compiling.in_python():
        assert_serial(range(10**6, 10**6 + GRAPHS // 3))


@pytest.mark.slow("compiles C code")
@pytest.mark.usefixtures("ranks")
def test_compiled_random_trainings_are_serial():
    assert_serial(range(2 * 10**6, 2 * 10**6 + 5 + GRAPHS // 100), is_compiled=True)
