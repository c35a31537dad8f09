"""ASGD, asynchronous SGD with a server, as Downpour SGD: workers push updates and take parameters.

A worker takes `tau` steps, and sends the change of its parameters. The server applies the change
at once and answers with its parameters, which include the updates of all other workers; the worker
continues from these. `synkhronos.rules.ASGD` has the formulas.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from synkhronos.parameter_server.group.interface import Group
from synkhronos.parameter_server.updaters import Updater
from synkhronos.rules import served
from synkhronos.rules.arithmetic import blocks
from synkhronos.rules.job import Interrupt, Job


class Downpour(Updater):
    r"""An updater that applies :math:`\Delta`, the change of a worker's parameters in some steps.

    .. math:: s \leftarrow s + \Delta^2, \quad p \leftarrow p + \gamma \Delta / \sqrt{s}

    Each element has its own learning rate, which falls with the updates of that element (Adagrad).

    Parameters
    ----------
    gamma : float or None
        The learning rate. With None updates are added, :math:`p \leftarrow p + \Delta`.

    References
    ----------
    Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1.

    Examples
    --------
    >>> from synkhronos import parameter_server
    >>> weight = np.zeros(2)
    >>> with parameter_server.create("local") as store:
    ...     store.set_updater(Downpour(gamma=0.1))
    ...     store.init("w", weight)
    ...     for moved in ([3.0, 0.0], [4.0, 0.0]):
    ...         _ = store.pushpull("w", [np.array(moved)], [weight]).wait()
    >>> weight.round(2)
    array([0.18, 0.  ])
    """

    is_elementwise = True

    def __init__(self, gamma: float | None = 0.01) -> None:
        self.gamma = gamma
        self._squares: dict[int | str, np.ndarray] = {}

    def init_model(self, key: int | str, weight: np.ndarray) -> None:
        """Keep the array of a key's weight."""
        super().init_model(key, weight)
        if self.gamma is not None:
            self._squares[key] = np.zeros_like(weight)

    def update(self, key: int | str, gradient: np.ndarray) -> None:
        """Apply a worker's update of a key."""
        weight = self.weights[key]
        if self.gamma is None:
            weight += gradient
            return
        smallest = np.finfo(weight.dtype).tiny
        for part, change, square in blocks(weight, gradient, self._squares[key]):
            square += change * change
            # An element that has had no update would be 0 / 0.
            part += part.dtype.type(self.gamma) * change / np.sqrt(np.maximum(square, smallest))

    def states(self) -> dict[int | str, dict[str, np.ndarray]]:
        """Return copies of the sums of squares."""
        return {key: {"squares": each.copy()} for key, each in self._squares.items()}

    def set_states(self, states: Mapping[int | str, Mapping[str, Any]]) -> None:
        """Set what `states` has returned; raise ValueError, with nothing set, if it doesn't fit."""
        shapes = {key: {"squares": each.shape} for key, each in self._squares.items()}
        new = {key: {name: np.shape(v) for name, v in each.items()} for key, each in states.items()}
        if new != shapes:
            raise ValueError(f"the states must be of the shapes {shapes}, got {new}.")
        for key, square in self._squares.items():
            square[...] = states[key]["squares"]


def run(job: Job, group: Group, interrupt: Interrupt) -> int:
    """Serve on rank 0, train on all others; return the exit status."""
    if group.rank:
        return _ASGDWorker(job, group, interrupt).work()
    rule = job.options["learning_rate_rule"]
    updater = Downpour(job.options["gamma"] if rule == "adagrad" else None)
    divides_stale = rule == "staleness"
    return served.Server(job, group, updater, interrupt, divides_stale=divides_stale).serve()


class _ASGDWorker(served.ServedWorker):
    """A worker that continues from the server's parameters after each exchange."""

    def begin(self, kept: dict[str, Any]) -> None:
        """Take the server's parameters, and keep a copy by which the next change is computed."""
        super().begin(kept)
        self._before = [array.copy() for array in self.flat.read()]

    def meet(self) -> None:
        """Send the change of the parameters; take the server's parameters."""
        moved = [own - before for own, before in zip(self.flat.read(), self._before)]
        self.flat.set(self.push(moved))
        for own, before in zip(self.flat.arrays, self._before):
            np.copyto(before, own)
