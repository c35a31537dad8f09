"""The parameters of a store: names, kinds, defaults, as `set_param` takes them.

References
----------
The names are those of mshadow-ps (https://github.com/dmlc/mshadow, guide/mshadow-ps).
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import numpy as np

from synkhronos import _wording
from synkhronos.parameter_server.reductions import names

_FLAGS = {"0": False, "1": True, "False": False, "True": True}
_PUSH_OP = re.compile(r"push_op\[(.+)\]")


def _flag(name, value):
    if isinstance(value, (int, str, np.integer, np.bool_)) and str(value) in _FLAGS:
        return _FLAGS[str(value)]
    raise ValueError(f"{name} must be 0 or 1, got {_wording.shown(value)}.")


def _at_least(lowest):
    def read(name, value):
        if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
            value = int(value)
        return _wording.whole_number(name, value, lowest)

    return read


def _threads(name, value):
    if value in ("ndev", "one"):
        return value
    raise ValueError(f'{name} must be "ndev" or "one", got {_wording.shown(value)}.')


PARAMETERS = {  # the default, and the function that reads a value
    "update_on_server": (False, _flag),  # a pull returns the weight that the store has updated
    "test_on_server": (False, _flag),  # the store updates too; a pull still returns the reduction
    "bigarray_bound": (1_000_000, _at_least(1)),  # elements that several threads reduce
    "reduce_thread": (8, _at_least(0)),  # the most of these threads
    "use_pin_memory": (True, _flag),  # of no effect: pygpu has no page-locked memory
    "push_thread": ("ndev", _threads),  # one for the pushes of each device, or one for all
    "pull_thread": ("ndev", _threads),
}


class Parameters:
    """The parameters of one store."""

    def __init__(self) -> None:
        self._values = {name: default for name, (default, _) in PARAMETERS.items()}
        self._ops: dict[str, str] = {}
        self.given: dict[str, str] = {}  # those that the user has set, as text, for updaters

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def op_of(self, key: int | str) -> str:
        """Return the reduction of a key."""
        return self._ops.get(str(key), "sum")

    def set(self, name: str, value: Any) -> None:
        """Set a parameter.

        >>> parameters = Parameters()
        >>> parameters.set("push_op[3]", "max")
        >>> parameters.op_of(3), parameters.op_of(4)
        ('max', 'sum')
        >>> parameters.set("bigarraybound", 10)
        Traceback (most recent call last):
        ValueError: there is no parameter 'bigarraybound': perhaps you meant bigarray_bound. ...
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a str, got {_wording.shown(name)}.")
        push_op = _PUSH_OP.fullmatch(name)
        if push_op:
            if not isinstance(value, str) or value not in names():
                raise ValueError(
                    f"{name} must be one of {', '.join(names())}, got {_wording.shown(value)}."
                )
            self._ops[push_op[1]] = value
        elif name in PARAMETERS:
            _, read = PARAMETERS[name]
            self._values[name] = read(name, value)
            self.given[name] = str(value)
        else:
            close = difflib.get_close_matches(name, [*PARAMETERS, "push_op[0]"], 1)
            hint = f"perhaps you meant {close[0]}. " if close else ""
            raise ValueError(
                f"there is no parameter {name!r}: {hint}There are push_op[KEY], "
                f"{', '.join(PARAMETERS)}."
            )
