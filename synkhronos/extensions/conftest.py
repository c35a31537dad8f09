"""Examples of libraries that are installed, and settings for Keras."""

import importlib.util

import pytest

collect_ignore = [
    path
    for path, library in (("keras", "keras"), ("pymc", "pymc"), ("pymc/in_jax.py", "jax"))
    if importlib.util.find_spec(library) is None
]


@pytest.fixture(autouse=True)
def settings_of_keras(request, settings_of_examples, monkeypatch, tmp_path_factory):
    """Let Keras find the settings that it is to have; `settings_of_examples` restores floatX."""
    if request.node.name.startswith("synkhronos.extensions.keras."):
        from theano import config

        monkeypatch.setenv("KERAS_BACKEND", "theano")
        monkeypatch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        config.floatX = "float32"  # Keras sets it when it is imported
