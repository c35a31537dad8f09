"""For the examples on these pages: compiled quickly."""

import pytest
from support import compiling


@pytest.fixture(autouse=True)
def quickly():
    with compiling.quickly():
        yield
