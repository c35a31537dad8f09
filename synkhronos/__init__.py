"""Synkhronos: data parallelism for Theano and PyTensor.

``import synkhronos as synk``, then :func:`fork` once, :func:`function` in place of
``theano.function`` or ``pytensor.function``, and :func:`close` at the end. An import starts no
process and opens no device; the host library is imported when a name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, List

from synkhronos._host import pythons as _pythons
from synkhronos._host.choice import needs_cures as _needs_cures

_pythons.check()
_pythons.check_packages()
if _needs_cures():
    from synkhronos._host.theano import import_support as _import_support

    _import_support.install()
    _import_support.warn_of_new_numpy()

__version__ = "1.1.0"

# The module that defines each public name: `__getattr__` imports it when the name is first used.
_PUBLIC = {
    "tools.advice": ("advise",),
    "session": ("fork", "close", "restart_count"),
    "checkpoints": ("load", "save"),
    "resuming": ("resume",),
    "functions": ("function", "distribute"),
    "inputs": ("data",),
    "ops": ("rows",),
    "collectives": ("all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"),
    "values": ("get_lengths", "get_shapes", "get_value", "set_value"),
    "_machine.devices": ("get_n_gpu",),
    "porting": ("parallel", "parallel_report"),
    "profiling": ("profile",),
    "profiling.status": ("status",),
    "errors": ("PortingWarning", "SessionError", "SharedMemoryFull", "WorkerDied", "WorkerError"),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_MODULE_OF, "ops"])

# Type checkers and editors don't run __getattr__; if they see one, they accept any name.
if TYPE_CHECKING:
    from synkhronos import ops as ops
    from synkhronos._machine.devices import get_n_gpu as get_n_gpu
    from synkhronos.checkpoints import *
    from synkhronos.collectives import *
    from synkhronos.errors import *
    from synkhronos.functions import *
    from synkhronos.inputs import *
    from synkhronos.ops import rows as rows
    from synkhronos.porting import *
    from synkhronos.profiling import *
    from synkhronos.profiling.status import status as status
    from synkhronos.resuming import *
    from synkhronos.session import close as close
    from synkhronos.session import fork as fork
    from synkhronos.session import restart_count as restart_count
    from synkhronos.tools.advice import *
    from synkhronos.values import *
else:

    def __getattr__(name: str) -> Any:
        if name == "ops":
            return importlib.import_module("synkhronos.ops")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'synkhronos' has no attribute {name!r}")
        if name == "fork":  # import now: later no free descriptor may be left to read a module
            for module in ("functions", "inputs", "collectives", "values"):
                importlib.import_module(f"synkhronos.{module}")
        value = getattr(importlib.import_module(f"synkhronos.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__} - {"Any", "List", "TYPE_CHECKING", "importlib"})
