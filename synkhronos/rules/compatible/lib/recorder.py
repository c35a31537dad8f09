"""``theanompi.lib.recorder``: the recorder of `synkhronos.rules.recorder`."""

from synkhronos.rules.recorder import Recorder

__all__ = ["Recorder"]
