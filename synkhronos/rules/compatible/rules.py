"""``theanompi.rules``: the rules of `synkhronos.rules.session`, by their names."""

from synkhronos.rules.session import ASGD, BSP, EASGD, GOSGD, Rule

START_INFO = "%d workers update %s parameters and exchange them with %s: see the log files."

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD", "START_INFO", "Rule"]
