"""``theanompi.worker``: `synkhronos.rules.bsp_worker`, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Not at the top: the modules of the rules import this package.
    return getattr(importlib.import_module("synkhronos.rules.bsp_worker"), name)
