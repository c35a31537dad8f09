"""The keys of a server: rounds, updates and answers, without messages and processes.

    worker: key                ──▶ on_key           the first worker with a key says what it is
    worker: initial weight     ──▶ place, arrived   version 0, of worker 0 only
    worker: push of version v  ──▶ place, arrived
    worker: pull of version v  ──▶ on_request ──▶ answer: send(...) or fail(...)
    worker: has left, or died  ──▶ on_gone

dist_async
    Each push is applied as soon as all of it has arrived. A worker's pull of version v is answered
    when its own push v is applied; the value includes all pushes of others until then.
dist_sync
    The pushes v of all workers are reduced, in the order of the workers, and applied once. A pull
    of version v is answered when this round is closed, with the same bits for all workers.

A key gets its first value from worker 0, or else from the updater, or else it is zero. Without a
value from worker 0 it waits for an updater until worker 0 begins to push or pull: none comes later.

References
----------
dist_async is level 2 of mshadow-ps; dist_sync and the initial values are those of MXNet's KVStore.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from typing import Any, Callable

import cloudpickle
import numpy as np

from synkhronos._arithmetic.operations import OPERATIONS, divide, wide
from synkhronos._machine.log import log
from synkhronos.parameter_server import updaters, weight_files
from synkhronos.parameter_server.hyper import HyperChanges
from synkhronos.parameter_server.remote import placement
from synkhronos.parameter_server.remote.protocol import Failure
from synkhronos.parameter_server.rounds import plane


@dataclass
class Gone:
    """A worker that has left or died."""

    worker: int
    host: str
    how: str  # "has left", "was killed by SIGKILL", ...
    is_dead: bool

    def __str__(self) -> str:
        return f"worker {self.worker} on {self.host} {self.how}"


@dataclass(eq=False)
class _VersionRound:
    """A round of dist_sync that is open: the pushes of one version."""

    pushed: dict[int, np.ndarray] = field(default_factory=dict)  # not added yet, by worker
    n_added: int = 0
    total: np.ndarray | None = None


@dataclass(eq=False)
class _ServerKey:
    """A key, or the part of it that this server keeps."""

    name: int | str
    shape: tuple[int, ...]  # of the whole key
    dtype: np.dtype
    op: str
    is_whole: bool
    part: placement.KeyPart
    weight: np.ndarray  # flat
    seen: np.ndarray | None = None  # the weight in the shape of this part, for the updater
    numbers: dict[int, int] = field(default_factory=dict)  # by worker: what it calls the key
    given: np.ndarray | None = None  # the weight of worker 0, while it arrives
    is_given_weight: bool = False
    is_ready: bool = False  # has its first value
    is_known_to_updater: bool = False
    arriving: dict[tuple[int, int], list] = field(default_factory=dict)  # array, elements missing
    pushed: dict[int, int] = field(default_factory=dict)  # last version that has arrived
    applied: dict[int, int] = field(default_factory=dict)  # last version that was applied
    waiting: list[tuple[int, int, np.ndarray]] = field(default_factory=list)  # pushes, dist_async
    rounds: dict[int, _VersionRound] = field(default_factory=dict)  # dist_sync
    n_closed: int = 0
    failed: tuple[int, Failure] | None = None  # a round, and why; version 0 for the key
    refused: dict[int, list[tuple[int, Failure]]] = field(default_factory=dict)  # pushes, by worker
    requests: list[tuple[int, int, int]] = field(default_factory=list)
    snapshot: np.ndarray | None = None  # what pulls get; the weight may change meanwhile
    pool: list[np.ndarray] = field(default_factory=list)

    @property
    def n_here(self) -> int:
        """The number of elements of this server's part."""
        return self.part.end - self.part.begin

    @property
    def shape_here(self) -> tuple[int, ...]:
        """The shape of this server's part: of as many axes as the key."""
        if self.n_here == math.prod(self.shape):
            return self.shape
        return (1,) * (len(self.shape) - 1) + (self.n_here,)

    def buffer(self) -> np.ndarray:
        """Return an array for a push."""
        return self.pool.pop() if self.pool else np.empty(self.n_here, self.dtype)


class Keeper:
    """The keys of one server.

    ``send(worker, number, version, begin, array, priority)`` answers a pull, and ``fail(worker,
    number, version, error)`` refuses one, or with version None a key, with a `Failure`.
    """

    def __init__(
        self,
        server: int,
        n_servers: int,
        n_workers: int,
        send: Callable[..., None],
        fail: Callable[..., None],
    ) -> None:
        self._server, self._n_servers, self._n_workers = server, n_servers, n_workers
        self._send, self._fail = send, fail
        self.mode: str | None = None
        self.gone: dict[int, Gone] = {}
        self._keys: dict[int | str, _ServerKey] = {}
        self._numbered: dict[tuple[int, int], _ServerKey | None] = {}  # None: refused
        self._updater: Any = None
        self._hyper: Any = None  # what has changed in it
        self._has_begun = False  # worker 0 has pushed or pulled
        self._expects_updater = False  # another worker has set one
        self._refusal: Failure | None = None

    def missing(self, name: int | str, version: int) -> list[int] | None:
        """Return the workers that have not pushed a key in a round; None for a key kept elsewhere.

        Workers that have left without a push count, too.
        """
        key = self._keys.get(name)
        if key is None:
            return None
        return [w for w in range(self._n_workers) if key.pushed.get(w, 0) < version]

    def on_key(self, worker, number, name, shape, dtype, op, has_weight, is_whole=False) -> None:
        """Register a worker's key, which the first worker with it defines."""
        key, dtype = self._keys.get(name), np.dtype(dtype)
        if key is None:
            size = math.prod(shape)
            part = placement.part_of(self._server, name, size, self._n_servers, is_whole)
            weight = np.zeros(part.end - part.begin, dtype)
            key = self._keys[name] = _ServerKey(name, shape, dtype, op, is_whole, part, weight)
        given = plane(shape), dtype, op, is_whole
        known = plane(key.shape), key.dtype, key.op, key.is_whole
        if given != known:
            text = (
                f"key {name!r} has the shape {shape}, {dtype} and the operation {op!r} here, but "
                f"another worker has it with {key.shape}, {key.dtype} and {key.op!r}: all workers "
                "must set the updater and initialize keys alike."
            )
            if is_whole != key.is_whole:
                text += " One of them keeps it whole on one server, the other one divides it."
            self._numbered[worker, number] = None
            self._fail(worker, number, None, Failure("ValueError", text))
            return
        self._numbered[worker, number] = key
        key.numbers[worker] = number
        if worker == 0:
            key.shape = shape
            key.is_given_weight = has_weight
            self._initialize(key)

    def place(
        self, worker: int, number: int, version: int, begin: int, nbytes: int
    ) -> np.ndarray | None:
        """Return the memory for a chunk from element `begin` on; None for a refused key."""
        key = self._numbered[worker, number]
        if key is None:
            return None
        if (worker, version) not in key.arriving:
            key.arriving[worker, version] = [key.buffer(), key.n_here]
        begin -= key.part.begin
        return key.arriving[worker, version][0][begin : begin + nbytes // key.dtype.itemsize]

    def arrived(self, worker: int, number: int, version: int, nbytes: int) -> None:
        """Count a chunk that has been copied; apply the push if it was the last chunk."""
        key = self._numbered[worker, number]
        assert key is not None
        arriving = key.arriving[worker, version]
        arriving[1] -= nbytes // key.dtype.itemsize
        if arriving[1]:
            return
        array, _ = key.arriving.pop((worker, version))
        if version == 0:
            key.given = array
            self._initialize(key)
            return
        key.pushed[worker] = version
        if self.mode == "dist_sync":
            key.rounds.setdefault(version, _VersionRound()).pushed[worker] = array
        else:
            key.waiting.append((worker, version, array))
        self._apply(key)

    def on_request(self, worker: int, number: int, version: int, priority: int) -> None:
        """Answer a pull, at once or later."""
        key = self._numbered[worker, number]
        if key is not None:
            key.requests.append((worker, version, priority))
            self._answer(key)

    def on_updater(self, worker: int, blob: bytes, parameters: dict[str, str]) -> None:
        """Take the updater of worker 0; a later one replaces it, before the first push."""
        if worker:
            self._expects_updater = True
            self._refuse_without_updater()
            return
        if any(key.n_closed or key.applied for key in self._keys.values()):
            text = (
                "an updater has come after the first push: call set_updater or set_optimizer "
                "before the first key."
            )
            self._refuse(Failure("OutOfTurn", text))
            return
        try:
            updater = cloudpickle.loads(blob)
            updater.init_updater(self._server, parameters)
        except Exception as error:
            updater = _Broken(self._reason(error, "init_updater").text)
        values = {} if isinstance(updater, _Broken) else updater.hyper_values()
        self._updater, self._hyper = updater, HyperChanges(updater, values)
        for key in self._keys.values():
            key.is_known_to_updater = False
            if key.is_ready:
                self._introduce(key)
            else:
                self._initialize(key)
            self._apply(key)

    def on_hyper(self, worker: int, first: dict[int, int], values: dict[str, Any]) -> None:
        """Take worker 0's changed hyperparameters, for versions from ``first[key]`` on."""
        if worker == 0 and self._updater is not None:
            numbered = {number: key for (w, number), key in self._numbered.items() if w == 0}
            done = {
                number: key.n_closed if self.mode == "dist_sync" else key.applied.get(0, 0)
                for number, key in numbered.items()
                if key is not None
            }
            first = {number: version for number, version in first.items() if number in done}
            self._hyper.change(first, values, done)

    def on_begun(self, worker: int) -> None:
        """Note that a worker has begun to push or pull."""
        if worker == 0 and not self._has_begun:
            self._has_begun = True
            self._refuse_without_updater()
            for key in self._keys.values():
                self._initialize(key)

    def _refuse_without_updater(self):
        """Refuse all pulls if another worker has set an updater, but worker 0 has not."""
        if 0 in self.gone or self._updater is not None:
            return
        if self._expects_updater and self._has_begun:
            text = (
                "worker 0 has no updater, but another worker has set one: call set_updater or "
                "set_optimizer on all workers before the first key."
            )
            self._refuse(Failure("OutOfTurn", text))

    def _refuse(self, error):
        """Answer all pulls with an error from now on."""
        self._refusal = error
        for key in self._keys.values():
            self._answer(key)

    def on_gone(self, gone: Gone) -> None:
        """Drop the unfinished pushes of a worker that has left, and refuse pulls that need it."""
        self.gone[gone.worker] = gone
        if gone.worker == 0 and not self._has_begun and self.mode == "dist_async":
            self._has_begun = True
        for key in self._keys.values():
            for arriving in [each for each in key.arriving if each[0] == gone.worker]:
                del key.arriving[arriving]
            self._apply(key)

    def states(self) -> bytes:
        """Return the state of the updater, as `weight_files.dump` does."""
        if self._updater is None:
            raise RuntimeError("there is no updater, and so no state of one.")
        return weight_files.dump(self._updater)

    def set_states(self, states: bytes) -> None:
        """Set the state of the updater to that of `states`."""
        if self._updater is None:
            raise RuntimeError("there is no updater of which the state could be set.")
        weight_files.restore(self._updater, states)

    def _initialize(self, key):
        """Give a key its first value, if it is known."""
        if key.is_ready or 0 not in key.numbers:
            return
        if key.is_given_weight:
            if key.given is None:
                return
            key.weight[...] = key.given
            key.pool.append(key.given)
        elif self._updater is None and not self._has_begun:
            return
        key.is_ready = True
        self._introduce(key)
        self._apply(key)

    def _introduce(self, key):
        """Give the updater the weight of a key: the given one, or zeros that it may fill."""
        if self._updater is None or key.is_known_to_updater:
            return
        key.is_known_to_updater = True
        try:
            updater, key.seen = self._updater, key.weight.reshape(key.shape_here)
            (updater.adopt if key.is_given_weight else updater.init_model)(key.name, key.seen)
        except Exception as error:
            key.failed = 0, self._reason(error, f"init_model of key {key.name!r}")
        key.snapshot = None

    def _apply(self, key):
        """Apply the pushes that can be applied, and answer pulls."""
        if key.is_ready and self.mode == "dist_sync":
            self._close_rounds(key)
        elif key.is_ready and (self._updater is not None or self._has_begun):
            waiting, key.waiting = key.waiting, []
            for worker, version, array in waiting:
                counts = version if worker == 0 else None  # changes count from versions of worker 0
                error = self._update(key, array, f"worker {worker}", counts)
                if error is not None:
                    key.refused.setdefault(worker, []).append((version, error))
                key.applied[worker] = version
                key.pool.append(array)
        self._answer(key)

    def _close_rounds(self, key):
        while key.n_closed + 1 in key.rounds:
            version = key.n_closed + 1
            current = key.rounds[version]
            self._add(key, current)
            if current.n_added < self._n_workers:
                return
            del key.rounds[version]
            total = current.total
            if OPERATIONS[key.op].divides:
                divide(total, self._n_workers)
            if total.dtype != key.dtype:  # rounded once, at the end
                total = key.buffer()
                total[...] = current.total
            if self._updater is None:
                key.weight = key.snapshot = total  # never changed again, so pulls need no copy
            else:
                error = self._update(key, total, f"round {version}", version)
                if error is not None:
                    key.failed = version, error
                key.pool.append(total)
            key.n_closed = version
            self._answer(key)

    def _add(self, key, current):
        """Add the pushes of a round in the order of the workers, so that sums have equal bits."""
        while current.n_added in current.pushed:
            array = current.pushed.pop(current.n_added)
            if current.total is None and wide(key.dtype) == key.dtype:
                current.total = array
            elif current.total is None:
                current.total = array.astype(wide(key.dtype))
                key.pool.append(array)
            else:
                OPERATIONS[key.op].combine(current.total, array, out=current.total)
                key.pool.append(array)
            current.n_added += 1

    def _update(self, key, gradient, source, version):
        """Let the updater change the weight; return an error, or None.

        The hyperparameters are those for a version of worker 0, with None the newest.
        """
        if self._updater is None:
            text = (
                f"dist_async has no updater for key {key.name!r}: call set_updater or "
                "set_optimizer on all workers before the first push, or use dist_sync."
            )
            return Failure("ParameterServerError", text)
        key.snapshot = None
        try:
            self._hyper.use(key.numbers.get(0), version)
            updaters.update(self._updater, key.name, gradient.reshape(key.shape_here), key.seen)
        except Exception as error:
            return self._reason(error, f"update of key {key.name!r} ({source})")
        return None

    def _reason(self, error, what):
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        log.warning("%s has failed: %s", what, error)
        text = f"{what} has failed on server {self._server}:\n{trace}"
        return Failure("CallbackFailed", text)

    def _answer(self, key):
        """Answer the pulls that can be answered."""
        requests, key.requests = key.requests, []
        for request in requests:
            worker, version, priority = request
            number = key.numbers[worker]
            error = self._error_of(key, worker, version)
            if error is not None:
                self._fail(worker, number, version, error)
            elif self._is_due(key, worker, version):
                if key.snapshot is None:
                    key.snapshot = key.weight.copy()
                self._send(worker, number, version, key.part.begin, key.snapshot, priority)
            else:
                key.requests.append(request)

    def _is_due(self, key, worker, version):
        if not key.is_ready:
            return False
        if self.mode == "dist_sync":
            return key.n_closed >= version
        return key.applied.get(worker, 0) >= version

    def _error_of(self, key, worker, version):
        """Return why a pull can't be answered, or None."""
        if self._refusal is not None:
            return self._refusal
        refused = key.refused.get(worker, ())
        errors = [error for refused_version, error in refused if refused_version <= version]
        if errors:
            del refused[: len(errors)]  # each is reported once: the weight is unchanged
            return errors[0]
        if key.failed is not None and key.failed[0] == version:
            return key.failed[1]
        fills = 0 in key.numbers and not key.is_given_weight and self._updater is not None
        if not key.is_ready and 0 in self.gone and not fills:
            return self._lost(self.gone[0], f"key {key.name!r} has no first value without it")
        if self.mode == "dist_sync" and version > key.n_closed:
            for gone in self.gone.values():
                if key.pushed.get(gone.worker, 0) < version:
                    what = f"round {version} of key {key.name!r} can't be closed"
                    return self._lost(gone, what)
        return None

    def _lost(self, gone, what):
        attributes = {"rank": gone.worker, "host": gone.host, "reason": gone.how}
        return Failure("WorkerLost", f"{gone}: {what}.", attributes)


class _Broken:
    """Stands for an updater that the server can't use: raises its error again."""

    def __init__(self, text):
        self._text = text

    def __getattr__(self, name):
        raise RuntimeError(self._text)
