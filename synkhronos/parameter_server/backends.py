"""Backends decide what becomes of the reduction of a round.

==================  ================================================================================
`LocalBackend`      pulls return the reduction
`UpdatingBackend`   an updater changes the weight by the reduction; pulls return the weight
`RemoteBackend`     the reduction is sent to servers; pulls return what the servers answer
==================  ================================================================================
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterable

import numpy as np

from synkhronos._machine.log import log
from synkhronos.parameter_server import updaters, weight_files
from synkhronos.parameter_server.errors import OutOfTurn, ParameterServerError
from synkhronos.parameter_server.hyper import HyperChanges
from synkhronos.parameter_server.remote import placement
from synkhronos.parameter_server.rounds import Buffer, Future, Key, Pull, PushRound

_QUESTION_SECONDS = 1.0
_COPIED = (-1, 0)  # stands for a request whose result is being copied


class Backend:
    """The interface of backends; the store sets `engine` before the first call."""

    engine: Any  # the Engine of the store
    is_plain = False  # the reduction itself is the result
    is_remote = False  # results come from servers, later
    runs_users_code = False

    def init_key(self, key: Key, weight: np.ndarray | None) -> None:
        """Take a new key, with its initial weight if the caller has one."""

    def memory_for(self, closed: PushRound) -> Buffer | None:
        """Return the memory into which a round is reduced; None for a buffer of the key."""
        return None

    def is_quick(self, key: Key, version: int) -> bool:
        """Return whether a caller may reduce a round and call `accept` without a long wait."""
        return not self.runs_users_code

    def accept(self, closed: PushRound) -> Buffer | None:
        """Take the reduction of a round; return the result, or None if it is published later."""
        return closed.buffer

    def is_stale(self, key: Key, pull: Pull) -> bool:
        """Return whether a pull must ask the servers although the key already has a result."""
        return False

    def request(self, key: Key, version: int, priority: int) -> None:
        """Ask the servers for the result of a round."""

    def waits_for(self, future: Future) -> str:
        """Return, in words, what a future waits for on the servers."""
        return ""

    def change_hyper(self, keys: Iterable[Key], values: dict[str, Any]) -> None:
        """Change hyperparameters of the updater for rounds that are not closed."""
        raise NotImplementedError

    def dump_states(self) -> list[bytes]:
        """Return the state of each updater."""
        raise NotImplementedError

    def restore_states(self, states: list[bytes]) -> None:
        """Set the state of each updater to what `dump_states` has returned."""
        raise NotImplementedError

    def leave(self, timeout: float) -> None:
        """Stop the threads and connections of this backend."""

    def publish_copy(self, key: Key, version: int, value: np.ndarray) -> None:
        """Publish a copy of an array as the result of a round."""
        with self.engine.lock:
            buffer = key.free_buffer()
        np.copyto(buffer.flat, value.reshape(-1))
        self.engine.publish(key, version, buffer)


class LocalBackend(Backend):
    """Publishes each reduction as the result."""

    is_plain = True

    def init_key(self, key: Key, weight: np.ndarray | None) -> None:
        """Publish an initial weight as the result of round 0; gathered keys have none."""
        if weight is not None and key.op != "gather":
            self.publish_copy(key, 0, weight)


class UpdatingBackend(Backend):
    """Gives the reduction to an updater, which changes the weight in place.

    With `is_test` a pull still returns the reduction (``test_on_server``).
    """

    runs_users_code = True

    def __init__(self, updater: Any, is_test: bool) -> None:
        self.updater = updater
        self._hyper = HyperChanges(updater, updater.hyper_values())
        self.weights: dict[int | str, np.ndarray] = {}
        self._is_test = is_test
        self._lock = threading.Lock()  # one update at a time
        self._owner = threading.local()  # `is_at_work`: this thread has the lock
        self._sums: dict[int | str, Buffer] = {}

    def init_key(self, key: Key, weight: np.ndarray | None) -> None:
        """Let the updater fill the weight, and publish it as the result of round 0."""
        if getattr(self._owner, "is_at_work", False):
            raise OutOfTurn(f"an updater can't make key {key.name!r} of its own store.")
        is_new = weight is None
        kept = np.zeros(key.shape, key.dtype) if is_new else weight.copy()
        with self._alone():
            (self.updater.init_model if is_new else self.updater.adopt)(key.name, kept)
            self.weights[key.name] = kept
        if not self._is_test:
            self.publish_copy(key, 0, kept)

    @contextlib.contextmanager
    def _alone(self):
        """Let no other thread call the updater in the block."""
        with self._lock:
            self._owner.is_at_work = True
            try:
                yield
            finally:
                self._owner.is_at_work = False

    def memory_for(self, closed: PushRound) -> Buffer | None:
        """Return memory for the gradient; pulls never read it."""
        key = closed.key
        if self._is_test:
            return None
        if closed.reduced is not None:
            return closed.reduced
        if key.name not in self._sums:
            self._sums[key.name] = Buffer(np.empty(key.size, key.dtype), key.shape)
        return self._sums[key.name]

    def accept(self, closed: PushRound) -> Buffer | None:
        """Update the weight."""
        key, target = closed.key, closed.buffer
        assert target is not None
        with self._alone():
            self._hyper.use(key.number, closed.version)
            updaters.update(self.updater, key.name, target.shaped, self.weights[key.name])
            if self._is_test:
                return target
            # Pulls may still copy this result while the next round changes the weight.
            self.publish_copy(key, closed.version, self.weights[key.name])
        return None

    def change_hyper(self, keys: Iterable[Key], values: dict[str, Any]) -> None:
        """Change hyperparameters of the updater for rounds that are not closed."""
        with self.engine.lock:
            first = {key.number: key.n_closed + 1 for key in keys}
            done = {key.number: key.n_closed - len(key.closed) for key in keys}
        self._hyper.change(first, values, done)

    def dump_states(self) -> list[bytes]:
        """Return the state of the updater, between two updates."""
        with self._alone():
            return [weight_files.dump(self.updater)]

    def restore_states(self, states: list[bytes]) -> None:
        """Set the state of the updater, between two updates."""
        with self._alone():
            weight_files.restore(self.updater, states[0])

    def weight(self, key: Key) -> np.ndarray:
        """Return a copy of the weight of a key, between two updates."""
        with self._alone():
            return self.weights[key.name].copy()


class RemoteBackend(Backend):
    """Gives reductions to the servers, and gets results from them."""

    is_remote = True

    def __init__(self, link: Any, updater: Any = None) -> None:
        self._link, self.updater = link, updater
        self._has_warned = False
        self._keys: dict[int, Key] = {}
        # (key number, version % 2) -> (version, priority); all but the first wait for its memory
        self._asked: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        self._is_shut = False
        self._receiver = threading.Thread(
            target=self._receive, name="synkhronos-receiver", daemon=True
        )

    def init_key(self, key: Key, weight: np.ndarray | None) -> None:
        """Tell the servers of a key."""
        is_whole = self._is_whole(key, self.updater)
        self._keys[key.number] = key
        flat = None if weight is None else weight.reshape(-1)
        self._link.init_key(key.number, key.name, key.shape, key.dtype, key.op, flat, is_whole)
        with self._lock:
            if not self._receiver.is_alive():
                self._receiver.start()

    def _is_whole(self, key, updater):
        """Return whether an updater needs a large key whole; warn once if that is unknown."""
        n_servers = self._link.num_servers
        if updater is None or len(placement.parts(key.name, key.size, n_servers)) == 1:
            return False
        takes_parts = updater.takes_parts(key.name, key.shape, key.dtype)
        if takes_parts is None and not self._has_warned and self._link.rank == 0:
            self._has_warned = True
            log.warning(
                f"key {key.name!r} of {key.size} elements is divided over {n_servers} servers, "
                f"which update a part each, so {updater.kind} must compute each element by itself. "
                "Give it the attribute is_elementwise = True if it does, and False if it needs "
                "whole keys, such as for a norm."
            )
        return takes_parts is False

    def use(self, updater: Any) -> None:
        """Take an updater; raise OutOfTurn if it needs a whole key that is already divided."""
        whole = [key.name for key in self._keys.values() if self._is_whole(key, updater)]
        if whole:
            raise OutOfTurn(
                f"{updater.kind} needs key {whole[0]!r} whole, but it is divided over "
                f"{self._link.num_servers} servers: call set_updater() or set_optimizer() before "
                "the first key."
            )
        self.updater = updater

    def is_quick(self, key: Key, version: int) -> bool:
        """Return whether a round's memory is free: the push of two rounds before has been sent."""
        return self._link.is_free(key.number, version)

    def memory_for(self, closed: PushRound) -> Buffer | None:
        """Return shared memory from which the mover sends."""
        key = closed.key
        return Buffer(self._link.outgoing(key.number, closed.version), key.shape)

    def accept(self, closed: PushRound) -> Buffer | None:
        """Send the reduction."""
        key = closed.key
        self._link.push(key.number, closed.version, closed.priority)

    def is_stale(self, key: Key, pull: Pull) -> bool:
        """Return whether other workers may have changed the weight since this device pulled it."""
        if self._link.mode != "dist_async" or pull.needed > key.version:
            return False
        return pull.slot is None or pull.slot.pulled == key.version

    def request(self, key: Key, version: int, priority: int) -> None:
        """Ask for the result of a round once, however many devices need it."""
        with self._lock:
            asked = self._asked.setdefault((key.number, version % 2), [])
            if any(version == each for each, _ in asked):
                return
            asked.append((version, priority))
            if len(asked) > 1:  # `_take` sends it when the memory is free
                return
        self._link.request(key.number, version, priority)

    def _receive(self):
        try:
            while not self._is_shut:
                for number, version, error in self._link.next(1.0):
                    self._take(self._keys[number], version, error)
        except Exception as error:
            if not self._is_shut:
                if not isinstance(error, ParameterServerError):
                    error = ParameterServerError(f"the link to the servers has failed: {error}")
                self.engine.fail(error, list(self._keys.values()))

    def _take(self, key, version, error):
        """Publish a result or an error of the servers; send the next request for its memory."""
        asked = self._asked.get((key.number, (version or 0) % 2), [])
        with self._lock:  # a pull from now on asks again: there may be a newer value
            if asked:
                asked[0] = _COPIED
        if error is None:
            self.publish_copy(key, version, self._link.incoming(key.number, version))
        else:
            self.engine.fail_round(key, version, error)
        with self._lock:
            del asked[:1]
            following = asked[0] if asked else None
        if following is not None:
            self._link.request(key.number, *following)

    def change_hyper(self, keys: Iterable[Key], values: dict[str, Any]) -> None:
        """Tell the servers of hyperparameters for rounds that are not closed."""
        self._link.set_hyper({key.number: key.n_closed + 1 for key in keys}, values)

    def dump_states(self) -> list[bytes]:
        """Return the state of the updater of each server."""
        return self._link.states()

    def restore_states(self, states: list[bytes]) -> None:
        """Set the state of the updater of each server."""
        self._link.set_states(states)

    def waits_for(self, future: Future) -> str:
        """Return, in words, which workers have not pushed, or what the servers do."""
        version = future.needed if isinstance(future, Pull) else 0
        if self._link.mode == "dist_async" or not version:
            return "the servers have not answered yet"
        try:
            workers = self._link.missing(future.key.name, version, _QUESTION_SECONDS)
        except ParameterServerError as error:
            return f"the servers have not answered yet ({error})"
        if not workers:
            return "the servers have all pushes of this round, and compute or send the result"
        hosts = self._link.hosts
        names = " and ".join(f"worker {each} on {hosts[each]}" for each in workers)
        return f"{names} {'has' if len(workers) == 1 else 'have'} not pushed"

    def leave(self, timeout: float) -> None:
        """Leave the run, and end the thread that receives."""
        self._is_shut = True
        self._link.close(timeout)
        if self._receiver.is_alive() and self._receiver is not threading.current_thread():
            self._receiver.join(timeout)
