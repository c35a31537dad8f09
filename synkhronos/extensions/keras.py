"""Keras models whose fit, evaluate and predict run on all ranks.

    model.fit ──▶ minibatch ──▶ rows to ranks ──▶ loss ──▶ gradients ──▶ ops.all_reduce
              ◀── loss, metrics, progress bar ◀── the same step of the optimizer on every rank

Keras 2.3 does all its work in three functions of a model, which it makes when it first needs them.
:func:`parallelize` has them made by :func:`synkhronos.function`; all else stays as it is.

Keras is imported when a model comes, not with this module: it picks its backend then, writes its
settings to the user's home, and sets Theano's floatX.
"""

import importlib.util
import weakref

import theano
import theano.tensor as T

from synkhronos import collectives, functions, ops
from synkhronos import session as _session
from synkhronos._theano import is_array_variable, is_random_state, peek
from synkhronos.extensions import train

if importlib.util.find_spec("keras") is None:
    raise ImportError(
        "synkhronos.extensions.keras needs Keras 2.3, the last one with Theano: "
        "pip install 'synkhronos[demos]'"
    )

__all__ = ["broadcast", "parallelize", "restore"]

FUNCTIONS = ("train", "test", "predict")


def parallelize(model):
    """Have a Keras model train, evaluate and predict on all ranks.

    Its ``fit``, ``fit_generator``, ``train_on_batch``, ``evaluate``, ``predict`` and so on are
    called as before, and return what they would in one process, up to rounding: losses and
    gradients are averaged over all rows of a minibatch, metrics count them all. Weights and
    settings that the script changes, in a callback or by ``load_weights``, are sent to the ranks
    with the next call.

    Parameters
    ----------
    model : keras.models.Model
        Compiled, whose loss is a mean over rows. It may be compiled again; it stays parallel.

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
        For what ranks can't do apart as one process does; here, or when Keras needs the function:
        losses and activity regularizers that add up rows, recurrent layers that keep states from
        one minibatch to the next, inputs or targets that are not fed, metrics that do anything but
        add to their counts.

    Notes
    -----
    A batch normalisation normalises with the mean and variance of its rank's rows; its running
    averages, those that ``evaluate`` and ``predict`` use, are averaged over the ranks. Dropout
    draws numbers of its own on each rank.

    Examples
    --------
    ::

        synk.fork()
        model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
        parallelize(model)
        model.fit(x, y, batch_size=512, epochs=5)
    """
    _session.current("parallelize()")
    _check_model(model)
    if model.built:
        _check_parts(model)
    parallel = _Parallel(model)
    for name in FUNCTIONS:
        setattr(model, f"_make_{name}_function", getattr(parallel, f"make_{name}_function"))
    return model


def restore(model):
    """Have a model that was made parallel train in this process alone, as before.

    Parameters
    ----------
    model : keras.models.Model

    Returns
    -------
    keras.models.Model
        The same one. Its optimizer begins anew, as it does when a model is compiled.
    """
    _parallel_of(model, "restore()")
    for name in FUNCTIONS:
        delattr(model, f"_make_{name}_function")
        setattr(model, f"{name}_function", None)
    return model


def broadcast(model) -> None:
    """Give every rank the master's weights, optimizer state and settings of a parallel model.

    Calls of the model do it for variables that have a new value. Call it where they can't see one:
    after a function that is not parallel has changed weights in place (such as the training of
    another model that shares layers with this one), and, on devices, after ``set_weights`` or
    ``load_weights``.

    Parameters
    ----------
    model : keras.models.Model
        After :func:`parallelize`.
    """
    _parallel_of(model, "broadcast()").send_all()


class _Parallel:
    """What makes the functions of one model, and keeps its variables equal on all ranks."""

    def __init__(self, model):
        self._model = model
        self._seen = {}  # shared variable -> reference to the value that all ranks have

    # In place of the methods of the model, and of their names.

    def make_train_function(self):
        """Make the function that takes a step of training, unless it is there."""
        model = self._model
        if not self._must_make("train"):
            return
        model._check_trainable_weights_consistency()
        # Keras keeps the optimizer's state until the model is compiled again.
        state = [] if model.train_function is None else model.optimizer.get_weights()
        updates = [*_averaged(model.updates), *_step(model), *_added_up(model)]
        if state:
            model.optimizer.set_weights(state)
        self._seen.clear()
        model.train_function = self._function("train", [model.total_loss], updates)

    def make_test_function(self):
        """Make the function that evaluates, unless it is there."""
        if self._must_make("test"):
            model = self._model
            model.test_function = self._function("test", [model.total_loss], _added_up(model))

    def make_predict_function(self):
        """Make the function that predicts, unless it is there."""
        if self._must_make("predict"):
            outputs = [(output, "gather") for output in self._model.outputs]
            self._model.predict_function = self._function("predict", outputs, [])

    def _must_make(self, name):
        session = _session.current(
            f"The model {self._model.name!r} is parallel, which restore() ends; it"
        )
        made = getattr(self._model, f"{name}_function", None)
        if isinstance(made, _Function) and made.session is session:
            return False
        if name != "predict" and not hasattr(self._model, f"{name}_function"):
            raise RuntimeError("The model was not compiled: call model.compile() first.")
        _check_parts(self._model)
        return True

    def _function(self, name, outputs, updates):
        from keras import backend

        model, metrics = self._model, []
        inputs = list(model._feed_inputs)
        if name != "predict":
            inputs += [*model._feed_targets, *model._feed_sample_weights]
            metrics = [m._call_result for m in _metrics(model) if hasattr(m, "_call_result")]
        compiled = functions.function(
            inputs,
            outputs,
            bcast_inputs=[backend.learning_phase()] if model._uses_dynamic_learning_phase() else [],
            updates=updates,
            name=f"{name}_function of {model.name}",
            allow_input_downcast=True,
            on_unused_input="ignore",
            **getattr(model, "_function_kwargs", {}),
        )
        return _Function(self, compiled, metrics, _session.current("The model"))

    # Variables.

    def send_new(self, variables):
        """Broadcast those variables whose value is another array than all ranks are known to have.

        Whatever sets a variable gives it a new array, in Theano's host memory at least.
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
        """Have the next call send everything, as ranks may have come out of step."""
        self._seen.clear()

    def send_all(self):
        """Broadcast all variables of the functions that are made."""
        self.forget()
        for name in FUNCTIONS:
            made = getattr(self._model, f"{name}_function", None)
            if isinstance(made, _Function):
                self.send_new(made.variables)
                self.remember(made.variables)


class _Function:
    """A function as Keras calls it: a list of arrays in, and a list of the loss and metrics out."""

    def __init__(self, parallel, compiled, metrics, session):
        self.session = session
        # What ranks draw at random has to differ.
        self.variables = [
            v for v in compiled.get_shared() if is_array_variable(v) and not is_random_state(v)
        ]
        self._parallel = parallel
        self._compiled = compiled
        # As Keras does: of the states after the updates, which are the same on all ranks.
        self._metrics = theano.function([], metrics) if metrics else list

    def __call__(self, inputs):
        try:
            self._parallel.send_new(self.variables)
            outputs = self._compiled(*inputs)
            self._parallel.remember(self.variables)
        except BaseException:
            self._parallel.forget()
            raise
        return [*outputs, *self._metrics()]


# The updates of a step.


def _averaged(updates):
    """Return a model's updates, such as running averages, averaged; counts of steps are equal."""
    first = {}
    for variable, value in updates:
        first.setdefault(variable, value)  # Keras drops the later ones, of layers that are shared
    floats = [(v, value) for v, value in first.items() if v.dtype.startswith("float")]
    others = [(v, value) for v, value in first.items() if not v.dtype.startswith("float")]
    return [*train.average_updates(floats).items(), *others]


def _step(model):
    """Return the updates of the optimizer, with gradients that are averaged over the ranks."""
    params = model._collected_trainable_weights
    if not params:
        return model.optimizer.get_updates(loss=model.total_loss, params=[])
    return list(train.parallel_updates(model.total_loss, params, model.optimizer).items())


def _added_up(model):
    """Return the updates of the metrics, which count the rows of all ranks."""
    fed = {*model._feed_inputs, *model._feed_targets, *model._feed_sample_weights}
    updates = {}
    for metric in _metrics(model):
        # Of several updates of a state Keras takes the first.
        added = {state: _added(metric, state, value) for state, value in reversed(metric.updates)}
        # One that counts minibatches takes the mean of each, as the loss of an output does.
        op = "sum" if all(_depends_on(fed, number) for number in added.values()) else "avg"
        for state, number in added.items():
            if _depends_on(fed, number):
                number = ops.all_reduce(number, op)
            updates.setdefault(state, state + number)
    return list(updates.items())


def _added(metric, state, value):
    """Return what an update adds to a state."""
    operands = list(value.owner.inputs) if value.owner else []
    if state not in operands or value.owner.op != T.add:
        raise ValueError(
            f"The metric {metric.name!r} sets {state} to something else than itself plus a number, "
            "so the ranks' numbers can't be added up. Perhaps compute it in a callback, from "
            "model.predict()?"
        )
    operands.remove(state)
    return operands[0] if len(operands) == 1 else T.add(*operands)


def _depends_on(inputs, variable):
    """Whether a variable is computed from some inputs, and not just the size of one number."""
    pending, seen = [variable], set()
    while pending:
        variable = pending.pop()
        if variable in inputs:
            return True
        if variable.owner and variable not in seen:
            seen.add(variable)
            op, operands = variable.owner.op, variable.owner.inputs
            # Keras has a size as the sum of ones, filled into that shape.
            pending += operands[1:] if op == T.fill and operands[0].ndim == 0 else operands
    return False


def _metrics(model):
    return model._get_training_eval_metrics()


def _reference(value):
    """Return a function that returns the value as long as it exists; it keeps no memory."""
    try:
        return weakref.ref(value)
    except TypeError:  # a number of NumPy's, as some operations leave it for a 0-d array
        return lambda: value


# Refusals.


def _parallel_of(model, caller):
    parallel = getattr(getattr(model, "_make_train_function", None), "__self__", None)
    if not isinstance(parallel, _Parallel):
        raise ValueError(
            f"{caller} takes a model that parallelize() was given before, got {model}."
        )
    return parallel


def _check_model(model):
    """Raise for what is no compiled model of Keras on Theano."""
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
    """Raise for what ranks that see some rows each would compute otherwise."""
    name = f"The model {model.name!r}"
    for function in getattr(model, "loss_functions", []):
        if getattr(function, "reduction", None) == "sum":
            raise ValueError(
                f"{name} has a loss with reduction='sum', but the ranks' losses are averaged. Take "
                "the mean over rows (reduction='sum_over_batch_size')."
            )
    for layer in _layers(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(
                f"{name} has a layer {layer.name!r} with an activity_regularizer, which adds up "
                "all rows, but the ranks' losses are averaged. Perhaps call layer.add_loss() with "
                "a mean?"
            )
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
