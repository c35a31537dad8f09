"""For the examples on these pages: compiled quickly, and imports restored."""

import pytest
from support import compatible, compiling, host_library


def pytest_ignore_collect(collection_path):
    """Leave out pages that can't run on the host of this run."""
    return True if host_library.reason_to_leave_out(collection_path) else None


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_CHECK", "first")  # off in tests
    with compiling.quickly(), compatible.restored():
        yield
