"""Serving ``theanompi`` inside a test, and taking it away again."""

import contextlib
import sys
import types

from support.host_library import ON_PYTENSOR

if ON_PYTENSOR:  # it has no module of cuDNN
    dnn = types.SimpleNamespace()
else:
    import theano.gpuarray.dnn as dnn

THEIRS = ("theanompi", "hickle")


def _served():
    return {name for name in sys.modules if name.split(".")[0] in THEIRS}


@contextlib.contextmanager
def restored():
    """Restore the import system, and Theano's dnn module, as they were before the with block."""
    finders, modules, kept = list(sys.meta_path), _served(), dict(vars(dnn))
    path = list(sys.path)
    try:
        yield
    finally:
        sys.meta_path[:], sys.path[:] = finders, path
        vars(dnn).update(kept)
        for name in _served() - modules:
            del sys.modules[name]
