"""Keras models whose fit, evaluate and predict run on all ranks.

    model.fit ──▶ minibatch ──▶ rows to ranks ──▶ loss ──▶ gradients, added up over the ranks
              ◀── loss, metrics, progress bar ◀── the same step of the optimizer on every rank

Keras 2.3 does all its work in three functions of a model, which it makes when it first needs them.
:func:`parallelize` replaces them by functions of all ranks with the same results.

This module does not import Keras until a function is called: an import of Keras picks its backend,
writes its settings to the user's home, and sets Theano's floatX.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import weakref
from typing import TYPE_CHECKING, Any, ContextManager

import numpy as np

from synkhronos import collectives, resuming
from synkhronos._calls.proof import place_of
from synkhronos._host import (
    CannotDivide,
    is_array_variable,
    is_random_state,
    library,
    peek,
    pythons,
)
from synkhronos._session.current import current
from synkhronos._wording import advise, sentence, truth
from synkhronos.extensions import _dividing, train

if importlib.util.find_spec("keras") is None:
    raise ImportError(
        "synkhronos.extensions.keras needs Keras 2.3, the last one with Theano: "
        f"{pythons.install('demos')}"
    )

if TYPE_CHECKING:
    from keras.models import Model

__all__ = ["broadcast", "parallelize", "restore", "resume"]

FUNCTIONS = ("train", "test", "predict")


def parallelize(model: Model, sync_batch_norm: bool = True, serial_random: bool = False) -> Model:
    """Make a Keras model train, evaluate and predict on all ranks.

    Its ``fit``, ``fit_generator``, ``train_on_batch``, ``evaluate``, ``predict`` and so on are
    called as before, and return the results of one process, up to rounding: the loss, the metrics
    and the layers are computed from all rows of a minibatch. Weights and settings that the script
    changes, in a callback or by ``load_weights``, are sent to the ranks with the next call. If the
    loss or a metric can't be divided, a PortingWarning names it, and each rank computes whole
    minibatches.

    Parameters
    ----------
    model : keras.models.Model
        Compiled. It may be compiled again; it stays parallel.
    sync_batch_norm : bool
        Whether a batch normalization uses the mean and variance of the rows of all ranks, as in one
        process; each takes two rounds in the forward pass, and two for its gradient. If false, it
        uses those of its rank's rows, and its running averages are averaged over the ranks.
    serial_random : bool
        Whether dropout masks are those of one process: each rank draws the masks of all rows. If
        false, each rank draws masks of its own.

    Returns
    -------
    keras.models.Model
        The same one.

    Raises
    ------
    SessionError
        Before :func:`synkhronos.fork`.
    TypeError
        For anything but a model of Keras.
    RuntimeError
        For a model that is not compiled, and where Keras has another backend than Theano.
    ValueError
        Here, or when Keras needs the function: for recurrent layers that keep states from one
        minibatch to the next, inputs or targets that are not fed, and, with
        ``sync_batch_norm=False``, a loss that is no mean over rows.

    Examples
    --------
    >>> import keras, numpy as np
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> layer = keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(3,))
    >>> model = keras.models.Sequential([layer])
    >>> model.compile("sgd", "mse")
    >>> model = parallelize(model)
    >>> history = model.fit(np.eye(3), np.ones(3), batch_size=3, verbose=0)
    >>> history.history
    {'loss': [1.0]}
    >>> synk.close()
    """
    current("parallelize()")
    sync_batch_norm = truth("sync_batch_norm", sync_batch_norm)
    serial_random = truth("serial_random", serial_random)
    _check_model(model)
    if model.built:
        _check_parts(model)
    parallel = _Parallel(model, sync_batch_norm, serial_random)
    for name in FUNCTIONS:
        setattr(model, f"_make_{name}_function", getattr(parallel, f"make_{name}_function"))
    return model


def restore(model: Model) -> Model:
    """Undo :func:`parallelize`: the model runs in this process alone, as before.

    Parameters
    ----------
    model : keras.models.Model

    Returns
    -------
    keras.models.Model
        The same one. Its optimizer begins anew, as it does when a model is compiled.

    Raises
    ------
    ValueError
        For anything but a model that :func:`parallelize` was given.

    Examples
    --------
    >>> import keras, numpy as np
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    >>> model.compile("sgd", "mse")
    >>> _ = parallelize(model).predict(np.eye(3))
    >>> synk.close()
    >>> restore(model).predict(np.eye(3)).shape  # needs no workers any more
    (3, 1)
    """
    _parallel_of(model, "restore()")
    for name in FUNCTIONS:
        delattr(model, f"_make_{name}_function")
        setattr(model, f"{name}_function", None)
    return model


def broadcast(model: Model) -> None:
    """Send a parallel model's weights, optimizer state and settings from the master to all ranks.

    Calls of the model do so for variables that have a new value. Call this function where they
    can't see a new value: after a function that is not parallel has changed weights in place (such
    as the training of another model that shares layers with this one), and, on devices, after
    ``set_weights`` or ``load_weights``.

    Parameters
    ----------
    model : keras.models.Model
        After :func:`parallelize`.

    Raises
    ------
    ValueError
        For anything but a model that :func:`parallelize` was given.
    SessionError
        After :func:`synkhronos.close`.

    Examples
    --------
    >>> import keras, numpy as np
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    >>> model.compile("sgd", "mse")
    >>> _ = parallelize(model).predict(np.eye(3))
    >>> [weights, bias] = model.weights
    >>> weights.set_value(np.ones((3, 1), "float32"))
    >>> broadcast(model)
    >>> synk.get_value(1, weights).tolist()
    [[1.0], [1.0], [1.0]]
    >>> synk.close()
    """
    _parallel_of(model, "broadcast()").send_all()


def resume(
    model: Model, path: str | os.PathLike[str], **options: Any
) -> ContextManager[resuming.RunState]:
    """Save a parallel model after epochs of ``fit``, and go on after the last one that was saved.

    As :func:`synkhronos.resume`, with the weights, the state of the optimizer, and the random
    states of dropout and of ``numpy.random``. An epoch that is interrupted begins anew. With
    ``shuffle=True`` Keras then has the rows in another order than in a run that was not stopped.

    Parameters
    ----------
    model : keras.models.Model
        After :func:`parallelize`.
    path, **options
        As for :func:`synkhronos.resume`.

    Returns
    -------
    RunState
        For a ``with`` block. ``state.epoch`` is the first epoch that is left. Put
        ``state.callback`` last among the callbacks: it saves what the others have changed in the
        model, but not their own attributes.

    Raises
    ------
    ValueError
        For anything but a model that :func:`parallelize` was given.
    SessionError, TypeError, ValueError, OSError
        As :func:`synkhronos.resume`.

    Examples
    --------
    >>> import keras, numpy as np, os, tempfile
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    >>> model.compile("adam", "mse")
    >>> model = parallelize(model)
    >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
    >>> with resume(model, path) as state:
    ...     given = dict(initial_epoch=state.epoch, callbacks=[state.callback])
    ...     _ = model.fit(np.eye(3), np.ones(3), epochs=4, verbose=0, **given)
    >>> with resume(model, path) as state:
    ...     print(state.restored, state.epoch)
    True 4
    >>> synk.close()
    """
    parallel = _parallel_of(model, "resume()")
    parallel.make_train_function()
    numpy_random = np.random.mtrand._rand
    state = resuming.resume(path, [model.train_function.compiled, numpy_random], **options)
    return _resumed(parallel, state, model.train_function.variables)


@contextlib.contextmanager
def _resumed(parallel, state, variables):
    from keras.callbacks import LambdaCallback

    def end_epoch(epoch, logs):
        parallel.send_new(variables)
        parallel.remember(variables)
        state.epoch = epoch + 1
        state.tick()

    with state:
        parallel.forget()
        state.callback = LambdaCallback(on_epoch_end=end_epoch)
        yield state


class _Parallel:
    """Makes the functions of one model, and keeps its variables equal on all ranks."""

    def __init__(self, model, sync_batch_norm, serial_random):
        self._model = model
        self._serial_random = serial_random
        self._sync_batch_norm = sync_batch_norm
        self._seen = {}  # shared variable -> reference to the value that all ranks have

    def make_train_function(self):
        """Make the function that takes a step of training, unless it exists."""
        model = self._model
        if not self._must_make("train"):
            return
        model._check_trainable_weights_consistency()
        is_average = _dividing.is_average(
            self._inputs("train"),
            model.total_loss,
            self._options("train"),
            own_statistics=not self._sync_batch_norm,
        )
        if not is_average and not self._sync_batch_norm:
            raise ValueError(
                f"The model {model.name!r} has a loss that is no mean over rows: it can't be "
                "trained with sync_batch_norm=False."
            )
        step = self._make_with_loss("train", self._updates, is_average)
        self._seen.clear()
        model.train_function = step

    def _updates(self, is_average):
        """Return the updates of layers and optimizer, whose gradients are averaged if asked for."""
        model, optimizer = self._model, self._model.optimizer
        # Keras keeps the optimizer's state until the model is compiled again.
        state = [] if model.train_function is None else optimizer.get_weights()
        params, loss = model._collected_trainable_weights, model.total_loss
        if params and is_average:
            updates = train.parallel_updates(loss, params, optimizer).items()
        else:
            updates = optimizer.get_updates(loss=loss, params=params)
        if state:
            optimizer.set_weights(state)
        return [*_first_of_each(model.updates), *updates]

    def make_test_function(self):
        """Make the function that evaluates, unless it exists."""
        if self._must_make("test"):
            self._model.test_function = self._make_with_loss("test", lambda is_average: [], True)

    def make_predict_function(self):
        """Make the function that predicts, unless it exists."""
        if self._must_make("predict"):
            self._model.predict_function = self._make("predict", list(self._model.outputs), [])

    def _inputs(self, name):
        model = self._model
        if name == "predict":
            return list(model._feed_inputs)
        return [*model._feed_inputs, *model._feed_targets, *model._feed_sample_weights]

    def _options(self, name):
        from keras import backend

        model = self._model
        return {
            "bcast_inputs": (
                [backend.learning_phase()] if model._uses_dynamic_learning_phase() else []
            ),
            "name": f"{name}_function of {model.name}",
            "allow_input_downcast": True,
            "on_unused_input": "ignore",
            "serial_random": self._serial_random,
            **getattr(model, "_function_kwargs", {}),
        }

    def _must_make(self, name):
        session = current(f"The model {self._model.name!r} is parallel, which restore() ends; it")
        made = getattr(self._model, f"{name}_function", None)
        if isinstance(made, _KerasFunction) and made.session is session:
            return False
        if name != "predict" and not hasattr(self._model, f"{name}_function"):
            raise RuntimeError("The model was not compiled: call model.compile() first.")
        _check_parts(self._model)
        return True

    def _make_with_loss(self, name, updates, is_average):
        """Return the function that returns the loss; undivided, with a warning, if need be."""
        loss = [self._model.total_loss]
        try:
            return self._make(name, loss, updates(is_average))
        except CannotDivide as error:
            self._warn(name, error)
            return self._make(name, loss, updates(False), _dividing.undivided)

    def _make(self, name, outputs, updates, make=_dividing.function_as_serial):
        """Return a function of all ranks with serial results, but for batch normalizations.

        Raises `CannotDivide` if there is no rule for a part of it.
        """
        options, metrics = self._options(name), []
        if name != "predict":
            metrics = self._model._get_training_eval_metrics()
        if name == "train" and not self._sync_batch_norm:
            make, options = _dividing.function_of_each_rank, {**options, "check": 0}
        updates = [*updates, *_of_metrics(metrics)]
        compiled = make(self._inputs(name), outputs, updates, options)
        numbers = [m._call_result for m in metrics if hasattr(m, "_call_result")]
        return _KerasFunction(self, compiled, numbers, current("The model"))

    def _warn(self, name, error):
        """Warn that there is no rule for a model's loss, or for a metric."""
        what = next((f"metric {each.name!r}" for each in self._metrics_without_rule(name)), "loss")
        advise(
            f"The model {self._model.name!r} can't be divided over the ranks: its {what} "
            f"{sentence(error)[:-1]}{place_of(error.variable)}, for which there is no "
            "rule. So each rank computes whole minibatches: the results are right, but take as "
            "long as in one process. Perhaps compute it in a callback, from model.predict()?"
        )

    def _metrics_without_rule(self, name):
        """Yield the metrics for which there is no rule."""
        for metric in self._model._get_training_eval_metrics():
            try:
                updates = _of_metrics([metric])
                _dividing.divided(self._inputs(name), [], updates, self._options(name))
            except CannotDivide:
                yield metric

    def send_new(self, variables):
        """Broadcast the variables that have another array than the one that all ranks have.

        Setting a variable gives it a new array, in Theano's host memory at least.
        """
        seen = self._seen
        new = [v for v in variables if v not in seen or seen[v]() is not peek(v)]
        if new:
            collectives.broadcast(new)

    def remember(self, variables):
        """Remember that all ranks have the values that these variables have now."""
        for variable in variables:
            self._seen[variable] = _reference(peek(variable))

    def forget(self):
        """Let the next call send all variables, as ranks may have different values."""
        self._seen.clear()

    def send_all(self):
        """Broadcast all variables of the functions that exist."""
        self.forget()
        for name in FUNCTIONS:
            made = getattr(self._model, f"{name}_function", None)
            if isinstance(made, _KerasFunction):
                self.send_new(made.variables)
                self.remember(made.variables)


class _KerasFunction:
    """A function as Keras calls it: it takes a list of arrays, and returns loss and metrics."""

    def __init__(self, parallel, compiled, metrics, session):
        self.session = session
        # Random states stay as they are: each rank must draw other numbers.
        self.variables = [
            v for v in compiled.get_shared() if is_array_variable(v) and not is_random_state(v)
        ]
        self._parallel = parallel
        self.compiled = compiled
        # Metrics come from the states after the updates, as in Keras: equal on all ranks.
        self._metrics = library.function([], metrics) if metrics else list

    def __call__(self, inputs):
        try:
            self._parallel.send_new(self.variables)
            outputs = self.compiled(*inputs)
            self._parallel.remember(self.variables)
        except BaseException:
            self._parallel.forget()
            raise
        return [*outputs, *self._metrics()]


def _reference(value):
    """Return a function that returns the value as long as it exists, and keeps no array alive."""
    try:
        return weakref.ref(value)
    except TypeError:  # a NumPy scalar, which some operations return instead of a 0-d array
        return lambda: value


def _parallel_of(model, caller):
    parallel = getattr(getattr(model, "_make_train_function", None), "__self__", None)
    if not isinstance(parallel, _Parallel):
        raise ValueError(
            f"{caller} takes a model that parallelize() was given before, got {model}."
        )
    return parallel


def _of_metrics(metrics):
    return _first_of_each(update for metric in metrics for update in metric.updates)


def _first_of_each(updates):
    """Return pairs (variable, value), the first for each variable, as Keras does.

    A layer that several inputs share has several updates of a variable, and so may a metric.
    """
    first: dict = {}
    for variable, value in updates:
        first.setdefault(variable, value)
    return list(first.items())


def _check_model(model):
    """Raise for anything but a compiled model of Keras on Theano."""
    try:
        from keras import backend
        from keras.models import Model
    except ImportError as error:
        raise ImportError(
            f"Keras can't be imported ({error}). Its default backend is TensorFlow: set the "
            "environment variable KERAS_BACKEND=theano before Keras is imported."
        ) from error
    if backend.backend() != "theano":
        raise RuntimeError(
            f"Keras has the backend {backend.backend()!r}, and parallelize() needs Theano: set the "
            "environment variable KERAS_BACKEND=theano before Keras is imported."
        )
    if not isinstance(model, Model):
        raise TypeError(f"parallelize() takes a model of Keras, got {model!r}.")
    if getattr(model, "optimizer", None) is None:
        raise RuntimeError(
            f"The model {model.name!r} is not compiled: call model.compile() before parallelize()."
        )


def _check_parts(model):
    """Refuse models whose result changes when each rank sees only part of the rows."""
    name = f"The model {model.name!r}"
    for layer in _layers(model):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"{name} has a layer {layer.name!r} with stateful=True: it keeps states of "
                "a minibatch's rows for the next one, which the ranks have parts of."
            )
    n_targets = sum(target is not None for target in getattr(model, "targets", []))
    fed = [("inputs", model.inputs, model._feed_inputs)]
    if n_targets:
        fed.append(("targets", range(n_targets), model._feed_targets))
    for what, every, given in fed:
        if len(given) < len(every) or not given:
            raise ValueError(
                f"{name} has {what} that are tensors of their own. Only arrays that are passed to "
                "fit() and the like can be scattered over the ranks."
            )


def _layers(model):
    for layer in model.layers:
        yield layer
        yield from _layers(layer) if hasattr(layer, "layers") else ()
