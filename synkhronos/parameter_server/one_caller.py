"""The calls of MXNet's KVStore: one caller pushes and pulls the arrays of all devices.

Each push of a key is a whole round, of as many arrays as are given. A pull gets the result of all
rounds before it.

References
----------
T. Chen et al., "MXNet: a flexible and efficient machine learning library for heterogeneous
distributed systems", arXiv:1512.01274; the calls are those of ``mx.kv.KVStore``.
"""

from __future__ import annotations

from typing import Any, Callable

from synkhronos import _wording
from synkhronos.parameter_server import weight_files
from synkhronos.parameter_server.argument_checks import by_key, priority_of, targets_of, values_of
from synkhronos.parameter_server.backends import Backend, LocalBackend, UpdatingBackend
from synkhronos.parameter_server.errors import OutOfTurn
from synkhronos.parameter_server.hyper import is_same
from synkhronos.parameter_server.operands import operand_of
from synkhronos.parameter_server.parameters import Parameters
from synkhronos.parameter_server.rounds import Future, Futures
from synkhronos.parameter_server.updaters import as_updater, rule_updater

# Calls of KVStore that stores do not have, and what to do instead.
_NOT_IN_STORES = {
    "set_gradient_compression": "arrays travel as they are: push arrays of float16 to send half",
    "row_sparse_pull": "there are no sparse arrays: write pull(key)",
    "send_command_to_servers": "servers take no commands: write set_hyper() or set_updater()",
    "_send_command_to_servers": "servers take no commands: write set_hyper() or set_updater()",
    "_set_updater": "write set_updater(updater)",
    "_barrier": "write barrier()",
    "is_capable": "set_optimizer() works with all kinds of stores",
    "get_num_dead_node": "calls raise ProcessLost when a process has died",
    "num_dead_node": "calls raise ProcessLost when a process has died",
    "run_server": "synkhronos launch --servers starts the servers",
}


class OneCaller:
    """The calls of one caller for all devices; the base of stores."""

    _engine: Any
    _backend: Backend | None
    _link: Any
    _keys: dict[Any, Any]
    _refuse_closed: Callable[[], None]
    init: Callable[..., None]
    num_servers: int
    _parameters: Parameters
    _updater: Any
    _before_push: Callable[[], None] | None
    _lock: Any
    _sent_hyper: dict[str, Any]  # hyperparameters, as servers have them

    def __getattr__(self, name: str) -> Any:
        hint = f": {_NOT_IN_STORES[name]}." if name in _NOT_IN_STORES else "."
        raise AttributeError(f"a store has no {name}{hint}")

    def _push_by_key(self, first, second, third, priority, value):
        """Push by the arguments of ``push(key, value, priority)``, by position or by name."""
        if isinstance(first, (list, tuple)) and not all(isinstance(x, (int, str)) for x in first):
            operand_of(first, "array")  # refuses it, with another hint than a list of keys gets
        if first is None:
            names, values, rest = second, value, third
        elif value is not None:
            names, values, rest = first, value, second if third is None else third
        else:
            names, values, rest = first, second, third
        if rest is not None and priority != 0:
            raise TypeError(
                "push() takes an array, a key, a device and a priority; or a key, a value and a "
                f"priority. The first was {_wording.shown(first)}."
            )
        priority, rounds = priority_of(priority if rest is None else rest), []
        for name, pushed in zip(*by_key(names, value=values)):
            key = self._known(name)
            rounds.append((key, values_of(pushed, key), None))
        if self._before_push is not None:
            self._before_push()
        return _as_one(names, self._engine.push_rounds(rounds, priority))

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future:
        """Ask for the results of all pushes so far, for one caller; return at once.

        Parameters
        ----------
        key : int, str, or list of these
        out : array, list of arrays, or for a list of keys a list of these; optional
            Written when the result is there. Without it ``wait()`` returns a new array.
        priority : int, optional
        ignore_sparse : bool, optional
            Has no effect: there are no sparse arrays.

        Returns
        -------
        Future
        """
        priority = priority_of(priority)
        names, outs = by_key(key, out=out) if out is not None else (by_key(key)[0], None)
        keys = [self._known(name) for name in names]
        targets = [targets_of(each, of) for each, of in zip(outs or [()] * len(keys), keys)]
        pulls = [self._engine.pull(of, None, own, priority) for of, own in zip(keys, targets)]
        return _as_one(key, pulls)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Future:
        """Push arrays of all devices and pull the result; into `value` if `out` is not given.

        Parameters
        ----------
        key, value, out, priority
            As in :meth:`push` and :meth:`pull`.

        Returns
        -------
        Future

        Examples
        --------
        >>> import numpy as np
        >>> from synkhronos import parameter_server as ps
        >>> with ps.create("local") as store:
        ...     store.init([3, 5], [np.zeros(2), np.zeros(1)])
        ...     gradients = [[np.ones(2), np.ones(2)], [np.ones(1), np.ones(1)]]
        ...     _ = store.pushpull([3, 5], gradients).wait()
        >>> gradients
        [[array([2., 2.]), array([2., 2.])], [array([2.]), array([2.])]]
        """
        priority, rounds = priority_of(priority), []
        outs = value if out is None else out
        for name, pushed, target in zip(*by_key(key, value=value, out=outs)):
            known = self._known(name)
            is_target = out is None and known.op != "gather"
            arrays = values_of(pushed, known, writes=is_target)
            rounds.append((known, arrays, arrays if is_target else targets_of(target, known)))
        if self._before_push is not None:
            self._before_push()
        return _as_one(key, self._engine.push_rounds(rounds, priority))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Make keys with values, and write these into arrays: ``init``, ``pull`` and a wait.

        All arguments are checked before a key is made.
        """
        priority = priority_of(priority)
        for name, given, arrays in zip(*by_key(key, value=value, out=out)):
            given = operand_of(given, "value")
            for each in arrays if isinstance(arrays, (list, tuple)) else [arrays]:
                into = operand_of(each, "out", writes=True)
                if (into.shape, into.dtype) != (given.shape, given.dtype):
                    raise ValueError(
                        f"out of key {name!r} must have shape {given.shape} and {given.dtype}, as "
                        f"its value, got {into.shape} and {into.dtype}."
                    )
        self.init(key, value)
        self.pull(key, out, priority).wait()

    def save_weights(self, path: Any) -> None:
        """Write the newest weights, or results, of all keys to a file, as NumPy's ``.npz``.

        Raises
        ------
        ValueError
            For keys without a value: none was given, and no round was closed.
        """
        self._refuse_closed()
        weight_files.save_weights(
            path, {name: self._value(key) for name, key in self._keys.items()}
        )

    def _value(self, key):
        """Return the newest value of a key, after all rounds that are closed."""
        if isinstance(self._backend, UpdatingBackend):
            self._engine.drain([key])
            return self._backend.weight(key)
        if key.op == "gather":
            raise ValueError(f"key {key.name!r} has no value to save: its arrays are gathered.")
        if not self._backend.is_remote and key.version < 0 and not key.n_closed:
            raise ValueError(
                f"key {key.name!r} has no value to save: no round was closed, and it was made "
                "without a value."
            )
        return self.pull(key.name).wait()

    def load_weights(self, path: Any) -> None:
        """Make keys with the weights of a file of :meth:`save_weights`, in a new store.

        Raises
        ------
        ValueError
            For any other file, and for keys that the store already has.
        """
        values = weight_files.load_weights(path)
        self.init(list(values), list(values.values()))

    def save_optimizer_states(self, path: Any) -> None:
        """Write the state of the updater, such as velocities, to a file."""
        weight_files.save_states(path, self._with_updater().dump_states())

    def load_optimizer_states(self, path: Any) -> None:
        """Read the state of the updater from a file; its keys must have been made.

        Raises
        ------
        ValueError
            For a file that does not fit the updater or the keys; nothing is changed then.
        """
        backend = self._with_updater()
        states = weight_files.load_states(path, max(1, self.num_servers))
        try:
            backend.restore_states(states)
        except ValueError as error:
            raise ValueError(f"{path!r} does not fit: {_wording.sentence(error)}") from error

    def _with_updater(self):
        """Return the backend, once its updater has all keys and closed rounds."""
        self._refuse_closed()
        if self._backend is None or isinstance(self._backend, LocalBackend):
            raise OutOfTurn("there is no updater with a state: call set_optimizer() first.")
        if self._link is not None:  # the servers must have the weights first
            self.pull(list(self._keys)).wait()
        else:
            self._engine.drain(list(self._keys.values()))
        return self._backend

    def set_updater(self, updater: Any) -> None:
        """Let an updater change the weights of all keys; a pull returns the weight from then on.

        Parameters
        ----------
        updater : Updater, or callable
            ``updater(key, gradient, weight)`` changes `weight` in place.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            For an updater that another store has.
        OutOfTurn
            After the first push.
        """
        self._refuse_closed()
        updater = as_updater(updater)
        if self._parameters.given.get("update_on_server") in ("0", "False"):
            raise ValueError("update_on_server=0 leaves an updater without effect: leave one out.")
        keys = list(self._keys.values())
        if any(key.n_closed or key.round is not None for key in keys):
            raise OutOfTurn("set_updater() and set_optimizer() must come before the first push.")
        if self._link is not None:
            pickled = updater.pickled()
            if self._backend is not None:
                self._backend.use(updater)
            self._link.set_updater(pickled, dict(self._parameters.given))
            self._updater = updater
            self._follow(updater)
            return
        if updater.is_taken:
            raise ValueError("updater belongs to another store: make a new one for this store.")
        if self._engine is not None:
            self._hand_over(keys, updater)
        self._updater = updater
        updater.is_taken = True
        self._follow(updater)

    def _hand_over(self, keys, updater):
        """Give an updater the keys that exist, with their values."""
        gathered = [key.name for key in keys if key.op == "gather"]
        if gathered:
            raise ValueError(f"push_op[{gathered[0]}] can't be gather with an updater.")
        backend = self._updating(updater)
        backend.engine = self._engine
        for key in keys:
            backend.init_key(key, None if key.source is None else key.source.shaped.copy())
        self._backend = self._engine.backend = backend

    def _updating(self, updater):
        updater.init_updater(0, dict(self._parameters.given))
        return UpdatingBackend(updater, self._parameters["test_on_server"])

    def set_optimizer(self, rule: Callable[..., Any], **hyper: Any) -> None:
        """Let an update rule change the weights of all keys: `set_updater` with a rule.

        Parameters
        ----------
        rule : callable
            ``rule(grads, params, **hyper)`` that returns updates, such as those of
            :mod:`synkhronos.extensions.update_rules` and Lasagne.
        **hyper
            Hyperparameters.

        Examples
        --------
        >>> import numpy as np
        >>> from synkhronos.extensions import update_rules
        >>> from synkhronos.parameter_server import create
        >>> with create("local") as store:
        ...     store.set_optimizer(update_rules.sgd, learning_rate=0.5)
        ...     store.init(0, np.zeros(2))
        ...     _ = store.push(0, [np.ones(2), np.ones(2)])
        ...     store.pull(0).wait()
        array([-1., -1.])
        """
        self.set_updater(rule_updater(rule, **hyper))

    def set_hyper(self, **values: Any) -> None:
        """Change hyperparameters of the updater, such as ``learning_rate``, for later pushes.

        Rounds that are already closed are updated as before. With servers all workers call it, and
        the values of worker 0 count. You may also set a shared variable that `set_optimizer` was
        given, or an attribute of an updater: the next push tells the servers. In a store of one
        process an attribute counts at once, so wait for earlier pushes first.

        Parameters
        ----------
        **values
            For a rule its numbers, by their keywords; for another updater its attributes, or the
            outer variables that its function reads.

        Raises
        ------
        ValueError
            For names that the updater does not have.
        TypeError
            For values that are no numbers, and numbers that the rule can't change later.
        OutOfTurn
            Without an updater.

        Examples
        --------
        >>> import numpy as np
        >>> from synkhronos.extensions import update_rules
        >>> from synkhronos.parameter_server import create
        >>> with create("local") as store:
        ...     store.set_optimizer(update_rules.sgd, learning_rate=1.0)
        ...     store.init("w", np.zeros(2))
        ...     for rate in (1.0, 0.1):
        ...         store.set_hyper(learning_rate=rate)
        ...         _ = store.push("w", np.ones(2))
        ...     store.pull("w").wait()
        array([-1.1, -1.1])
        """
        self._refuse_closed()
        if self._updater is None:
            raise OutOfTurn("there is no updater with hyperparameters: call set_optimizer() first.")
        if self._before_push is None and self._engine is not None:
            self._engine.drain(list(self._keys.values()))
        self._updater.set_hyper(values)
        if self._before_push is not None:
            self._before_push()

    def _follow(self, updater):
        """Before each push, send changed hyperparameters: from worker 0, or to a local rule."""
        self._sent_hyper = updater.hyper_when_pickled()
        sends = updater.keeps_copies if self._link is None else self._link.rank == 0
        self._before_push = self._send_hyper if sends else None

    def _send_hyper(self):
        """Tell the backend of changed hyperparameters, for rounds that are not closed."""
        with self._lock:
            now, backend = self._updater.hyper_values(), self._backend
            changed = {
                n: v for n, v in now.items() if not is_same(v, self._sent_hyper.get(n, self))
            }
            if changed and backend is not None:
                backend.change_hyper(list(self._keys.values()), changed)
                self._sent_hyper = now

    def _known(self, name):
        try:
            return self._keys[name]
        except KeyError:
            self._refuse_closed()
            raise ValueError(f"there is no key {name!r}: call init({name!r}, value).") from None


def _as_one(key, futures):
    return Futures(futures) if isinstance(key, (list, tuple)) else futures[0]
