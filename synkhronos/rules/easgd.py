"""EASGD, elastic averaging SGD: workers train on their own, and are pulled towards a center.

Every `tau` batches a worker and the server, which keeps the center, exchange their parameters, and
each moves towards the other's old value. The first worker validates the center whenever all workers
together have done an epoch's batches, writes snapshots of it, and then goes on with its own
parameters. `synkhronos.rules.EASGD` has the formula.
"""

from __future__ import annotations

import numpy as np

from synkhronos.parameter_server.group.interface import Group
from synkhronos.parameter_server.updaters import Updater
from synkhronos.rules import served
from synkhronos.rules.arithmetic import elastic_step
from synkhronos.rules.job import Interrupt, Job


class Center(Updater):
    r"""An updater that moves a weight, the center, towards what a worker pushes: its parameters.

    .. math:: c \leftarrow c + \alpha (w - c)

    On a ``dist_async`` store a worker pulls the center, pushes its parameters, and then moves
    towards the center that it has pulled.

    Parameters
    ----------
    alpha : float

    References
    ----------
    Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015,
    arXiv:1412.6651.

    Examples
    --------
    >>> from synkhronos import parameter_server
    >>> center = np.array([4.0, 4.0])
    >>> with parameter_server.create("local") as store:
    ...     store.set_updater(Center(alpha=0.25))
    ...     store.init("w", center)
    ...     _ = store.pushpull("w", [np.array([0.0, 8.0])], [center]).wait()
    >>> center
    array([3., 5.])
    """

    is_elementwise = True

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def update(self, key: int | str, gradient: np.ndarray) -> None:
        """Move the center of a key towards the parameters of a worker."""
        elastic_step(self.weights[key], gradient, self.alpha)


def run(job: Job, group: Group, interrupt: Interrupt) -> int:
    """Serve on rank 0, train on all others; return the exit status."""
    if group.rank:
        return _EASGDWorker(job, group, interrupt).work()
    center = Center(job.options["alpha"])
    return served.Server(job, group, center, interrupt, answers_first=True).serve()


class _EASGDWorker(served.ServedWorker):
    """A worker that keeps its own parameters."""

    def meet(self) -> None:
        """Move towards the center."""
        own = self.flat.read()
        for array, center in zip(own, self.push(own)):
            elastic_step(array, center, self.job.options["alpha"])
        self.flat.write()
