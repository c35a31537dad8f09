"""Predict from a few measured times how many ranks, and chains at once, are fastest.

    seconds of an evaluation, of each of the chains that run at the same time
        = all but the likelihood + round of the ranks
          + the larger of   likelihood / ranks
                            chains * reading / how much faster all processes read than one

A round is the start and the finish of all ranks. Reading is the time in which one process reads the
data: all cores share the machine's memory.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Callable

import numpy as np
from pymc.blocking import DictToArrayBijection

from synkhronos._wording import count

QUANTILE = 20  # percent of the measurements are faster than the time that is taken
_TURNS, _TURN_SECONDS, _MOST_SECONDS = 3, 0.07, 2.0  # of each call, and of all
_WORTH = 1.1  # times as fast as plain PyMC: a smaller gain may be an error of the prediction


@dataclass(frozen=True)
class Measured:
    """Seconds on this machine, and of all machines if there are several."""

    cores: int
    plain: float  # value and gradient of the plain model, in one process
    likelihood: float  # of what is divided, on one rank
    rest: float  # of all else
    round: float  # of ranks on all cores
    reading: float  # of the data, by one process
    gain_of_reading: float  # how much faster as many processes as cores read them
    ranks_of_machines: int = 0
    on_machines: float = math.inf  # value and gradient on all of these


@dataclass(frozen=True, repr=False)
class ModelAdvice:
    """What :func:`advise` has measured and predicts; its text is a table with the lines to write.

    Attributes
    ----------
    chains : int
    measured : Measured
        Seconds: ``plain``, ``likelihood`` (on one rank), ``rest``, ``round`` (of ranks on all
        ``cores``), ``reading`` (of the data); and ``gain_of_reading`` of all cores.
    predicted : dict
        (ranks, chains at the same time) -> seconds for one evaluation of each chain; 0 ranks are
        plain PyMC.
    ranks : int
        Of each chain, in the fastest way; 0 for plain PyMC.
    cores : int
        The chains at the same time, in the fastest way: PyMC's ``cores``.
    gain : float
        How much faster this is than the fastest way of plain PyMC.
    """

    chains: int
    measured: Measured
    predicted: dict[tuple[int, int], float]
    ranks: int
    cores: int
    gain: float

    @property
    def lines(self) -> str:
        """The lines to write."""
        sample = f"pm.sample(chains={self.chains}, cores={self.cores})"
        if not self.ranks:
            return sample
        ranks = "" if self.ranks > self.measured.cores else f", ranks={self.ranks}"
        return f"with parallel.likelihood(model{ranks}):\n    {sample}"

    def __repr__(self) -> str:
        found, away = self.measured, self.measured.ranks_of_machines
        whole = found.likelihood + found.rest
        ranks, at_once = (sorted({*each}) for each in zip(*self.predicted))
        rows = [["chains at once", *(count(each, "rank") if each else "plain" for each in ranks)]]
        for number in at_once:
            times = [self.predicted.get((each, number)) for each in ranks]
            shown = ["" if each is None else f"{1e3 * each:.3f}" for each in times]
            rows.append([f"{number:14}", *shown])
        best = f"{self.gain:.2f} times as fast as plain PyMC" if self.ranks else "plain PyMC"
        where = ", without synkhronos launch" if away and self.ranks <= found.cores else ""
        of_all = f" ({away} ranks of all machines: measured)" if away > found.cores else ""
        return f"""\
Value and gradient, ms: plain {1e3 * found.plain:.3f}; one rank {1e3 * whole:.3f}, of which \
{1e3 * found.likelihood:.3f} are divided
A round of {found.cores} ranks: {1e3 * found.round:.3f}. Reading the data: \
{1e3 * found.reading:.3f}, all cores {found.gain_of_reading:.1f} times as fast
For an evaluation of each of {self.chains} chains, predicted{of_all}:
{chr(10).join("".join(f"  {each:>9}" for each in row).rstrip() for row in rows)}
Best: {best}{where}
    {self.lines.replace(chr(10), chr(10) + "    ")}"""


def predict(found: Measured, chains: int) -> ModelAdvice:
    """Return the advice that follows from measured times."""
    times = {}
    for at_once in {-(-chains // turns) for turns in range(1, chains + 1)}:
        for ranks in {
            0,
            found.cores // at_once,
            *(2**power for power in range(found.cores.bit_length())),
        }:
            processes = at_once * max(1, ranks)
            if processes > found.cores:
                continue
            memory = at_once * found.reading / min(processes, max(1.0, found.gain_of_reading))
            if not ranks:
                seconds = max(found.plain, memory)
            else:
                divided = max(found.likelihood / ranks, memory)
                seconds = found.rest + divided + (found.round if ranks > 1 else 0.0)
            times[ranks, at_once] = -(-chains // at_once) * seconds
    if found.ranks_of_machines > found.cores:  # else this machine has cores for as many
        times[found.ranks_of_machines, 1] = chains * found.on_machines
    plain = min((each for each in times if not each[0]), key=times.__getitem__)
    best = min(times, key=times.__getitem__)
    best = best if times[plain] > _WORTH * times[best] else plain
    return ModelAdvice(chains, found, times, *best, times[plain] / times[best])


def compiled(model):
    """Return a function without arguments that evaluates value and gradient."""
    function = model.logp_dlogp_function(ravel_inputs=True)
    start = model.initial_point(random_seed=0)
    function.set_extra_values(start)  # PyMC 6.1 needs this call, even if there are none
    names = [each.name for each in function._grad_vars]
    point = DictToArrayBijection.map({name: start[name] + 0.01 for name in names}).data
    function([point])  # compiles
    return lambda: function([point])


def seconds_of(call: Callable[[], object], seconds: float = 0.2, fewest: int = 5) -> float:
    """Return the time of a call that little has disturbed: a fifth of many calls are faster."""
    times, end = [], time.perf_counter() + seconds
    while len(times) < fewest or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.percentile(times, QUANTILE))


def seconds_in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the time of each call: the least of a few turns, which other programs may disturb."""
    times, end = dict.fromkeys(calls, math.inf), time.perf_counter() + _MOST_SECONDS
    for _ in range(_TURNS):
        for name, call in calls.items():
            times[name] = min(times[name], seconds_of(call, _TURN_SECONDS, 1))
        if time.perf_counter() > end:
            break
    return times
