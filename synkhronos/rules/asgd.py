r"""ASGD, asynchronous SGD with a server, as Downpour SGD: workers push updates and take parameters.

A worker takes `tau` steps from the parameters that it took from the server, and sends by how much
they have changed, :math:`\Delta`. The server applies it at once, and the worker goes on from the
server's parameters, which hold the updates of all other workers too. The server gives each element
a learning rate that falls with the updates that it has had, as Downpour's does, or adds the update:

.. math:: s \leftarrow s + \Delta^2, \; p \leftarrow p + \gamma \Delta / \sqrt{s}
          \quad\text{or}\quad p \leftarrow p + \Delta

References
----------
Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from synkhronos.comm.group import Group
from synkhronos.rules.arithmetic import apply_update
from synkhronos.rules.asynchronous import Worker
from synkhronos.rules.job import Job
from synkhronos.rules.serving import Server


def run(job: Job, group: Group, interrupt: Callable[[], bool]) -> int:
    """Serve or train, as the rank says; return the exit status."""
    is_adaptive, gamma = job.options["learning_rate_rule"] == "adagrad", job.options["gamma"]

    def merge(center, received, state):
        if is_adaptive and not state:
            state.extend(np.zeros_like(array) for array in center)
        squares = state if is_adaptive else [None] * len(center)
        for array, delta, square in zip(center, received, squares):
            apply_update(array, delta, square, gamma)

    if group.rank == 0:
        return Server(job, group, merge, interrupt).serve()
    return _Worker(job, group, interrupt).run()


class _Worker(Worker):
    """A worker that goes on from the server's parameters."""

    def begun(self) -> None:
        """Keep the parameters from which the next update counts."""
        self._before = [array.copy() for array in self.flat.read()]

    def exchange(self, done: int) -> None:
        """Send by how much the parameters have changed; take the server's."""
        own = self.flat.read()
        delta = [array - before for array, before in zip(own, self._before)]
        self.orders = self.client.exchange(delta, own, done, self.made.n_batch_train())
        self.flat.write()
        for array, before in zip(own, self._before):
            np.copyto(before, array)
