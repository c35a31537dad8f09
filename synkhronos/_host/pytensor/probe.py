"""Import PyTensor in a process of its own, for ``synkhronos info``, and print facts about it.

They are one line of JSON. It compiles nothing, which would take seconds.
"""

import importlib.util
import json
import os


def facts():
    """Return the versions, the mode of compilation and the compile cache."""
    import numpy
    import pytensor
    import scipy
    from pytensor.compile.mode import get_default_mode

    config, linker = pytensor.config, type(get_default_mode().linker).__name__
    versions = {
        "pytensor": pytensor.__version__,
        "path": os.path.dirname(pytensor.__file__),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "mode": str(config.mode),
        "linker": linker,
        "floatX": config.floatX,
        "cxx": config.cxx,
        "ldflags": config.blas__ldflags,
        "cache": str(config.compiledir),
        "cache_writable": os.access(config.compiledir, os.W_OK),
    }
    if importlib.util.find_spec("numba") is not None:
        import numba

        versions["numba"] = numba.__version__
    return versions


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
