"""Training steps that exchange gradients with other workers while they compute.

    call n      wait for each gradient of call n-1 ──▶ rule ──▶ parameters ──▶ loss of call n
                push each gradient of call n
    finish()    wait for each gradient of the last call ──▶ rule ──▶ parameters

The update of a call is applied in the next one, each parameter just before its first use: the sum
over the workers has all the time until then. What the rule reads at the time of the call (learning
rates, inputs, random states) is kept for it. So the results are those of serial training.

Between two calls the parameters are one step behind. Only this step may use them then: their cells
hold a `_Behind`, which raises, and ``get_value`` and ``set_value`` call ``finish`` first.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
from collections import OrderedDict
from typing import Any

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.selection import select_rows
from synkhronos._calls.signature import check_pairs
from synkhronos._hints import Rows, Variable
from synkhronos._host import tensor as T
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import count, whole_number
from synkhronos.extensions import _dividing
from synkhronos.extensions._exchange import Exchange
from synkhronos.extensions._gradients import (
    check_loss,
    check_params,
    check_rule,
    check_variables,
    clip_by_global_norm,
    derive,
    rule_updates,
)
from synkhronos.extensions._precision import wide
from synkhronos.extensions._store_operations import (
    compile_pushing,
    leaves,
    shared_like,
    substituted,
)


class _Behind:
    """Takes the place of a shared variable's value while that is one step behind or unusable."""

    def __init__(self, variable, step):
        self._variable, self._step = variable, step

    def __repr__(self):
        return f"<the {self._text()}>"  # shown in Theano's errors

    def refuse(self, *_, **__):
        raise RuntimeError(f"The {self._text()}.") from self._step.failure

    __array__ = refuse
    _numba_type_ = property(refuse)  # which Numba asks of a value

    def __getattr__(self, name):  # operations in Python read an array's attributes
        raise AttributeError(f"The {self._text()}.")

    def _text(self):
        name, failure = self._variable, self._step.failure
        if failure is None:
            return (
                f"value of {name} is one step behind: call finish() of the training step before "
                "another function uses it"
            )
        first_line = str(failure).partition("\n")[0]
        return (
            f"value of {name} may be partly that of one step and partly that of the next, because "
            f"the training step raised {type(failure).__name__} in the middle of a call "
            f"({first_line}): set it, or start all workers again with their last saved parameters"
        )

    def _finished(self):
        """Return the value after the step has been finished, as ``get_value`` does."""
        self._step.finish()
        value = _host.peek(self._variable)
        if value is self:
            self.refuse()
        return value

    # Copies and pickles of a variable, and of a function that uses it, have its value.
    def __reduce_ex__(self, protocol):
        value = self._finished()
        reduce = copyreg.dispatch_table.get(type(value))
        return value.__reduce_ex__(protocol) if reduce is None else reduce(value)

    def __deepcopy__(self, memo=None):
        return copy.deepcopy(self._finished(), memo)

    __copy__ = __deepcopy__


class StoredStep:
    """A step of training with a parameter server; made by ``make_train_step(..., store=...)``.

    Attributes
    ----------
    keys : list
        The key of each parameter in the store, and of each average after them.
    is_pending : bool
        Whether the update of the last call is still to be applied.
    failure : Exception or None
        What a call raised in the middle of a step; no other step can be taken then.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> from synkhronos import parameter_server as ps
    >>> from synkhronos.extensions import train, update_rules
    >>> x, w = T.dvector("x"), theano.shared(0.0, "w")
    >>> with ps.create("local", devices=[0]) as store:
    ...     step = train.make_train_step(
    ...         [x], ((w - x) ** 2).mean(), [w], update_rules.sgd, 0.5, store=store
    ...     )
    ...     print(step([10, 20, 60]), step.is_pending)
    ...     step.finish()
    ...     print(w.get_value(), step)
    1366.6666666666667 True
    30.0 <StoredStep(x) with 1 key, finished>
    """

    def __init__(self, exchange, functions, inputs, with_rows, batch_rows, has_outputs):
        self.keys = exchange.keys
        self.is_pending = False
        self._exchange = exchange
        self._begin, self._go_on, self._end = functions
        self._inputs, self._with_rows, self._batch_rows = inputs, with_rows, batch_rows
        self._has_outputs = has_outputs
        self.failure = None
        self._is_busy = False
        self._held = {}  # variable -> its value, one step behind, while the cell has a stand-in
        self._is_on_server = self._end == exchange.take_weights
        self._stand_ins = {variable: _Behind(variable, self) for variable in exchange.deferred}
        used = [*exchange.deferred, *self._begin.get_shared()]
        self._used = list(OrderedDict.fromkeys(used))
        for variable in exchange.deferred:
            _host.watch(variable, lambda each=variable: self._note_set(each), self._note_read)

    def __repr__(self):
        state = "pending" if self.is_pending else "finished"
        if self.failure is not None:
            state = f"failed: {type(self.failure).__name__}"
        names = ", ".join(str(each) for each in self._inputs)
        return f"<StoredStep({names}) with {count(len(self.keys), 'key')}, {state}>"

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "A training step with a store can't be pickled or copied: it belongs to its store. "
            "Pickle or copy the parameters, and make a step again."
        )

    def __call__(self, *inputs: Any, batch: Rows | None = None) -> Any:
        """Take a step with this worker's rows; return their loss, or a list of it and the outputs.

        Parameters
        ----------
        *inputs : arrays
        batch : int, slice, or list or array of int or bool, optional
            The rows to take of the inputs; all without it.

        Raises
        ------
        TypeError, ValueError
            For inputs that don't fit; nothing was pushed then.
        RuntimeError
            After a call that raised in the middle of a step.
        ParameterServerError
            As the waits of the store.
        """
        arguments = self._arguments(inputs, batch)
        self._check_usable()
        with self._busy():
            for variable in self._used:  # another step may have to finish its update first
                _host.read(variable)
        if self._written():
            self.finish()
        outputs = self._run(self._go_on if self.is_pending else self._begin, arguments)
        self.is_pending = True
        self._hide_values()
        outputs = outputs[: len(outputs) - len(self._exchange.ports)]
        return outputs if self._has_outputs else outputs[0]

    def finish(self) -> None:
        """Wait for the results of the last call, and apply its update; do nothing without one.

        Reading a parameter by ``get_value`` does this by itself. A function that was compiled by
        ``theano.function``, such as a validation, raises unless `finish` was called before.

        Raises
        ------
        ParameterServerError
            As the waits of the store. The parameters then are those of the step before.
        """
        if not self.is_pending or self._is_busy:
            return
        self._check_usable()
        written = self._written()
        try:
            self._complete_exchanges()
            self._run(self._end, [])
            self.is_pending = False
        finally:
            if not self.is_pending:
                for variable, value in written.items():
                    _host.put(variable, value)

    def _complete_exchanges(self):
        """Wait for all arrays before the first parameter is changed."""
        with self._busy():
            try:
                for port in self._exchange.ports:
                    port.complete()
            except raised_here(Exception) as error:  # a Ctrl-C passes: the wait can be repeated
                self._show_values()
                self.failure, self.is_pending = error, False
                raise

    def _run(self, function, arguments):
        """Call a function with the values in their cells, and leave them there."""
        exchange = self._exchange
        with self._busy():
            self._show_values()
            for port in exchange.ports:
                port.is_used = False
            try:
                return function(*arguments)
            except BaseException as error:
                if not any(port.is_used for port in exchange.ports):
                    if self.is_pending:
                        self._hide_values()
                    raise
                # Theano raises another exception in its place, without the attributes of ours.
                failures = [port.failure for port in exchange.ports if port.failure is not None]
                self.failure = failures[0] if failures else error
                self.is_pending = False
                if function is not self._begin:  # `_begin` changes no parameter
                    self._hide_values()
                if failures:
                    raise failures[0] from None
                raise

    @contextlib.contextmanager
    def _busy(self):
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _check_usable(self):
        if self.failure is not None:
            raise RuntimeError(
                "This training step raised in the middle of a call, so other workers may have "
                "taken a step that this one has not: start all workers again, with their last "
                "saved parameters."
            ) from self.failure

    def _hide_values(self):
        for variable, stand_in in self._stand_ins.items():
            self._held[variable] = _host.peek(variable)
            _host.put(variable, stand_in)

    def _show_values(self):
        while self._held:
            _host.put(*self._held.popitem())

    def _written(self):
        """Return the values that compiled functions have put in the place of stand-ins.

        Such a function has not read the variable, so its value counts after the pending update.
        """
        if not self.is_pending:
            return {}
        values = {v: _host.peek(v) for v in self._stand_ins}
        written = {v: value for v, value in values.items() if value is not self._stand_ins[v]}
        if written and self._is_on_server:
            for variable in written:
                _host.put(variable, self._stand_ins[variable])
            self._refuse_set(", ".join(map(str, written)))
        return written

    def _refuse_set(self, names):
        raise RuntimeError(
            f"{names} has been set, but the store's updater has the weights: the next pull "
            "replaces the value. Set parameters before make_train_step()."
        )

    def _note_read(self, value):
        if self.failure is not None and isinstance(value, _Behind):
            value.refuse()
        self.finish()

    def _note_set(self, variable):
        if self._is_busy or self.failure is not None:
            return
        if self.is_pending:
            new = _host.peek(variable)
            _host.put(variable, self._stand_ins[variable])
        if self._is_on_server:
            self._refuse_set(variable)
        if self.is_pending:
            self.finish()  # with the value from before
            _host.put(variable, new)

    def _arguments(self, inputs, batch):
        if len(inputs) != len(self._inputs):
            raise TypeError(
                f"The step takes {count(len(self._inputs), 'input')}, got {len(inputs)}."
            )
        inputs = list(inputs)
        rows = {}
        for position in self._with_rows:
            name = self._inputs[position]
            value = _as_array(name, inputs[position])
            if value.ndim == 0:
                raise ValueError(f"Input {name} must have rows, got {inputs[position]!r}.")
            if batch is not None:
                selected = select_rows("batch", batch, len(value))
                if isinstance(selected, range):
                    selected = slice(selected.start, selected.stop, selected.step)
                value = value[selected]
            inputs[position], rows[str(name)] = value, len(value)
        if len({*rows.values()}) > 1:
            raise ValueError(f"The inputs must have equally many rows, got {rows}.")
        n_rows = next(iter(rows.values()))
        if n_rows == 0:
            raise ValueError(
                "A worker must have at least one row in each step: the mean over none is no number."
            )
        if self._batch_rows is not None and n_rows > self._batch_rows:
            raise ValueError(
                f"batch_rows={self._batch_rows} are the rows of all workers together, but this "
                f"worker alone has {n_rows}."
            )
        return inputs


def _as_array(name, given):
    """Return an input as an array of numbers, or raise."""
    try:
        value = np.asarray(given)
    except ValueError as error:  # rows of unequal lengths
        raise ValueError(f"Input {name} can't be made an array: {error}") from error
    if value.dtype.kind not in "biufc":
        shown = f"{given!r}" if value.ndim == 0 else f"an array of dtype {value.dtype}"
        raise TypeError(f"Input {name} must be an array of numbers with rows, got {shown:.200}.")
    return value


def make(
    inputs, loss, params, update_rule, args, kwargs, *, max_norm, outputs, averages, options,
    store, devid, keys, batch_rows,
):  # fmt: skip
    """Return a `StoredStep`; see ``make_train_step``."""
    params, inputs = check_params(params), check_variables("inputs", inputs)
    averages = check_pairs("averages", {} if averages is None else averages)
    options = dict(options or {})
    if "no_default_updates" in options:
        raise TypeError("options of a step with a store can't have no_default_updates.")
    for output in outputs or []:
        if not isinstance(output, Variable):
            raise TypeError(
                "outputs of a step with a store must be variables, without modes: a worker returns "
                f"those of its own rows. Got {output!r}."
            )
    with_rows = _with_rows(inputs, options.pop("bcast_inputs", None) or [])
    devid = _check_device(store, devid)
    _check_updater(store, update_rule, batch_rows, args, kwargs, max_norm, averages)
    if batch_rows is not None:
        batch_rows = whole_number("batch_rows", batch_rows, 1)
    targets = [*params, *check_params([v for v, _ in averages])] if averages else params
    exchange = Exchange(
        store, devid, targets, _names(keys, targets, len(params)), batch_rows is None
    )
    if store.num_workers * len(store.devices) > 1:
        _dividing.warn_unless_average([inputs[i] for i in with_rows], inputs, loss, options)
    rows = inputs[with_rows[0]].shape[0]
    share = rows if batch_rows is None else T.cast(rows, "float64") / batch_rows
    values = _shares(loss, params, averages, share)

    pulled = exchange.pulled()
    grads, of_averages = pulled[: len(params)], list(zip(targets, pulled))[len(params) :]
    if update_rule is None:
        updates = list(zip(params, grads))
    else:
        grads = grads if max_norm is None else clip_by_global_norm(grads, max_norm)
        updates = list(rule_updates(update_rule, grads, params, args, kwargs).items())
    updates = check_pairs("What the update rule returns and averages", [*updates, *of_averages])
    given = {variable for variable, _ in updates}
    updates += [  # such as the state of random numbers in the shape of a gradient
        (variable, value)
        for variable, value in _host.updates_by_default(leaves([v for _, v in updates]))
        if variable not in given and _host.is_computed_from(value, pulled)
    ]
    exchange.deferred = list(OrderedDict.fromkeys([*targets, *(v for v, _ in updates)]))
    new, kept = _applied(updates, exchange.deferred)

    returned = [loss, *(outputs or [])]
    functions = [
        _compile(exchange, inputs, returned, values, rows, kept, new if goes_on else None, options)
        for goes_on in (False, True)
    ]
    if update_rule is None:
        functions.append(exchange.take_weights)
    else:
        functions.append(compile_pushing([], [], [*new.items()], mode=options.get("mode")))
    exchange.open()
    return StoredStep(exchange, functions, inputs, with_rows, batch_rows, outputs is not None)


def _shares(loss, params, averages, share):
    """Return this worker's gradients and averages, times its `share` of the rows of all workers."""
    check_loss(loss)
    if "float16" in (loss.dtype, *(param.dtype for param in params)):
        # Gradients times the number of rows would overflow.
        factor = T.cast(share, "float32")
        values = [T.cast(grad, "float32") * factor for grad in derive(loss, params)]
    else:  # scaling the loss costs less than scaling the gradients
        values = derive(loss * T.cast(share, loss.dtype), params)
    return values + [T.cast(value, wide(v)) * T.cast(share, wide(v)) for v, value in averages]


def _applied(updates, deferred):
    """Return the updates, to be applied in the next call, and copies of what they read in this one.

    Only deferred variables are read when the updates are applied. The copies are: original -> copy.
    """
    values = [T.as_tensor_variable(v) if np.isscalar(v) else v for _, v in updates]
    left = [each for each in leaves(values) if each not in set(deferred)]
    kept = OrderedDict((each, shared_like(each)) for each in left)
    values = substituted(values, kept)
    new = [(v, _host.as_update(v, value)) for (v, _), value in zip(updates, values)]
    return OrderedDict(new), kept


def _compile(exchange, inputs, returned, values, rows, kept, new, options):
    """Return a function that pushes; with `new` it first applies these pending updates."""
    options = dict(options)
    givens = options.pop("givens", None) or {}
    givens = list(givens.items() if hasattr(givens, "items") else givens)
    changes = [(copy, each) for each, copy in kept.items()]
    read = leaves([*returned, *values, *kept, *(value for _, value in givens)])
    changes += [pair for pair in _host.updates_by_default(read) if pair[0] not in exchange.deferred]
    parts = [returned, values, [v for _, v in changes], [v for _, v in givens], [rows]]
    if new is not None:
        # In one substitution, so that parts keep the expressions that they share.
        together = iter(substituted([each for part in parts for each in part], new))
        parts = [[next(together) for _ in part] for part in parts]
    returned, values, changed, given, [rows] = parts
    tokens = exchange.pushes(values, rows, new is not None)
    updates = [*zip([v for v, _ in changes], changed), *(new or {}).items()]
    givens = list(zip([v for v, _ in givens], given))
    return compile_pushing(inputs, [*returned, *tokens], updates, givens=givens, **options)


def _with_rows(inputs, without):
    """Return the positions of the inputs that have rows."""
    found = [i for i, each in enumerate(inputs) if each.ndim and each not in without]
    if not found:
        raise ValueError(
            "inputs must have one with rows at least: a step with a store weights each worker's "
            "gradients by its rows."
        )
    return found


def _check_device(store, devid):
    if devid is None:
        if len(store.devices) > 1:
            raise TypeError(f"devid must name one of the store's devices, {store.devices}.")
        return store.devices[0] if store.devices else 0
    return whole_number("devid", devid, 0)


def _check_updater(store, update_rule, batch_rows, args, kwargs, max_norm, averages):
    """Refuse arguments that don't fit a store with an updater, or one without."""
    if store.type == "dist_async" and not store.has_updater:
        raise ValueError(
            'a store of kind "dist_async" has no sum over all workers: call set_optimizer() and '
            'give update_rule=None, or create a store of kind "dist_sync".'
        )
    if store.has_updater != (update_rule is None):
        where = "has" if store.has_updater else "has no"
        give = "give update_rule=None" if store.has_updater else "give an update_rule"
        raise TypeError(f"update_rule={update_rule!r}, but the store {where} updater: {give}.")
    if update_rule is not None:
        check_rule(update_rule)
        return
    given = [*args, *kwargs, *(["max_norm"] if max_norm is not None else [])]
    given += ["averages"] if averages else []
    if given:
        raise TypeError(f"the store's updater changes the parameters: it can't be given {given}.")
    if batch_rows is None:
        raise TypeError(
            "batch_rows must be given where the store has an updater: it is the number of rows "
            "over which an update averages, those of all workers for dist_sync and local, and "
            "those of this worker for dist_async."
        )


def _names(keys, targets, n_params):
    """Return a key for each target: those given for parameters, or their names."""
    found = [
        v.name or f"{'param' if i < n_params else 'average'}{i}" for i, v in enumerate(targets)
    ]
    if keys is not None:
        if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
            raise TypeError(f"keys must be a list with a key for each parameter, got {keys!r}.")
        keys = list(keys)
        if len(keys) != n_params:
            raise ValueError(
                f"keys must have one for each of the {count(n_params, 'parameter')}, got {keys}."
            )
        found[:n_params] = keys
    if len({*found}) < len(found):
        raise ValueError(f"keys must differ, got {found}: name the parameters, or give keys=[...].")
    return found
