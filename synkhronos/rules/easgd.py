r"""EASGD, elastic averaging SGD: workers train on their own, tied to a center by a spring.

Every `tau` batches a worker and the server, which keeps the center, exchange their parameters, and
each moves towards the other's old value:

.. math:: x \leftarrow x - \alpha (x - \tilde x), \quad
          \tilde x \leftarrow \tilde x + \alpha (x - \tilde x)

The first worker validates the center whenever all workers together have done an epoch's batches,
writes snapshots of it, and then goes on with its own parameters.

References
----------
Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, arXiv:1412.6651.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from synkhronos.comm.group import Group
from synkhronos.rules.arithmetic import elastic_step
from synkhronos.rules.asynchronous import Worker
from synkhronos.rules.job import Job
from synkhronos.rules.serving import Server


def run(job: Job, group: Group, interrupt: Callable[[], bool]) -> int:
    """Serve or train, as the rank says; return the exit status."""
    alpha = job.options["alpha"]

    def merge(center, received, state):
        for own, other in zip(center, received):
            elastic_step(own, other, alpha)

    if group.rank == 0:
        return Server(job, group, merge, interrupt).serve()
    return _Worker(job, group, interrupt).run()


class _Worker(Worker):
    """A worker whose parameters stay its own."""

    def exchange(self, done: int) -> None:
        """Move towards the center."""
        own = self.flat.read()
        center = [np.empty_like(array) for array in own]
        self.orders = self.client.exchange(own, center, done, self.made.n_batch_train())
        for array, other in zip(own, center):
            elastic_step(array, other, self.job.options["alpha"])
        self.flat.write()
