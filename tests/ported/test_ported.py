"""Programs for serial Theano run on ranks after at most 3 changed lines, with equal results."""

import functools

import pytest
import theano
from support import ported
from support.layouts import ON_DEVICES
from theano.compile import mode

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="forks sessions of its own"),
    pytest.mark.usefixtures("quickly_compiled", "no_session"),
]
PROGRAMS = sorted(ported.CHANGES)
SLOW = {"lenet": pytest.mark.slow("compiles convolutions and their gradients")}


def of_programs(names):
    """Parametrize a test by the programs of these names."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in names]
    )


@functools.lru_cache(maxsize=None)
def serial(name):
    return ported.run(name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_most_3_lines_change(name):
    lines = ported.changed_lines(name)
    assert len(lines) == len(ported.CHANGES[name]) <= 3


@pytest.fixture
def compiles(name, quickly_compiled):
    """Compile a program with convolutions with a C compiler: nothing else computes them here."""
    # Not with monkeypatch: undone after `quickly_compiled`, it would bring back the quick mode.
    quick = mode.instantiated_default_mode
    if name == "lenet":
        mode.instantiated_default_mode = theano.Mode("vm", "fast_compile")
    yield
    mode.instantiated_default_mode = quick


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("ranks, check", [(2, True), (3, False), (2, False), (3, True), (1, False)])
@of_programs(PROGRAMS)
def test_the_results_are_those_of_serial_theano(name, ranks, check):
    # A PortingWarning would be an error.
    found = ported.run_on_ranks(name, ranks, check)
    assert ported.difference(found, serial(name)) < 1e-9


@pytest.mark.sample(2)
@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("ranks", [2, 3, 1])
# Dropout of the Lasagne program, and the corruption of autoencoders, draw other numbers.
@of_programs(sorted(set(PROGRAMS) - {"lasagne", "da", "sda"}))
def test_programs_without_a_change_agree_too(name, ranks):
    found = ported.run_on_ranks(name, ranks, check=True, changed=False)
    assert ported.difference(found, serial(name)) < 1e-8
