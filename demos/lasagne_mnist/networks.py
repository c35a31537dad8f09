"""The networks of Lasagne's own MNIST example; nothing here knows about ranks.

``build_network`` makes one of them, and ``build_graph`` adds the losses and the accuracy.
"""

import warnings
from collections import namedtuple

import lasagne
import numpy as np
import theano
import theano.tensor as T


def build_network(model, input_var=None):
    """Return the output layer of a network.

    Parameters
    ----------
    model : str
        ``"mlp"``, ``"cnn"`` or ``"custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"``, as in
        ``"custom_mlp:2,800,.2,.5"``: hidden layers, units in each, and the dropout probabilities of
        the pixels and of the hidden units.
    input_var : theano variable, optional
        The images, (rows, 1, 28, 28).
    """
    build = builder(model)
    print("Building model and compiling functions...")
    return build(input_var)


def builder(model):
    """Return the function that builds a model from an input variable, or raise ValueError."""
    name, _, numbers = model.partition(":")
    if name == "custom_mlp":
        try:
            depth, width, drop_in, drop_hid = numbers.split(",")
            sizes, drops = (int(depth), int(width)), (float(drop_in), float(drop_hid))
            if sizes[0] < 0 or sizes[1] < 1 or not all(0 <= drop < 1 for drop in drops):
                raise ValueError
        except ValueError:
            raise ValueError(
                "custom_mlp takes DEPTH,WIDTH,DROP_IN,DROP_HID: two whole numbers and two from 0 "
                f"to less than 1, as in custom_mlp:2,800,.2,.5; got {model!r}."
            ) from None
        return lambda input_var: build_mlp(input_var, *sizes, *drops)
    if model not in ("mlp", "cnn"):
        raise ValueError(
            f"there is no model {model!r}: it must be mlp, cnn or "
            "custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID."
        )
    return {"mlp": build_mlp, "cnn": build_cnn}[model]


def build_mlp(input_var=None, depth=2, width=800, drop_in=0.2, drop_hid=0.5):
    """Return hidden layers of rectifiers between the pixels and ten classes."""
    network = lasagne.layers.InputLayer((None, 1, 28, 28), input_var)
    network = lasagne.layers.dropout(network, drop_in)
    for _ in range(depth):
        network = lasagne.layers.DenseLayer(
            network, width, nonlinearity=lasagne.nonlinearities.rectify
        )
        network = lasagne.layers.dropout(network, drop_hid)
    return _classes(network)


def build_cnn(input_var=None):
    """Return two convolutions with pooling, and a hidden layer with dropout, before ten classes."""
    network = lasagne.layers.InputLayer((None, 1, 28, 28), input_var)
    for _ in range(2):
        network = lasagne.layers.Conv2DLayer(
            network, num_filters=32, filter_size=(5, 5), nonlinearity=lasagne.nonlinearities.rectify
        )
        network = lasagne.layers.MaxPool2DLayer(network, pool_size=(2, 2))
    network = lasagne.layers.DenseLayer(
        lasagne.layers.dropout(network, 0.5), 256, nonlinearity=lasagne.nonlinearities.rectify
    )
    return _classes(lasagne.layers.dropout(network, 0.5))


def _classes(network):
    return lasagne.layers.DenseLayer(network, 10, nonlinearity=lasagne.nonlinearities.softmax)


Graph = namedtuple("Graph", "x y loss params val_loss val_accuracy has_dropout")


def build_graph(model, seed):
    """Return the variables to compile functions from. Losses and accuracy are means over rows.

    `val_loss` and `val_accuracy` are computed without dropout.
    """
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("inputs"), T.ivector("targets")
    network = build_network(model, x)

    def mean_loss(predictions):
        return lasagne.objectives.categorical_crossentropy(predictions, y).mean()

    with warnings.catch_warnings():
        # Lasagne 0.1 calls Theano's conv2d with an old name of an argument.
        warnings.filterwarnings("ignore", "The `image_shape` keyword argument", UserWarning)
        predictions = lasagne.layers.get_output(network)
        val_predictions = lasagne.layers.get_output(network, deterministic=True)
    hits = T.eq(val_predictions.argmax(axis=1), y)
    return Graph(
        x=x,
        y=y,
        loss=mean_loss(predictions),
        params=lasagne.layers.get_all_params(network, trainable=True),
        val_loss=mean_loss(val_predictions),
        val_accuracy=hits.mean(dtype=theano.config.floatX),
        has_dropout=any(
            isinstance(layer, lasagne.layers.DropoutLayer) and layer.p > 0
            for layer in lasagne.layers.get_all_layers(network)
        ),
    )
