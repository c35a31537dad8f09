"""Checks that refuse Keras models that can't run on ranks."""


def check_model(model):
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


def check_parts(model):
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
