"""Synkhronos: data parallelism for Theano.

``import synkhronos as synk``, then :func:`fork` once, :func:`function` in place of
``theano.function``, and :func:`close` at the end. An import starts no process and opens no device;
Theano is imported when a name is first used.
"""

import importlib

from synkhronos._host.theano import import_support

import_support.check_python()
import_support.install()

__version__ = "0.1.0"

_HOMES = {
    "session": ("fork", "close"),
    "functions": ("function", "distribute"),
    "inputs": ("data",),
    "collectives": (
        "all_gather",
        "all_reduce",
        "broadcast",
        "gather",
        "reduce",
        "scatter",
    ),
    "values": ("get_lengths", "get_shapes", "get_value", "set_value"),
    "_machine.devices": ("get_n_gpu",),
    "profiling": ("profile",),
    "profiling.status": ("status",),
    "errors": ("SessionError", "SharedMemoryFull", "WorkerDied", "WorkerError"),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_NAMES, "ops"])


def __getattr__(name):
    if name == "ops":
        return importlib.import_module("synkhronos.ops")
    if name not in _NAMES:
        raise AttributeError(f"module 'synkhronos' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"synkhronos.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
