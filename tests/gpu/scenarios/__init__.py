"""What the check runs: one module for each group of scenarios.

A scenario is a function that is given a `Run`, compares, and raises if something is wrong; it may
return a line about what it saw. The scenarios of a group share one process and, where the module
says ``FORKS = True``, one session.
"""

import dataclasses
import importlib.util
from pathlib import Path

GROUPS = ("versions", "operations", "cudnn", "suites", "training", "figures", "failure")
# They look at the device, not at the ranks: once is enough for all layouts of one device.
ONCE = ("versions", "operations", "cudnn")


class Skip(Exception):
    """Raised by a scenario that has nothing to say here, with the reason."""


class Known(Exception):
    """Raised by a scenario that failed as it is known to fail here, with the reason."""


@dataclasses.dataclass
class Run:
    """What a scenario may ask for, and where it leaves its figures."""

    devices: list
    quick: bool = False
    figures: dict = dataclasses.field(default_factory=dict)

    @property
    def n(self):
        """The number of ranks."""
        return len(self.devices)

    @property
    def kind(self):
        """``"cpu"``, ``"cuda"`` or ``"opencl"``: what rank 0 computes on."""
        return self.devices[0].rstrip("0123456789:")

    @property
    def is_mixed(self):
        """Whether the ranks' devices are of several kinds, which round each in their way."""
        return len({device.rstrip("0123456789:") for device in self.devices}) > 1


def scenario(limit=120):
    """Make a function a scenario, with the seconds after which it counts as hung."""

    def mark(function):
        function.limit = limit
        return function

    return mark


def load(group):
    """Return the module of a group, or of a file of somebody's own."""
    if not group.endswith(".py"):
        return importlib.import_module(f"scenarios.{group}")
    spec = importlib.util.spec_from_file_location(Path(group).stem, group)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(module):
    """Return the scenarios of a module, by name, in the order of the file."""
    return {name: value for name, value in vars(module).items() if hasattr(value, "limit")}
