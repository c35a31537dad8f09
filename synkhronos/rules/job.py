"""The job that the launcher gives all ranks, and the signal that asks a rank to end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

TELLS = "SYNKHRONOS_TELLS"  # a variable that is set if ranks say what they compile


@dataclass(frozen=True)
class Job:
    """The description of a run, which the launcher gives all ranks.

    >>> job = Job("BSP", "models.cifar10", "Cifar10_model", ["cpu", "cpu"])
    >>> Job.from_json(job.as_json()) == job
    True
    """

    rule: str  # one of `options.RULES`
    modelfile: str  # a dotted name, or the path of a file
    modelclass: str
    devices: list[str]  # of each rank; "none" for a server with a process of its own
    cores: list[list[int] | None] = field(default_factory=list)  # of each rank to bind; [] for none
    options: dict[str, Any] = field(default_factory=dict)  # all options of the rule, with values
    settings: dict[str, Any] = field(default_factory=dict)  # of the model and its data

    def as_json(self) -> str:
        """Return the job as one line of text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `as_json` has written."""
        return cls(**json.loads(text))


class Interrupt:
    """Notes a signal that asks this process to end, with a snapshot."""

    is_set = False

    def set(self, number: int, frame: Any) -> None:
        """Handle the signal."""
        self.is_set = True
