"""Memory that is handed out stays as it was: random walks against a model in NumPy."""

import os

import pytest
from support.layouts import Layout, forked
from support.walks import Walk

WALKS = int(os.environ.get("SYNKHRONOS_WALKS", 300))
# Walks set variables in the master alone.
pytestmark = pytest.mark.filterwarnings("ignore::synkhronos.PortingWarning")
LAYOUTS = pytest.mark.parametrize(
    "n, master", [(1, 0), (2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)]
)


@LAYOUTS
@pytest.mark.usefixtures("compiled_if_thorough")
def test_some_walks(n, master):
    with forked(Layout(n, master)):
        walk = Walk(n, master)
        for seed in range(10):
            walk.run(seed, 30)
        assert len(walk.done) == 13


@LAYOUTS
@pytest.mark.slow("walks 900 times in all, 30 steps each")
def test_many_walks(n, master):
    with forked(Layout(n, master)):
        walk = Walk(n, master)
        for seed in range(100, 100 + WALKS):
            walk.run(seed, 30)
