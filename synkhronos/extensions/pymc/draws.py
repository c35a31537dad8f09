"""Compute log-likelihoods and predictive samples by processes that share the draws.

    posterior  ──▶ process 0: draws 0 to 499    ──┐
                   process 1: draws 500 to 999  ──┴──▶ an array for each variable, in shared memory

The processes are forked, so that nothing is sent. Each calls PyMC's function for its draws.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import pymc as pm
import xarray

from synkhronos._arithmetic.partition import share
from synkhronos._machine.devices import limit_threads, usable_cores
from synkhronos._machine.interrupts import interrupts_held, interrupts_raised_later
from synkhronos._machine.log import name_rank
from synkhronos._machine.shared_memory import Segments, check_sharing
from synkhronos._wording import whole_number
from synkhronos.extensions.pymc.evaluator import forked, released
from synkhronos.extensions.pymc.terms import values_of

_MOST = 4096  # processes
_REFUSED = {
    "sample_dims": "processes share the draws of the dimension 'draw'",
    "return_inferencedata": "the parts of all processes are put together as an xarray.DataTree",
}
_LARGE = 10_000_000  # numbers: with fewer, processes that begin by compiling gain nothing
_OF_DATA = "constant_data", "observed_data"  # groups that PyMC looks at, beside the posterior
_open: list[_SharedDraws] = []  # those that processes compute now, which they inherit


def compute_log_likelihood(
    idata: xarray.DataTree,
    *,
    model: pm.Model | None = None,
    ranks: int | None = None,
    extend_inferencedata: bool = True,
    progressbar: bool = True,
    **options: Any,
) -> xarray.DataTree | xarray.Dataset:
    """Compute the log-likelihood of each row at each draw, as PyMC does, in several processes.

    The result has the bits of that of ``pymc.compute_log_likelihood``.

    Parameters
    ----------
    idata : xarray.DataTree
        What ``pm.sample`` has returned.
    model : pymc.Model, optional
        By default that of the surrounding ``with model:``.
    ranks : int, optional
        The number of processes, this one included. By default one for each core, or this one alone
        where others would gain nothing.
    extend_inferencedata : bool
        Whether `idata` gets the group ``log_likelihood``, and is returned.
    progressbar : bool
        Whether this process shows the progress of its draws.
    **options
        Other arguments of ``pymc.compute_log_likelihood``, but for ``sample_dims``.

    Returns
    -------
    xarray.DataTree or xarray.Dataset
        As PyMC's function.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, and what PyMC's function raises.
    """
    model = pm.modelcontext(model)

    def compute(part, rank, shows):
        with model:
            return pm.compute_log_likelihood(
                part, model=model, extend_inferencedata=False, progressbar=shows, **options
            )

    found = _by_draws(compute, model, idata, ranks, progressbar, options)
    if not extend_inferencedata:
        return found
    idata["log_likelihood"] = xarray.DataTree(found)
    return idata


def sample_posterior_predictive(
    trace: xarray.DataTree,
    model: pm.Model | None = None,
    *,
    ranks: int | None = None,
    random_seed: int | np.random.Generator | np.random.RandomState | None = None,
    predictions: bool = False,
    extend_inferencedata: bool = False,
    progressbar: bool = True,
    **options: Any,
) -> xarray.DataTree:
    """Sample from the posterior predictive distribution, as PyMC does, in several processes.

    Each process has random numbers of its own, which follow from the seed. So the samples are
    others than those of ``pymc.sample_posterior_predictive`` with this seed, and than those with
    another number of ranks; the same seed and ranks give the same.

    Parameters
    ----------
    trace : xarray.DataTree
        What ``pm.sample`` has returned.
    model : pymc.Model, optional
        By default that of the surrounding ``with model:``.
    ranks : int, optional
        As in :func:`compute_log_likelihood`. Give it where samples shall be the same on machines
        with other numbers of cores.
    random_seed : int, numpy.random.Generator or RandomState, optional
        By default one from the operating system.
    predictions, extend_inferencedata, progressbar : bool
        As in PyMC's function.
    **options
        Other arguments of ``pymc.sample_posterior_predictive``, but for ``sample_dims`` and
        ``return_inferencedata``.

    Returns
    -------
    xarray.DataTree
        As PyMC's function.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, and what PyMC's function raises.
    """
    model = pm.modelcontext(model)
    group = "predictions" if predictions else "posterior_predictive"
    if isinstance(random_seed, (np.random.Generator, np.random.RandomState)):
        random_seed = int.from_bytes(random_seed.bytes(8), "little")
    seeds = np.random.SeedSequence(random_seed).generate_state(_MOST)
    others = {}

    def compute(part, rank, shows):
        tree = pm.sample_posterior_predictive(
            part,
            model,
            random_seed=int(seeds[rank]),
            predictions=predictions,
            progressbar=shows,
            **options,
        )
        others.update({name: each for name, each in tree.children.items() if name != group})
        return tree[group].to_dataset() if group in tree.children else xarray.Dataset()

    found = _by_draws(compute, model, trace, ranks, progressbar, options)
    result = xarray.DataTree.from_dict({group: found, **others})
    if not extend_inferencedata:
        return result
    trace.update(result)
    return trace


@dataclass(frozen=True)
class ComputeDraws:
    """Compute the draws of all processes."""

    def run(self, worker):
        """Compute those of this process."""
        _open[-1].compute(worker.rank)


class _SharedDraws:
    """Draws that processes share, and the arrays of the results, in shared memory."""

    def __init__(self, compute: Callable, idata, first, n_ranks, shows):
        posterior = idata["posterior"].dataset
        self._compute, self._idata, self._first, self._shows = compute, idata, first, shows
        n_draws = posterior.sizes["draw"]
        self._cuts = [slice(*share(n_draws, n_ranks, rank)) for rank in range(n_ranks)]
        draws = posterior.coords["draw"]
        if first.coords["draw"].item() == 0:
            draws = range(n_draws)  # PyMC has numbered them anew, as of log-likelihoods
        self._coordinates = {**first.coords, "draw": draws}
        self._arrays = {}
        memory = Segments()
        for name, each in first.items():
            shape = [n_draws if dim == "draw" else size for dim, size in each.sizes.items()]
            nbytes = math.prod(shape) * each.dtype.itemsize
            self._arrays[name] = memory.create(nbytes).array(each.dtype, shape)

    def compute(self, rank):
        """Compute the draws of a process."""
        part = _with_draws(self._idata, self._cuts[rank])
        with _silent(), _interrupts_raised_again():
            found = self._compute(part, rank, self._shows and rank == 0)
        for name, array in self._arrays.items():
            place = [self._cuts[rank] if dim == "draw" else slice(None) for dim in found[name].dims]
            array[tuple(place)] = found[name].values

    def whole(self):
        """Return all results, which keep the shared memory."""
        variables = {
            name: (each.dims, self._arrays[name], each.attrs) for name, each in self._first.items()
        }
        return xarray.Dataset(variables, self._coordinates, self._first.attrs)


def _by_draws(compute, model, idata, ranks, shows, options):
    """Return the dataset that ``compute(idata, rank, shows)`` gives for all draws."""
    for name in _REFUSED.keys() & options.keys():
        raise ValueError(f"{name} can't be given: {_REFUSED[name]}. PyMC's own function takes it.")
    if not isinstance(idata, xarray.DataTree) or "posterior" not in idata.children:
        raise TypeError(
            "The draws must be an xarray.DataTree with a group 'posterior', as pm.sample() returns "
            f"it, got an object of type {type(idata).__name__}."
        )
    if ranks is not None:
        ranks = whole_number("ranks", ranks, 1, _MOST)
    n_draws = idata["posterior"].sizes["draw"]
    if ranks is None:
        observed = values_of([model.rvs_to_values[each] for each in model.observed_RVs])
        n_numbers = (
            sum(each.size for each in observed) * n_draws * idata["posterior"].sizes["chain"]
        )
        ranks = usable_cores() if n_numbers > _LARGE else 1
    n_ranks = min(ranks, n_draws)
    if n_ranks < 2:
        return compute(idata, 0, shows)
    # PyMC keeps what it compiles on disk, for the others. And a draw shows the shapes: one with
    # another number than 0, which PyMC gives it if it numbers draws anew.
    is_at_begin = np.array_equal(idata["posterior"].coords["draw"][-1:], [0])
    first = compute(_with_draws(idata, slice(1) if is_at_begin else slice(-1, None)), 0, False)
    if "draw" not in first.sizes:  # of no chain, or no variable
        return compute(idata, 0, shows)
    parts = _SharedDraws(compute, idata, first, n_ranks, shows)
    _open.append(parts)
    restore = limit_threads(1)
    try:
        _run(n_ranks)
    finally:
        restore()
        _open.remove(parts)
    return parts.whole()


def _run(n_ranks):
    check_sharing()
    session = None
    try:
        with interrupts_held():
            session = forked(n_ranks)
            name_rank(None)
        session.begin()
        session.run(ComputeDraws())
    finally:
        if session is not None:
            released(session)


class _interrupts_raised_again(interrupts_raised_later):
    """Raises what a signal handler has raised at once, too: PyMC goes on after a Ctrl-C."""

    __slots__ = ()

    def _record(self, number, frame):
        super()._record(number, frame)
        if number in self._held:
            self._held[number]()


@contextlib.contextmanager
def _silent():
    """Leave out PyMC's log and warnings, which the first draw has shown."""
    log = logging.getLogger("pymc")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


def _with_draws(idata, cut):
    """Return the posterior's draws of a slice, with the data."""
    groups = {name: idata[name].dataset for name in _OF_DATA if name in idata.children}
    posterior = idata["posterior"].dataset.isel(draw=cut)
    return xarray.DataTree.from_dict({"posterior": posterior, **groups})
