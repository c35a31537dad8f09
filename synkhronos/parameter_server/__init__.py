"""The parameter server: devices push gradients by key and pull results, each at its own time.

>>> import numpy as np
>>> from synkhronos import parameter_server as ps
>>> with ps.create("local") as store:
...     store.init("w", np.zeros(3))
...     gradients = [np.ones(3), np.arange(3.0)]
...     _ = store.pushpull("w", gradients).wait()
>>> gradients
[array([1., 2., 3.]), array([1., 2., 3.])]

References
----------
mshadow-ps, 2014 (https://github.com/dmlc/mshadow, guide/mshadow-ps), after M. Li et al., "Scaling
distributed machine learning with the parameter server", OSDI 2014; KVStore of MXNet,
T. Chen et al., arXiv:1512.01274.
"""

import importlib
from typing import TYPE_CHECKING, Any, List

__all__ = [
    "KINDS",
    "CallbackFailed",
    "Future",
    "OutOfTurn",
    "ParameterServerError",
    "ProcessLost",
    "Profile",
    "RoundTimeout",
    "ServerLost",
    "Store",
    "StoreClosed",
    "StoreProfile",
    "Updater",
    "WeightsDiffer",
    "WorkerLost",
    "create",
    "function_updater",
    "rule_updater",
    "theano_updater",
]

# Imported on first use: processes of a group need no stores.
if TYPE_CHECKING:
    from synkhronos.parameter_server.errors import (
        CallbackFailed,
        OutOfTurn,
        ParameterServerError,
        ProcessLost,
        RoundTimeout,
        ServerLost,
        StoreClosed,
        WeightsDiffer,
        WorkerLost,
    )
    from synkhronos.parameter_server.rounds import Future
    from synkhronos.parameter_server.stores import KINDS, Store, create
    from synkhronos.parameter_server.timeline import StoreProfile
    from synkhronos.parameter_server.updaters import (
        Updater,
        function_updater,
        rule_updater,
        theano_updater,
    )

    Profile = StoreProfile  # the name that earlier scripts use
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        names: dict = {}
        for module in ("errors", "rounds", "stores", "timeline", "updaters"):
            names.update(vars(importlib.import_module(f"{__name__}.{module}")))
        names["Profile"] = names["StoreProfile"]
        globals().update({each: names[each] for each in __all__})
        return names[name]


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
