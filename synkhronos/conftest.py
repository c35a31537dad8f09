"""Settings for the examples in docstrings: fast compilation, and Keras, if it is installed."""

import importlib.util

import pytest

collect_ignore = []
if importlib.util.find_spec("keras") is None:
    collect_ignore.append("extensions/keras")


@pytest.fixture(autouse=True)
def settings_of_examples(request, monkeypatch, tmp_path_factory):
    """Compile examples quickly; restore the settings of Keras and Theano after each."""
    from theano import config
    from theano.compile import mode

    from synkhronos import session

    before = config.mode, config.floatX, mode.instantiated_default_mode
    config.mode = "FAST_COMPILE"
    # Theano makes the default mode once, and goes on using it after a change of config.mode.
    mode.instantiated_default_mode = mode.predefined_modes["FAST_COMPILE"]
    if request.node.name.startswith("synkhronos.extensions.keras."):
        monkeypatch.setenv("KERAS_BACKEND", "theano")
        monkeypatch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        config.floatX = "float32"  # Keras sets it when it is imported
    yield
    config.mode, config.floatX, mode.instantiated_default_mode = before
    if session._Current.session is not None:  # of an example that failed
        session.close()
