"""Settings for the examples in docstrings: they are compiled quickly."""

import numpy as np
import pytest

from support import compatible, compiling, host_library

collect_ignore = [] if host_library.ON_PYTENSOR else ["_host/pytensor"]


def pytest_ignore_collect(collection_path):
    """Leave out examples that can't run on the host of this run."""
    return True if host_library.reason_to_leave_out(collection_path) else None


def pytest_collection_modifyitems(items):
    """Leave out the example of a class that shows the tools of one host."""
    left_out = host_library.leave_out(items)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def settings_of_examples(monkeypatch, doctest_namespace):
    """Run examples as a script, whose functions `parallel` divides and the package's it does not.

    Restore the settings of Theano, and imports.
    """
    from theano import config

    from synkhronos import session

    doctest_namespace["__name__"] = "__main__"
    monkeypatch.setenv("SYNKHRONOS_CHECK", "first")  # off in tests
    floatx = config.floatX
    # Numbers as NumPy 1 shows them: 14.0 and not np.float32(14.0).
    shown = {"legacy": "1.25"} if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else {}
    with compiling.quickly(), compatible.restored(), np.printoptions(**shown):
        yield
    config.floatX = floatx
    if session._Current.session is not None:  # of an example that failed
        session.close()
