"""``theanompi.rules``: `synkhronos.rules.rule_classes`, imported when one is asked for."""

from __future__ import annotations

import importlib
from typing import Any

START_INFO = "%d workers update %s parameters and exchange them with %s: see the log files."


def __getattr__(name: str) -> Any:
    # Not at the top: the modules of the rules import this package.
    return getattr(importlib.import_module("synkhronos.rules.rule_classes"), name)
