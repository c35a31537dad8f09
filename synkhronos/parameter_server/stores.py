"""Stores: the calls of mshadow-ps, with a thread for each device, and of KVStore's one caller.

    push, pull_req, pull_wait (array, key, device)  ─┐
                                                     ├──▶ Engine ──▶ Backend
    push, pull, pushpull (key, a list of arrays)    ─┘

The first argument of `push`, an array or a key, says which form it is. All arguments are checked
here, in the caller's thread.
"""

from __future__ import annotations

import difflib
import os
import threading
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos import _wording
from synkhronos._machine.log import log
from synkhronos.parameter_server.argument_checks import (
    by_key,
    callback_of,
    devices_of,
    dtype_of,
    name_of,
    priority_of,
    refuse_array,
)
from synkhronos.parameter_server.backends import (
    Backend,
    LocalBackend,
    RemoteBackend,
    UpdatingBackend,
)
from synkhronos.parameter_server.engine import Engine
from synkhronos.parameter_server.errors import (
    OutOfTurn,
    ParameterServerError,
    RoundTimeout,
    StoreClosed,
    WeightsDiffer,
)
from synkhronos.parameter_server.one_caller import OneCaller
from synkhronos.parameter_server.operands import operand_of
from synkhronos.parameter_server.parameters import Parameters
from synkhronos.parameter_server.reductions import refuse_dtype
from synkhronos.parameter_server.rounds import Future, Key, Slot, plane
from synkhronos.parameter_server.timeline import StoreProfile

KINDS = ("local", "dist_async", "dist_sync")
_MEANT = {"dist": "dist_async", "device": "local", "nccl": "local", "dist_device_sync": "dist_sync"}
_THRESHOLD = 1e-5  # of check_weight, as in mshadow-ps
_CLOSE_SECONDS = 10.0
_LONGEST = 1e6  # seconds; waits of the system take no longer ones
_KEYS = (int, str, list, tuple, np.integer)


def create(kind: str = "local", devices: Sequence[int] | None = None, **parameters: Any) -> Store:
    """Return a new store.

    Parameters
    ----------
    kind : {"local", "dist_async", "dist_sync"}
        ``"local"``: for the devices of one process, in its memory. ``"dist_async"`` and
        ``"dist_sync"``: the processes of ``synkhronos launch --servers S --workers W script.py``;
        servers apply each push at once, or one sum of all workers' pushes.
    devices : list of int, optional
        Calls :meth:`Store.init`.
    **parameters
        For :meth:`Store.set_param`.

    Returns
    -------
    Store

    Raises
    ------
    TypeError, ValueError
        For arguments that are refused.
    ParameterServerError
        For a kind that needs ``synkhronos launch``, in a script that was started otherwise.

    Examples
    --------
    Devices usually have a thread each; here one thread plays both:

    >>> import numpy as np
    >>> from synkhronos import parameter_server as ps
    >>> with ps.create("local", devices=[0, 1]) as store:
    ...     arrays = [np.float32([1, 1, 1]), np.float32([1, 2, 3])]
    ...     for device, array in enumerate(arrays):
    ...         store.init_key((3,), key=0, devid=device)
    ...     for device, array in enumerate(arrays):
    ...         _ = store.push(array, key=0, devid=device)
    ...         _ = store.pull_req(array, key=0, devid=device)
    ...     for device in (0, 1):
    ...         store.pull_wait(key=0, devid=device)
    >>> arrays
    [array([2., 3., 4.], dtype=float32), array([2., 3., 4.], dtype=float32)]
    """
    if not isinstance(kind, str):
        raise TypeError(f"kind must be a str, got {_wording.shown(kind)}.")
    if kind not in KINDS:
        close = [_MEANT.get(kind), *difflib.get_close_matches(kind, KINDS, 1)]
        meant = next(filter(None, close), None)
        hint = f'perhaps you meant "{meant}". ' if meant else ""
        raise ValueError(f"there is no kind {kind!r}: {hint}There are {', '.join(KINDS)}.")
    store = Store(kind)
    for name, value in parameters.items():
        store.set_param(name, value)
    if devices is not None:
        store.init(devices)
    return store


class Store(OneCaller):
    """Arrays by key, which devices push and pull; made by :func:`create`.

    Calls of different devices may come from different threads. A call for a device comes from one
    thread at a time. A store is a context manager: the end of the block closes it.

    Attributes
    ----------
    type : str
        The kind.
    """

    def __init__(self, kind: str) -> None:
        self.type = kind
        self._parameters = Parameters()
        self._devices: list[int] = []
        self._keys: dict[Any, Key] = {}
        self._slots: dict[tuple[Any, int], Slot] = {}
        self._engine: Any = None  # an Engine, once the devices are known
        self._backend: Backend | None = None
        self._updater: Any = None
        self._before_push: Callable[[], None] | None = None  # sends changed hyperparameters
        self._lock = threading.RLock()  # held while a key is made
        self._is_closed = False
        self._closing = threading.Lock()
        self._process = os.getpid()
        self._link = None
        if kind != "local":
            from synkhronos.parameter_server.remote.link import MoverLink

            self._link = MoverLink.connect(kind)

    def set_param(self, name: str, value: Any) -> None:
        """Set a parameter, before :meth:`init`.

        Parameters
        ----------
        name : str
            ``"push_op[KEY]"`` (sum, mean, prod, min, max or gather), ``"update_on_server"``,
            ``"test_on_server"``, ``"bigarray_bound"`` (elements), ``"reduce_thread"``,
            ``"push_thread"``, ``"pull_thread"``, ``"use_pin_memory"``. A ``push_op`` may come
            later, before its key is made.
        value : str or int

        Raises
        ------
        TypeError, ValueError
            For unknown names, and values that are refused.
        OutOfTurn
            After :meth:`init`.

        Examples
        --------
        >>> store = create("local")
        >>> store.set_param("push_op[0]", "gather")
        >>> store.set_param("push_op[0]", "median")
        Traceback (most recent call last):
        ValueError: push_op[0] must be one of sum, prod, min, max, mean, gather, got 'median'.
        """
        self._refuse_closed()
        Parameters().set(name, value)  # refuses what it does not know
        if self._engine is not None and not name.startswith("push_op["):
            raise OutOfTurn(f"set_param({name!r}, ...) must come before init().")
        found = [key for key in self._keys if f"push_op[{key}]" == name]
        if found:
            raise OutOfTurn(f"key {found[0]!r} has been made: set {name} before that.")
        self._parameters.set(name, value)

    def init(self, devices: Any = None, value: Any = None, *, key: Any = None) -> None:
        """Name the devices, ``init(devices)``, or make keys with values, ``init(key, value)``.

        Parameters
        ----------
        devices : list of int
            Distinct numbers from 0. On CPUs they are labels. Once, before any key. Without it the
            first key is made for device 0.
        key : int, str, or list of these
            In the second form.
        value : array, or list of arrays
            The initial weights, one for each key; copied. Those of worker 0 count.

        Raises
        ------
        TypeError, ValueError
            For arguments that are refused, and a key that is there already.
        OutOfTurn
            If devices were named before.

        Examples
        --------
        >>> import numpy as np
        >>> with create("local") as store:
        ...     store.init("w", np.zeros(2))
        ...     store.push("w", [np.ones(2), np.ones(2)]).wait()
        ...     store.pull("w").wait()
        array([2., 2.])
        """
        if value is None and key is None:
            self._refuse_closed()
            if self._engine is not None and not isinstance(devices, (str, int)):
                raise OutOfTurn(
                    f"init() was called before, with devices {self._devices}: make another store."
                )
            self._start(devices_of(devices))
            return
        if (devices is None) == (key is None) or value is None:
            raise TypeError("init() takes devices, or a key and its value.")
        key = devices if key is None else key
        names, values = by_key(key, value=value)
        for name in names:
            if name in self._keys:
                raise ValueError(f"key {name!r} is there already: push to it, or take another key.")
        arrays = [operand_of(each, f"value of key {n!r}").read() for n, each in zip(names, values)]
        self._refuse_closed()
        self._start_alone()
        ops = [self._refuse_key(n, dtype_of(each.dtype)) for n, each in zip(names, arrays)]
        for name, op, array in zip(names, ops, arrays):
            self._make_key(name, array.shape, array.dtype, op, array)

    def _start(self, devices):
        """Make the engine."""
        if self._link is not None:
            if self._parameters["test_on_server"]:
                raise ValueError('test_on_server is for "local" stores: servers keep no sums.')
            backend: Backend = RemoteBackend(self._link, self._updater)
        elif self._updater is not None:
            backend = self._updating(self._updater)
        else:
            backend = LocalBackend()
        self._devices = devices
        self._backend = backend
        backend.engine = Engine(self._parameters, len(devices), backend)
        self._engine = backend.engine

    def init_key(
        self,
        shape: Sequence[int] | int,
        key: int | str,
        devid: int,
        dtype: Any = np.float32,
        weight: Any = None,
    ) -> None:
        """Make a key for a device; every device calls it for every key, before it uses the key.

        The call does not wait for other devices, but it waits for an update that is running.

        Parameters
        ----------
        shape : tuple of int
            Of pushed arrays; they may have another shape with the same last axis and size.
        key : int or str
        devid : int
        dtype : dtype, optional
            Of pushed and pulled arrays.
        weight : array, optional
            The initial weight, copied. That of the first device to call on worker 0 counts.

        Raises
        ------
        TypeError, ValueError
            For arguments that are refused, and a shape or dtype other than that of another device.
        """
        lengths = _wording.shape_of((shape,) if isinstance(shape, (int, np.integer)) else shape)
        if any(length < 0 for length in lengths):
            raise ValueError(f"shape must have no negative lengths, got {lengths}.")
        dtype = dtype_of(dtype)
        name = name_of(key)
        if weight is not None:
            value = operand_of(weight, "weight")
            if tuple(value.shape) != lengths or value.dtype != dtype:
                raise ValueError(
                    f"weight of key {name!r} must have shape {lengths} and {dtype}, got "
                    f"{tuple(value.shape)} and {value.dtype}."
                )
            weight = value.read()
        self._refuse_closed()
        self._start_alone()
        position = self._position(devid)
        known = self._keys.get(name)
        if known is None:
            op = self._refuse_key(name, dtype)
            known = self._make_key(name, lengths, dtype, op, weight, is_shared=True)
        if plane(known.shape) != plane(lengths) or known.dtype != dtype:
            raise ValueError(
                f"key {name!r} has shape {known.shape} and {known.dtype}, but device {devid} gives "
                f"shape {lengths} and {dtype}."
            )
        self._slots[name, self._devices[position]] = known.slots[position]

    def _make_key(self, name, shape, dtype, op, value, is_shared=False):
        with self._lock:
            if name in self._keys:  # another device came first
                if is_shared:
                    return self._keys[name]
                raise ValueError(f"key {name!r} is there already.")
            key = Key(name, len(self._keys), tuple(shape), dtype, op, self._devices)
            self._keys[name] = key
            if not is_shared:
                self._slots.update({(name, slot.device): slot for slot in key.slots})
        try:
            self._backend.init_key(key, value)
        except BaseException as error:
            with self._lock:
                self._keys.pop(name, None)
                for device in self._devices:
                    self._slots.pop((name, device), None)
            failed = ParameterServerError(f"key {name!r} could not be made: {error}")
            failed.__cause__ = error
            self._engine.forget(key, failed)  # another device may hold it already
            raise
        return key

    def _start_alone(self):
        """Make the engine for device 0, if no devices were named."""
        with self._lock:
            if self._engine is None:
                self._start([0])

    def _refuse_key(self, name, dtype):
        """Raise if a key can't be made; return its reduction."""
        op = self._parameters.op_of(name)
        refuse_dtype(op, dtype, f"key {name!r}")
        if op == "gather" and not isinstance(self._backend, LocalBackend):
            raise ValueError(
                f"push_op[{name}] can't be gather with an updater or servers, which take one array."
            )
        wants = self._parameters["update_on_server"] or self._parameters["test_on_server"]
        if wants and self._updater is None:
            raise OutOfTurn(
                "update_on_server and test_on_server need an updater: call set_updater() or "
                "set_optimizer() before the first key, on all workers."
            )
        return op

    def push(
        self,
        array: Any = None,
        key: Any = None,
        devid: Any = None,
        priority: int = 0,
        *,
        value: Any = None,
    ) -> Future:
        """Push an array of one device, ``push(array, key, devid, priority=0)``.

        Returns at once. The array must not change until the returned future, or the pull of this
        round, is done. The second form, ``push(key, value, priority=0)``, pushes the arrays of all
        devices, which may change again when it returns.

        Parameters
        ----------
        array : numpy array, Theano shared variable or GpuArray
            Of the key's shape and dtype.
        key : int or str
            Or, in the second form, a list of keys.
        devid : int
        value : array, or list with an array for each device; for a list of keys a list of these
        priority : int, optional
            Rounds of a higher priority are reduced, and sent, first; others in order.

        Returns
        -------
        Future
            Done when the round is reduced.

        Raises
        ------
        TypeError, ValueError
            For unknown keys and devices, and arrays of another shape or dtype.
        OutOfTurn
            For a second push of one device in a round.
        """
        if type(array) is np.ndarray and value is None:
            return self._push(array, key, devid, priority)
        if array is not None and not isinstance(array, _KEYS):
            if value is not None:
                raise TypeError("push() of an array takes a key and a device, and no value.")
            return self._push(array, key, devid, priority)
        return self._push_by_key(array, key, devid, priority, value)

    def _push(self, array, key, devid, priority, now=False):
        """Push an array; with `now`, if it closes the round, reduce the round in this thread.

        For operations in Theano's graphs: while a graph runs, no other thread of the process can.
        """
        slot = self._slot(key, devid)
        known = slot.key
        if type(array) is not np.ndarray:
            array = operand_of(array, "array")
        if array.shape != known.shape or array.dtype != known.dtype:
            refuse_array("push", array, known, known.shape, devid)
        priority = priority_of(priority)
        if self._before_push is not None:
            self._before_push()
        return self._engine.push(slot, array, priority, now)

    def pull_req(
        self,
        array: Any,
        key: int | str,
        devid: int,
        priority: int = 0,
        callback: Callable[..., Any] | None = None,
    ) -> Future:
        """Ask for the result of the round in which this device has pushed last; return at once.

        A device that has not pushed since its last pull gets the newest result.

        Parameters
        ----------
        array : numpy array, Theano shared variable or GpuArray
            Is written when the result is there; often the pushed array itself. For "gather" of
            shape (devices * rows, columns).
        key : int or str
        devid : int
        priority : int, optional
            Pulls of a higher priority are served first; others in order.
        callback : callable, optional
            ``callback()`` or ``callback(array)``, called when the array is written: in a thread
            of the store, or in one that waits. Callbacks of one device run one at a time.

        Returns
        -------
        Future

        Raises
        ------
        TypeError, ValueError
            For unknown keys and devices, and arrays of another shape or dtype, or read-only.
        OutOfTurn
            If the last pull of this device and key is not done.
        """
        slot = self._slot(key, devid)
        known = slot.key
        given = array
        if type(array) is not np.ndarray or not array.flags.writeable:
            array = operand_of(array, "array", writes=True)
        if array.shape != known.result_shape or array.dtype != known.dtype:
            refuse_array("pull_req", array, known, known.result_shape, devid)
        call = None if callback is None else callback_of(callback, given)
        return self._engine.pull(known, slot, (array,), priority_of(priority), call)

    def pull_wait(self, key: int | str, devid: int, timeout: float | None = None) -> None:
        """Wait until this device's last pull of a key is done, its callback included.

        Returns at once if it has no pull. After 10 seconds the log (logger "synkhronos")
        says which devices have not pushed.

        Parameters
        ----------
        key : int or str
        devid : int
        timeout : float, optional
            Seconds.

        Raises
        ------
        TypeError, ValueError
            For unknown keys and devices.
        RoundTimeout
            After `timeout`: names the devices that have not pushed. The pull goes on.
        CallbackFailed
            If the callback, or an updater, has raised.
        StoreClosed
            If the store was closed meanwhile.
        """
        pull = self._slot(key, devid).pull
        if timeout is not None:
            timeout = _wording.seconds("timeout", timeout)
        if pull is not None:
            pull.wait(timeout)

    def set_weight(self, array: Any, key: int | str, devid: int) -> None:
        """Set the weight that the store updates in parallel with a device (``test_on_server=1``).

        Raises
        ------
        OutOfTurn
            Without ``test_on_server``.
        """
        weight, value = self._tested("set_weight", array, key, devid)
        np.copyto(weight, value)

    def check_weight(self, array: Any, key: int | str, devid: int) -> float:
        r"""Compare a device's weight with the one that the store has updated.

        Returns
        -------
        float
            :math:`\sum |a - w| / \sum |w|`.

        Raises
        ------
        WeightsDiffer
            If it is above 1e-5, or not a number.
        OutOfTurn
            Without ``test_on_server``.
        """
        weight, value = self._tested("check_weight", array, key, devid)
        exact = np.complex128 if weight.dtype.kind == "c" else np.float64
        difference = np.abs(np.asarray(value, exact) - weight)
        total, scale = float(difference.sum()), float(np.abs(weight).sum(dtype=np.float64))
        error = total / scale if scale else (0.0 if total == 0 else float("inf"))
        if not error <= _THRESHOLD:
            at = int(np.argmax(difference))
            raise WeightsDiffer(
                f"key {key!r}, device {devid}: the weight differs from the store's by {error:.3g} "
                f"of its size; most at element {at}: {value.flat[at]} and {weight.flat[at]}.",
                error,
            )
        return error

    def _tested(self, call, array, key, devid):
        self._refuse_closed()
        known = self._slot(key, devid).key
        if not self._parameters["test_on_server"]:
            raise OutOfTurn(
                'there is no weight to compare with: set_param("test_on_server", 1) before init().'
            )
        operand = operand_of(array, "array")
        refuse_array(call, operand, known, known.shape, devid)
        assert isinstance(self._backend, UpdatingBackend)
        if known.name not in self._backend.weights:
            raise OutOfTurn(f"key {known.name!r} is being made by another device.")
        return self._backend.weights[known.name], operand.read().reshape(known.shape)

    @property
    def devices(self) -> list[int]:
        """The devices of this process."""
        return list(self._devices)

    @property
    def keys(self) -> list[int | str]:
        """The keys, in the order in which they were made."""
        return list(self._keys)

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return 0 if self._link is None else self._link.rank

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return 1 if self._link is None else self._link.num_workers

    @property
    def num_servers(self) -> int:
        """The number of servers; 0 for ``"local"``."""
        return 0 if self._link is None else self._link.num_servers

    def op_of(self, key: int | str) -> str:
        """Return the reduction of a key: "sum" or what ``set_param("push_op[KEY]", ...)`` said."""
        return self._parameters.op_of(name_of(key))

    def has_key(self, key: int | str, devid: int) -> bool:
        """Return whether a device has made a key."""
        return (name_of(key), devid) in self._slots

    @property
    def has_updater(self) -> bool:
        """Whether this process has set an updater, so that pulls return weights."""
        return self._updater is not None and not self._parameters["test_on_server"]

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers have called this.

        Raises
        ------
        RoundTimeout
            After `timeout` seconds.
        WorkerLost, ServerLost
            If a process of the job has died.
        """
        self._refuse_closed()
        if self._link is not None:
            self._link.barrier(_wording.seconds("timeout", timeout))

    def profile(self) -> StoreProfile:
        """Record what the store does, and when, in the block of a ``with``; see `StoreProfile`."""
        return StoreProfile(self)

    def close(self, drain: bool = True, timeout: float = _CLOSE_SECONDS) -> None:
        """End the store and its threads; calls that wait raise `StoreClosed`.

        Parameters
        ----------
        drain : bool, optional
            Finish closed rounds and their pulls first; otherwise they fail. Rounds in which a
            device has not pushed always fail.
        timeout : float, optional
            Seconds for callbacks and updaters that still run.

        Raises
        ------
        RoundTimeout
            If a callback has not returned after `timeout`; all waiting calls have failed by then.
        """
        timeout = _wording.seconds("timeout", timeout)
        timeout = min(_CLOSE_SECONDS if timeout is None else timeout, _LONGEST)
        if self._process != os.getpid():  # the threads, and the job, are the parent's
            self._is_closed = True
            return
        if not self._closing.acquire(timeout=timeout):
            raise RoundTimeout(f"another thread has begun to close the store {timeout:g} s ago.")
        try:
            if self._is_closed:
                return
            self._is_closed = True
            self._end(bool(drain), timeout)
        finally:
            self._closing.release()

    def _end(self, drain, timeout):
        try:
            if self._engine is not None:
                self._engine.close(list(self._keys.values()), drain, timeout)
        finally:
            if self._backend is not None:
                self._backend.leave(timeout)
            elif self._link is not None:
                self._link.close(timeout)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close(drain=error is None)
        except Exception as late:
            if error is None:
                raise
            log.warning("while a store was closed: %s", late)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{_wording.count(len(self._keys), 'key')}"
        return f"<Store {self.type!r}, devices {self._devices}, {state}>"

    def _refuse_closed(self):
        if self._process != os.getpid():
            raise StoreClosed("the store belongs to the process that has made it: make another.")
        if self._is_closed:
            raise StoreClosed("the store is closed: make another one with create().")

    def _slot(self, key, devid):
        try:
            return self._slots[key, devid]
        except (KeyError, TypeError):
            self._refuse_closed()
            name = name_of(key)
            position = self._position(devid)
            if name in self._keys:
                raise ValueError(
                    f"device {self._devices[position]} has not called init_key for key {name!r}: "
                    "every device does, before it uses the key."
                ) from None
            raise ValueError(
                f"there is no key {name!r}: call init_key(shape, {name!r}, {devid})."
            ) from None

    def _position(self, devid):
        number = _wording.whole_number("devid", devid, 0)
        if number not in self._devices:
            named = self._devices or "none yet, call init(devices)"
            raise ValueError(f"devid {number} is none of this store's devices: {named}.")
        return self._devices.index(number)
