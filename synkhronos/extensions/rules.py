"""Update rules, under the name that :mod:`synkhronos.extensions.update_rules` had before."""

from synkhronos.extensions.update_rules import *  # noqa: F403
from synkhronos.extensions.update_rules import __all__  # noqa: F401
