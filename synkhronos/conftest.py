"""Settings for the examples in docstrings: fast compilation, and Keras, if it is installed."""

import importlib.util

import pytest
from support import compatible, compiling, host  # of the folder tests, see pyproject.toml

collect_ignore = ["comm/mpi/carrier.py"]  # it starts MPI when it is imported
if importlib.util.find_spec("keras") is None:
    collect_ignore.append("extensions/keras")


def pytest_ignore_collect(collection_path):
    """Leave out examples that can't run on the host of this run."""
    return True if host.reason_to_leave_out(collection_path) else None


@pytest.fixture(autouse=True)
def settings_of_examples(request, monkeypatch, tmp_path_factory):
    """Compile examples quickly; restore the settings of Keras and Theano, and imports."""
    from theano import config

    from synkhronos import session

    floatx = config.floatX
    if request.node.name.startswith("synkhronos.extensions.keras."):
        monkeypatch.setenv("KERAS_BACKEND", "theano")
        monkeypatch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        config.floatX = "float32"  # Keras sets it when it is imported
    with compiling.quickly(), compatible.restored():
        yield
    config.floatX = floatx
    if session._Current.session is not None:  # of an example that failed
        session.close()
