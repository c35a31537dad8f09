"""``theanompi.models``: the folders data and layers2, and the classes that it has always named."""

from __future__ import annotations

import importlib
from typing import Any

_FILES = {"AlexNet": "alex_net", "Cifar10_model": "cifar10", "GoogLeNet": "googlenet"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"theanompi.models.{_FILES[name]}"), name)
    raise AttributeError(f"module 'theanompi.models' (of Synkhronos) has no attribute {name!r}")
