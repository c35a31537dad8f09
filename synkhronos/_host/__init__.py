"""The host library, with which users write graphs, behind the names that `names` imports.

    from synkhronos import _host
    _host.peek(variable)             # calls the function of the host

A host is a folder beside this file: its module `library` has what `base` needs of the library, and
its other modules what differs in more than names. Only the modules in these folders import Theano
or PyTensor, and `extensions.pymc`, which is for PyTensor alone. `extensions` and `tools` build
graphs with `library` and `tensor`.

Importing this package imports no host: the first use of a name does, and `choice` says which. From
then on the process has this host.
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
