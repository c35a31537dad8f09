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


@functools.lru_cache(maxsize=None)
def serial(name):
    return ported.run(name)


@pytest.fixture
def convolves(monkeypatch):
    """Compile with a C compiler: nothing else computes convolutions here."""
    monkeypatch.setattr(mode, "instantiated_default_mode", theano.Mode("vm", "fast_compile"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_most_3_lines_change(name):
    lines = ported.changed_lines(name)
    assert len(lines) == len(ported.CHANGES[name]) <= 3


@pytest.mark.parametrize("ranks, check", [(2, True), (3, False), (2, False), (3, True), (1, False)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_those_of_serial_theano(request, name, ranks, check):
    if name == "lenet":
        request.getfixturevalue("convolves")
    # A PortingWarning would be an error.
    found = ported.run_on_ranks(name, ranks, check)
    assert ported.difference(found, serial(name)) < 1e-9
