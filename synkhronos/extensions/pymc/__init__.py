"""The likelihood of a PyMC model, computed by all ranks.

with parallel.likelihood(model, ranks=4):
    idata = pm.sample(chains=4, cores=1)

model.logp()  ──▶  priors, and what can't be divided                     in this process
              ──▶  likelihoods and potentials of data, their gradients   on all ranks, by rows
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace

from synkhronos._host import pythons

if importlib.util.find_spec("pymc") is None:
    raise ImportError(
        f"synkhronos.extensions.pymc needs PyMC 6, which runs on Python "
        f"{pythons.span(pythons.PYTENSOR)}: {pythons.install('pymc')}"
    )

import numpy as np
import pymc as pm
import pytensor

from synkhronos._host.pytensor import jax_devices
from synkhronos._machine.devices import (
    DEVICE_NAME,
    VARIABLE,
    has_nvidia_driver,
    limit_threads,
    resolve,
    usable_cores,
)
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log, told_if_slow
from synkhronos._session.current import Current
from synkhronos._wording import advise as advise_user
from synkhronos._wording import count, whole_number
from synkhronos.comm.mpi import job
from synkhronos.errors import SessionError
from synkhronos.extensions.pymc.advice import (
    Measured,
    ModelAdvice,
    compiled,
    predict,
    seconds_in_turns,
    seconds_of,
)
from synkhronos.extensions.pymc.checks import (
    REWRITTEN,
    checked,
    plain_call,
    plain_compiled_beside,
)
from synkhronos.extensions.pymc.draws import (
    compute_log_likelihood,
    sample_posterior_predictive,
)
from synkhronos.extensions.pymc.evaluator import Evaluator, have_ended, on_this_machine
from synkhronos.extensions.pymc.on_devices import DeviceEvaluator, LayoutOfDevices, NotOnDevice
from synkhronos.extensions.pymc.operation import Likelihood
from synkhronos.extensions.pymc.row_axes import row_wise
from synkhronos.extensions.pymc.terms import NoRows, NotByRows, cut, first_line
from synkhronos.session import begin, close

__all__ = [
    "Advice",
    "ModelAdvice",
    "ParallelLikelihood",
    "advise",
    "compute_log_likelihood",
    "likelihood",
    "row_wise",
    "sample_posterior_predictive",
]

Advice = ModelAdvice  # the name that earlier scripts use
_MOST_RANKS = 4096
# Seconds of an evaluation:
_PAYS = 2e-5  # below, two ranks gain little, or are slower
_PAYS_ON_MACHINES = 1e-3  # below, so are two machines
_LARGE = 1e-4  # from there on ranks may pay later, if others use the cores now
# The way from compiled code to an evaluator and back takes about three times what `evaluate` adds
# to a round, at most so many seconds, and so many for each parameter.
_CALL, _MOST_OF_CALL, _PER_NUMBER = 3, 1e-4, 1e-8
_LEAST = 0.85  # of the time of plain PyMC: ranks must be clearly faster, as times vary
# Where plain PyMC takes longer than this, this process alone must not be slower than it. Below,
# it must be clearly faster, as ranks must.
_LONG = 1e-3
_FURTHER = 10  # times the tolerance of parts: devices round otherwise
_told: list[bool] = []  # whether the log has said that there are GPUs


class ParallelLikelihood:
    """The likelihood of a model on ranks, inside of a :func:`likelihood` block.

    Attributes
    ----------
    ranks : int
        The number of ranks of all machines, this process included; 1 where ranks don't pay.
    devices : list of str
        The device of each rank.
    divided : list of str
        Names of the observed variables and potentials whose rows are divided over the ranks. Empty
        where plain PyMC is faster: the model is as before, then.
    left : dict of str
        Names of those that this process computes although they have rows, each with the reason.
    """

    def __init__(self, model, evaluator, left):
        self._model, self._evaluator = model, evaluator
        self._variables = _names(model)  # when it was divided
        self._of_observed = None  # the evaluator of observed variables without potentials
        self.ranks = evaluator.layout.n_ranks if evaluator else 1
        cores = ["cpu"] * self.ranks
        self.devices = list(getattr(evaluator and evaluator.layout, "devices", cores))
        self._terms = evaluator.terms if evaluator else ()  # a closed evaluator has none
        self.divided = [term.name for term in self._terms]
        self.left = left

    def __repr__(self):
        if not self.divided:
            return "<likelihood of plain PyMC, which is faster here than ranks>"
        left = f", left={sorted(self.left)}" if self.left else ""
        on = count(self.ranks, "rank")
        if {*self.devices} != {"cpu"}:
            on += f" ({', '.join(self.devices)})"
        return f"<likelihood of {', '.join(self.divided)} on {on}{left}>"

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of this process's workers; none before the first evaluation."""
        return [pid for each in self.evaluators for pid in each.worker_pids]

    @property
    def evaluators(self) -> list[Evaluator]:
        """The evaluator of all divided terms and, if needed, that of observed variables alone."""
        return [each for each in (self._evaluator, self._of_observed) if each is not None]

    def _terms_of(self, wanted):
        """Return the divided terms that `wanted` covers: all, those of observed variables, or none.

        Tempered posteriors scale the likelihood of observed variables alone.
        """
        observed = {each.name for each in self._model.observed_RVs}
        for terms in (self._terms, [each for each in self._terms if each.name in observed]):
            if {self._model[term.name] for term in terms} <= wanted:
                return terms
        return []

    def _evaluator_of(self, terms):
        """Return the evaluator of these terms, made when it is first needed."""
        whole = self._evaluator
        if len(terms) == len(self._terms):
            return whole
        if self._of_observed is None:
            self._of_observed = type(whole)(terms, whole.layout, whole.check_bounds)
        return self._of_observed

    def logp(self, vars=None, jacobian=True, sum=True):
        """Return the graph of the model's log-probability, as ``pymc.Model.logp`` does."""
        model = self._model
        if _names(model) != self._variables:
            new = ", ".join(sorted({*_names(model)} ^ {*self._variables}))
            raise ValueError(
                f"The model has changed in its likelihood() block: {new}. Add variables before the "
                "block. A pm.Model() in a `with model:` is a part of that model: make it before."
            )
        plain = functools.partial(type(model).logp, model, jacobian=jacobian, sum=sum)
        if vars is None:
            vars = [*model.free_RVs, *model.observed_RVs, *model.potentials]
        wanted = vars if isinstance(vars, list | tuple) else [vars]
        wanted = [model.values_to_rvs.get(each, each) for each in wanted]
        # The terms of single rows, for comparisons of models, are computed in this process.
        terms = self._terms_of({*wanted}) if sum else []
        if not terms:
            return plain(vars)
        divided = [model[term.name] for term in terms]
        frontier = [each for term in terms for each in term.frontier]
        total = Likelihood(self._evaluator_of(terms))(*model.replace_rvs_by_values(frontier))[0]
        rest = [each for each in wanted if each not in divided]
        if rest:
            total = plain(rest) + total
        is_narrow = pytensor.config.floatX == "float32"
        total = total.astype(plain(vars).dtype if is_narrow else "float64")
        total.name = "__logp" if jacobian else "__logp_nojac"
        return total


def _names(model):
    return [each.name for each in (*model.basic_RVs, *model.potentials)]


class _Logp:
    """Replaces the method ``logp`` of a model; a copy of the model gets the plain method."""

    def __init__(self, parallel, model):
        self._parallel, self._model = parallel, model

    def __call__(self, *args, **kwargs):
        return self._parallel.logp(*args, **kwargs)

    def __reduce__(self):
        # The graph of the copy has other variables than the one that was cut.
        return functools.partial, (type(self._model).logp, self._model)


class _Block(contextlib.ContextDecorator, contextlib.AbstractContextManager):
    """A block of ``with``, or a decorator, which warns if it is thrown away before it is one."""

    def __init__(self, *arguments):
        self._arguments, self._is_used = arguments, False

    def __call__(self, function):
        self._is_used = True
        return super().__call__(function)

    def __enter__(self):
        self._is_used, manager = True, _likelihood(*self._arguments)
        entered, self._manager = manager.__enter__(), manager
        return entered

    def __exit__(self, *error):
        return self._manager.__exit__(*error)

    def __del__(self):
        if not self._is_used:
            advise_user(
                "likelihood() alone does nothing: write `with parallel.likelihood(model):`, and "
                "sample inside of this block."
            )


def likelihood(
    model: pm.Model | None = None, ranks: int | None = None, devices: Sequence[str] | None = None
) -> contextlib.AbstractContextManager[ParallelLikelihood]:
    """Compute the likelihood of a PyMC model on all ranks, inside of a with block.

    The rows of each observed variable, and all data that go with them, are divided over the ranks.
    Each evaluation of the model's log-probability and its gradient sums over the ranks::

        log p(y | parameters) = sum over ranks r of log p(rows of y on r | parameters)

    A potential that is a sum over rows of data, such as one of weighted likelihoods, is divided,
    too. Priors, transforms and deterministics stay in this process. ``pm.sample`` with any of its
    samplers, ``pm.find_MAP``, ``pm.fit``, ``pm.sample_smc`` and ``pm.find_hessian`` use the ranks;
    they return the results of the plain model, up to rounding. ``pm.set_data`` may give data of
    other lengths.

    Parameters
    ----------
    model : pymc.Model, optional
        The model, which the block also enters. By default that of the surrounding ``with model:``.
    ranks : int, optional
        The number of ranks, this process included; on several machines, that of each. By default
        what ``synkhronos launch`` or ``run`` was told, or one for each core; but where the
        likelihood takes less time in this process alone, the block leaves it there, and says so in
        the log.
    devices : list of str, optional
        The device of each rank: ``["cuda0"]``, ``["cuda0", "cuda1"]`` for GPUs, which compute with
        JAX (``pip install 'synkhronos[jax-cuda]'``), or a device of any other platform of JAX, such
        as ``"jax:rocm0"`` or ``"jax:cpu"``. By default those of SYNKHRONOS_DEVICES, or CPU cores.

    Yields
    ------
    ParallelLikelihood
        Says what is divided, and what is left in this process.

    Raises
    ------
    ValueError
        If no likelihood of the model can be divided, with the reason for each.
    TypeError
        For arguments of the wrong kind.

    Notes
    -----
    A likelihood is divided if it is a sum over rows. Its graph must show that, and numbers at two
    points must confirm it: the whole is what PyMC computes, and the parts add up to the whole, with
    all gradients. Any other likelihood is left in this process, with a warning in the log.

    Workers start with the first evaluation, from the process that evaluates: with
    ``pm.sample(cores=2)`` each chain's process has ranks of its own, so ``ranks * cores`` should be
    at most the number of cores of the machine. As many chains as cores use all cores already:
    then ``ranks=1`` gives each chain the faster functions of the ranks, and more ranks pay where
    there are more cores than chains. :func:`advise` says what is fastest.

    In a script under ``synkhronos launch`` on several machines the rows are divided over the ranks
    of all. Chains take turns on them: one after another with ``pm.sample(cores=1)``, or as threads.

    A worker that dies ends the sampling with :class:`~synkhronos.WorkerDied`. As nutpie continues
    after failed evaluations, and JAX raises its own errors, the block then raises it at its end.
    After a Ctrl-C the block can be used as before.

    Examples
    --------
    ::

        from synkhronos.extensions import pymc as parallel

        with pm.Model() as model:
            weights = pm.Normal("weights", shape=20)
            pm.Bernoulli("y", logit_p=x @ weights, observed=y)
        with parallel.likelihood(model, ranks=4):
            idata = pm.sample(chains=4, cores=1)
    """
    return _Block(model, ranks, devices)


@contextlib.contextmanager
def _likelihood(model, ranks, devices):
    model = _root(model)
    n_ranks, names = _ranks_and_devices(ranks, devices)
    _check_model(model)
    with _layout(n_ranks, names) as chosen, _divided(model, *chosen) as parallel:
        yield parallel


def advise(model: pm.Model | None = None, chains: int = 4) -> ModelAdvice:
    """Say how many ranks, and how many chains at the same time, are the fastest here.

    It measures an evaluation of value and gradient, a round of the ranks, and how fast the memory
    is, which takes some seconds. From these it predicts the time of an evaluation of every chain,
    for all numbers that fit the cores. Under ``synkhronos launch`` it measures the ranks of all
    machines, too, as :func:`likelihood` does in place of a session.

    Parameters
    ----------
    model : pymc.Model, optional
        By default that of the surrounding ``with model:``.
    chains : int
        The number of chains.

    Returns
    -------
    ModelAdvice
        What was measured and predicted. Its text is a table, with the lines to write:
        ``print(parallel.advise(model))``.

    Raises
    ------
    ValueError, TypeError
        As :func:`likelihood` does.
    """
    model, chains = _root(model), whole_number("chains", chains, 1, _MOST_RANKS)
    _check_model(model)
    cores, found = usable_cores(), {}
    restore = limit_threads(1)  # as in PyMC's processes, and on ranks
    try:
        if Current.link is not None:
            with likelihood(model) as ours:
                found["on_machines"] = seconds_of(compiled(model))
            found["ranks_of_machines"] = ours.ranks
        found["plain"] = seconds_of(compiled(model))
        with _divided(model, on_this_machine(1)) as ours:
            whole, [of_one] = seconds_of(compiled(model)), ours.evaluators
            terms, values = of_one.terms, of_one.values
            found["likelihood"] = seconds_of(lambda: of_one.evaluate("gradients", values))
            found["rest"] = max(0.0, whole - found["likelihood"])
            found["reading"] = seconds_of(of_one.read)
        of_all = Evaluator(terms, on_this_machine(cores), of_one.check_bounds)
        with contextlib.closing(of_all):
            of_all.evaluate("gradients", values)
            found["round"] = seconds_of(of_all.round)
            found["gain_of_reading"] = found["reading"] / seconds_of(of_all.read)
    finally:
        restore()
    return predict(Measured(cores, **found), chains)


def _root(model):
    if model is None and not pm.model.core.MODEL_MANAGER.active_contexts:
        raise TypeError("model is missing: give one that is built, as in likelihood(model).")
    model = pm.modelcontext(model)
    return getattr(model, "root", model)  # the outermost of nested models, as in pm.sample


class _Contexts(list):
    """PyMC's list of the models whose with blocks are open.

    The innermost model when the list is made, which a likelihood() block has entered, does not
    become a parent: a ``pm.Model()`` that is made in the block is no part of it.
    """

    def __init__(self, contexts):
        super().__init__(contexts)
        self.n_at_first = len(self)

    def __getitem__(self, index):
        is_parent = index == -2 and len(self) == self.n_at_first + 1
        return None if is_parent else super().__getitem__(index)


@contextlib.contextmanager
def _entered(model):
    """Enter a model, which does not become the parent of models that are made meanwhile."""
    manager = pm.model.core.MODEL_MANAGER
    if model in manager.active_contexts:
        with model:
            yield
        return
    with model:
        before = manager.active_contexts
        manager.active_contexts = ours = _Contexts(before)
        try:
            yield
        finally:
            if manager.active_contexts is ours:  # else blocks end in another order
                before[:] = ours
                manager.active_contexts = before


@contextlib.contextmanager
def _divided(model, layout, is_given=True):
    with _entered(model):
        evaluator, left = _divide(model, layout, is_given)
        for name, reason in left.items():
            log.warning("the likelihood of %r stays in this process: %s", name, reason)
        if evaluator is None:
            yield ParallelLikelihood(model, None, left)
            return
        parallel = ParallelLikelihood(model, evaluator, left)
        model.logp = _Logp(parallel, model)
        try:
            yield parallel
        except Exception as error:
            if not any(each.unheard not in (None, error) for each in parallel.evaluators):
                raise
            # The frames hold nutpie's sampler, whose other chains would go on without end.
            traceback.clear_frames(error.__traceback__)
        finally:
            vars(model).pop("logp", None)
            for each in parallel.evaluators:
                each.close()
        for each in parallel.evaluators:
            if each.unheard is not None:
                raise each.unheard
        # After a fork the main thread may have the id that it had before.
        ours = {os.getpid(), *(each.native_id for each in threading.enumerate())}
        if not all(have_ended(each.callers - ours) for each in parallel.evaluators):
            raise SessionError(
                "A sampler was still running at the end of its likelihood() block, which has ended "
                "the ranks: its draws from now on are worthless. Wait for it in the block, as by "
                "the wait() of what nutpie.sample(blocking=False) returns."
            )
        if not any(each.is_used for each in parallel.evaluators):
            log.warning(
                "ranks have computed nothing in the likelihood() block. Does pm.sample stand after "
                "its end? Indent it. Frozen copies of the model "
                "are not divided: give freeze_model=False to nutpie.compile_pymc_model (with JAX), "
                "and to find_MAP and fit_laplace of pymc-extras"
            )


def _ranks_and_devices(ranks, devices):
    """Return the number of ranks or None, and the names of their devices; () for CPU cores."""
    if ranks is not None:
        ranks = whole_number("ranks", ranks, 1, _MOST_RANKS)
    name = "devices" if devices is not None else f"{VARIABLE} or --devices"
    if ranks is None and devices is None:
        devices = _devices_of_run()
    if devices is None:
        return ranks, ()
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f"devices must be a list, such as ['cuda0'], got {devices!r}.")
    are_cores = {each == "cpu" for each in devices}
    if len(are_cores) != 1 or not all(map(_is_known, devices)):
        raise ValueError(
            f"{name} must be a list with a name for each rank: all 'cpu', or all of GPUs and other "
            f"devices of JAX, such as 'cuda0' or 'jax:cpu'; got {devices!r}."
        )
    if ranks not in (None, len(devices)):
        raise ValueError(
            f"ranks is {ranks}, but devices has {count(len(devices), 'device')}. Give one of them."
        )
    n_ranks = whole_number("the length of devices", len(devices), 1, _MOST_RANKS)
    if are_cores == {True}:
        return n_ranks, ()
    if Current.link is not None:
        raise ValueError(
            f"{name} must all be 'cpu' on several machines, got {devices!r}: ranks on GPUs are of "
            "one machine. Start the script without synkhronos launch."
        )
    jax_devices.require_package()
    return n_ranks, tuple(devices)


def _is_known(device):
    return DEVICE_NAME.fullmatch(str(device)) and not str(device).startswith("opencl")


def _devices_of_run():
    """Return devices that a command or the environment names, if they are no CPU cores."""
    of_run = Current.of_run or {}
    text = os.environ.get(VARIABLE, "")
    names = of_run.get("devices") or [each.strip() for each in text.split(",") if each.strip()]
    return names if {*names} - {"cpu"} else None


def _tell_of_gpus():
    """Say once in the log that GPUs are there, and how a block uses them."""
    if has_nvidia_driver() and not _told:
        _told.append(True)
        needed = "" if importlib.util.find_spec("jax") else f", after {pythons.install('jax-cuda')}"
        log.warning(
            "this machine has an NVIDIA GPU, and the likelihood is computed on CPU cores. "
            'likelihood(devices=["cuda0"]) computes it on the GPU%s',
            needed,
        )


@contextlib.contextmanager
def _layout(n_ranks, names):
    """Yield the layout of the ranks, and whether the user or a command has given their number.

    On several machines a session of their leaders is open in the block.
    """
    if names:
        yield LayoutOfDevices((len(names),), ("",), 0, names), True
        return
    _tell_of_gpus()
    if Current.link is None:
        given = {} if n_ranks else Current.of_run or {}
        asked = given.get("n_parallel"), given.get("devices")
        is_given = n_ranks is not None or any(asked)
        n_ranks = n_ranks or len(resolve(asked[0], False, asked[1]))
        yield on_this_machine(n_ranks), is_given
        return
    with _session_of_leaders() as layout:
        if n_ranks is not None:
            layout = replace(layout, counts=(n_ranks,) * len(layout.counts))
        yield layout, True


@contextlib.contextmanager
def _session_of_leaders():
    """Begin a session with one rank on each machine, in place of that of ``synkhronos run``.

    Each of these ranks starts the ranks of its machine. Yield the layout of the ranks that fork()
    would start.
    """
    with Current.lock:
        session, of_run, link = Current.session, Current.of_run, Current.link
        if session is not None and not session.may_be_replaced:
            raise SessionError(
                "There is a session of fork() already, or another likelihood() block. On several "
                "machines one is possible at a time: close() it, or leave that block, before."
            )
        n_parallel, devices = (of_run["n_parallel"], of_run["devices"]) if of_run else (None, None)
        devices = None if devices is None else tuple(devices)
        names = resolve(n_parallel, False, devices)
        if session is not None:
            close()
        wish = job.Wish(link.next_session(), n_parallel, False, devices, job.facts())
        plan = job.plan(link, wish, names, 0, 1, False, False)
        ones = (1,) * len(plan.counts)
        leaders = replace(plan, counts=ones, devices=("cpu",) * len(ones))
        begin(
            leaders, 1, leaders.devices, threads=1, master_rank=0, profile_workers=False,
            follow=False, check=0, adopts=False,
        )  # fmt: skip
        begun = Current.session
    try:
        yield plan.layout(0)
    finally:
        if Current.session is begun:
            close()


def _check_model(model):
    if not isinstance(model, pm.Model):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        instead = (
            "Build it, and give model.backend.model."
            if kind.startswith("bambi.")
            else "Give a model before it is frozen: a frozen one keeps compiled functions beyond "
            "the block."
            if kind.startswith("pymc.")
            else "Write likelihood(model, ranks=2)."
        )
        raise TypeError(f"model must be a pymc.Model, got an object of type {kind}. {instead}")
    if isinstance(vars(model).get("logp"), _Logp):
        raise ValueError("The model is in a likelihood() block already.")


def _divide(model, layout, is_given):
    """Return an evaluator of all likelihoods that can be divided; and why others can't.

    If the number of ranks is not given, it is None where plain PyMC is faster.
    """
    devices = layout.devices if isinstance(layout, LayoutOfDevices) else ()
    observed = [*model.observed_RVs, *model.potentials]
    chooses = not is_given and layout.n_ranks > 1
    with plain_compiled_beside(model, observed) if chooses else contextlib.nullcontext():
        terms, found, left = _checked(model, observed, REWRITTEN if devices else None)
    if devices and terms:
        evaluator = _on_devices(model, terms, found, layout, left)
        if evaluator is not None:
            return evaluator, left
        terms = []
    if not terms and not left:
        raise ValueError("The model has no observed variables, so there is nothing to divide.")
    if not terms:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        where = "devices" if devices else "ranks"
        instead = "on CPU ranks, likelihood(ranks=...), or " if found else ""
        raise ValueError(
            f"No likelihood of this model can be divided over {where} ({reasons}). Sample it "
            f"{instead}without likelihood(), with pm.sample(cores=...) for chains in parallel."
        )
    functions = [each.function for each in found]
    seconds = sum(each.seconds for each in found)
    if not is_given:
        n_ranks = _fastest(model, terms, found, layout.n_ranks)
        if not n_ranks:
            return None, left
        layout = on_this_machine(n_ranks)
    pays = _PAYS if len(layout.counts) == 1 else _PAYS_ON_MACHINES
    if is_given and seconds < pays and layout.n_ranks > 1:
        log.warning(
            "one process computes the likelihood and its gradients in %.3f milliseconds: ranks pay "
            "from about %g on. Without ranks, pm.sample(cores=...) runs chains at the same time",
            1e3 * seconds,
            1e3 * pays,
        )
    return Evaluator(terms, layout, model.check_bounds, functions), left


def _checked(model, observed, mode):
    """Return the terms that can be divided, what their tests found; and why others can't."""
    terms, found, left = [], [], {}
    for number, each in enumerate(observed, 1):
        place = f" ({number} of {len(observed)})" if len(observed) > 1 else ""
        try:
            with _told_of(each.name, place):
                term = cut(model, each)
                found.append(checked(model, each, term, mode))
            terms.append(term)
        except NoRows:
            log.debug("%r stays in this process", each.name)
        except NotByRows as error:
            left[each.name] = str(error)
        except raised_here(Exception) as error:  # such as PyTensor's, for sparse data
            log.debug("%r can't be divided", each.name, exc_info=True)
            left[each.name] = first_line(error)
    return terms, found, left


def _on_devices(model, terms, found, layout, left):
    """Return an evaluator of the terms that JAX can compute; None if it can compute none.

    What the devices compute must be what the test of the terms found. `left` gets other terms.
    """
    pairs = list(zip(terms, found))
    while pairs:
        evaluator = DeviceEvaluator([term for term, _ in pairs], layout, model.check_bounds)
        try:
            with _told_of(pairs[0][0].name):
                _compare(evaluator, pairs)
            evaluator.is_used = False  # but for this test
            return evaluator
        except NotOnDevice as error:
            evaluator.close()
            left[error.args[0]] = str(error)
            pairs = [pair for pair in pairs if pair[0].name != error.args[0]]
        except BaseException:
            evaluator.close()
            raise
    return None


def _compare(evaluator, pairs):
    values = [value for _, each in pairs for value in each.values]
    [value, *gradients] = evaluator.evaluate("gradients", evaluator.flat(values))
    whole = sum(each.result[0] for _, each in pairs)
    begin, tolerance = 0, sum(each.tolerances[0] for _, each in pairs)
    for term, each in pairs:
        end = begin + each.result.size - 1
        gaps = np.abs(gradients[begin:end] - each.result[1:])
        are_equal = (gaps <= _FURTHER * each.tolerances[1:]).all()  # False for nan
        if not are_equal or not abs(value - whole) <= _FURTHER * tolerance:
            what = f"it is {value} there, {whole} here" if are_equal else "gradients differ"
            raise NotOnDevice(term.name, f"its results are not those of PyTensor: {what}")
        begin = end


def _told_of(name, place=""):
    what = "compiling the likelihood of %r%s, which takes up to a minute the first time"
    return told_if_slow(what, name, place, always=True)


def _fastest(model, terms, found, most):
    """Return the fastest number of ranks, 1 or `most`; 0 if plain PyMC is faster."""
    with _told_of(terms[0].name):
        plain = plain_call(model, [model[term.name] for term in terms], found[0].point)
        plain()  # compiles
    functions = [each.function for each in found]
    values = [value for each in found for value in each.values]
    of_all = Evaluator(terms, on_this_machine(most), model.check_bounds, functions)
    with contextlib.closing(of_all):
        flat = of_all.flat(values)
        evaluate = functools.partial(of_all.evaluate, "gradients", flat)
        evaluate()
        ranks, alone = (functools.partial(way, "gradients") for way in of_all.ways)
        calls = {"plain": plain, "alone": alone, "ranks": ranks, "evaluate": evaluate}
        times = seconds_in_turns(calls)
    call = min(_CALL * max(times["evaluate"] - times["ranks"], 0.0), _MOST_OF_CALL)
    call += _PER_NUMBER * flat.size
    plain, alone, ranks = times["plain"], times["alone"] + call, times["ranks"] + call
    # Beside other programs this process may have to compute alone, see `pace`.
    pays = min(alone, ranks) < _LEAST * plain
    pays = pays and alone < (1.0 if plain > _LONG else _LEAST) * plain
    is_small = alone < ranks and alone < _LARGE
    if not pays or is_small:
        log.warning(
            "the likelihood and its gradients take %.3f milliseconds in plain PyMC, %.3f in this "
            "process alone, %.3f with %s: %s. With ranks=%d they are computed on ranks "
            "nevertheless",
            1e3 * plain,
            1e3 * alone,
            1e3 * ranks,
            count(most, "rank"),
            "this process computes them alone" if pays else "plain PyMC computes them",
            most,
        )
    return (1 if is_small else most) if pays else 0
