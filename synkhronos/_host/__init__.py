"""The host library (Theano or PyTensor), under the names that the module `names` imports.

    from synkhronos import _host
    _host.peek(variable)             # calls the function of the host

Each host library has a folder beside this file. Its module `library` gives the library's classes
and functions the names that `base` uses; its other modules differ in more than names. Only these
folders import Theano or PyTensor, and `extensions.pymc`, which is for PyTensor alone. `extensions`
and `tools` build graphs with `library` and `tensor`.

Importing this package imports no host library: the first use of a name does, once for a process,
and `choice` says which.
"""

import importlib
from typing import TYPE_CHECKING, Any

from synkhronos._host import choice as choice
from synkhronos._host import pythons as pythons

if TYPE_CHECKING:  # as in `synkhronos`
    from synkhronos._host.names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the host library, and with it all names."""
        names = {} if name.startswith("__") else vars(importlib.import_module(f"{__name__}.names"))
        if name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals().update({each: names[each] for each in names if not each.startswith("__")})
        return names[name]
