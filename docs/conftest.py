"""For the examples on these pages: compiled quickly, and imports restored."""

import pytest
from support import compatible, compiling


@pytest.fixture(autouse=True)
def quickly():
    with compiling.quickly(), compatible.restored():
        yield
