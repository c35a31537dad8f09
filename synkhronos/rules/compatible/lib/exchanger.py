"""``theanompi.lib.exchanger``: exchanges of parameters, for scripts that drive them themselves.

Each works through the ``allgather`` of a communicator: of `theanompi.lib.base`, or of mpi4py.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos.rules.arithmetic import elastic_step, pairs_of

_SYNC_TYPES = ("cdd", "avg", "swap")


def do_sendrecv(comm: Any, glist: Sequence[Any], wlist: Sequence[Any], dest: int) -> None:
    """Send the values of variables to a rank, and set others to what it sends."""
    sent = [each.get_value() for each in glist]
    for variable, value in zip(wlist, comm.sendrecv(sent, dest=dest, source=dest)):
        variable.set_value(value)


def do_send(comm: Any, params: Sequence[Any], dest: int) -> None:
    """Send the values of variables to a rank."""
    comm.send([each.get_value() for each in params], dest=dest)


def do_recv(comm: Any, params: Sequence[Any], dest: int) -> None:
    """Set variables to what a rank sends."""
    for variable, value in zip(params, comm.recv(source=dest)):
        variable.set_value(value)


def remove_BN_params(params: Sequence[Any]) -> list[Any]:
    """Return the parameters that are not named gamma or beta, of a batch normalization."""
    return [each for each in params if each.name not in ("gamma", "beta")]


def get_1d_value(ndarray: np.ndarray) -> np.ndarray:
    """Return the first row of an array, to be shown.

    >>> get_1d_value(np.arange(8).reshape(2, 2, 2))
    array([0, 1])
    """
    while ndarray.ndim > 1:
        ndarray = ndarray[0]
    return ndarray


class BSP_Exchanger:
    """The exchange after each batch: sums velocities, or averages or swaps parameters.

    Parameters
    ----------
    comm : object
        A communicator with ``allgather``, ``rank`` and ``size``.
    gpucomm, exch_strategy, ctx : object
        Kept, and of no effect: values are gathered in host memory.
    sync_type : str
        ``cdd``, ``avg`` or ``swap``.
    model : object
        Has ``vels`` and ``vels2``, or ``params``.
    """

    def __init__(
        self, comm: Any, gpucomm: Any, exch_strategy: str, sync_type: str, ctx: Any, model: Any
    ):
        if sync_type not in _SYNC_TYPES:
            raise ValueError(f"sync_type must be one of {_SYNC_TYPES}, got {sync_type!r}.")
        self.comm, self.gpucomm, self.ctx, self.size = comm, gpucomm, ctx, comm.size
        self.exch_strategy, self.sync_type = exch_strategy, sync_type
        self._step = 0
        if sync_type == "cdd":
            self.vels, self.vels2 = model.vels, model.vels2
        else:
            self.param_list = list(model.params)

    def exchange(self, recorder: Any) -> None:
        """Exchange; record the time as "comm"."""
        recorder.start()
        if self.size > 1:
            self.exch()
        recorder.end("comm")

    def exch(self) -> None:
        """Exchange."""
        is_cdd = self.sync_type == "cdd"
        sources, targets = (self.vels, self.vels2) if is_cdd else (self.param_list, self.param_list)
        everyone = self.comm.allgather([each.get_value() for each in sources])
        if self.sync_type == "swap":
            order = np.random.RandomState([23455, self._step]).permutation(self.size)
            partner = pairs_of(order.tolist()).get(self.comm.rank, self.comm.rank)
            values, self._step = everyone[partner], self._step + 1
        else:
            factor = 1 if is_cdd else 1 / self.size
            values = [sum(each) * each[0].dtype.type(factor) for each in zip(*everyone)]
        for variable, value in zip(targets, values):
            variable.set_value(value)


class EASGD_Exchanger:
    """The elastic step of one worker and the server, two ranks of a communicator.

    Parameters
    ----------
    alpha : float
    param_list : list of shared variables
    etype : str
        ``server`` or ``worker``.
    test : bool, optional
        Kept, and of no effect.

    Attributes
    ----------
    gpucomm : object
        A communicator with ``sendrecv`` that joins the two; the caller sets it before each
        exchange, as a server has one for each worker.
    """

    server_gpurank, worker_gpurank = 0, 1

    def __init__(self, alpha: float, param_list: Sequence[Any], etype: str, test: bool = False):
        if etype not in ("server", "worker"):
            raise ValueError(f"etype must be 'server' or 'worker', got {etype!r}.")
        self.alpha, self.param_list, self.etype, self.test = alpha, list(param_list), etype, test
        self.gpucomm: Any = None

    @property
    def _other(self):
        return self.worker_gpurank if self.etype == "server" else self.server_gpurank

    def exchange(self, recorder: Any = None) -> None:
        """Move towards the other's old values."""
        if recorder is not None:
            recorder.start()
        own = [each.get_value() for each in self.param_list]
        others = self.gpucomm.sendrecv(own, dest=self._other, source=self._other)
        for variable, value, other in zip(self.param_list, own, others):
            elastic_step(value, other, self.alpha)
            variable.set_value(value)
        self.gpucomm = None
        if recorder is not None:
            recorder.end("comm")

    def copy_to_local(self) -> None:
        """Give the worker the server's values."""
        if self.etype == "server":
            do_send(self.gpucomm, self.param_list, self._other)
        else:
            do_recv(self.gpucomm, self.param_list, self._other)
        self.gpucomm = None
