"""The data and the networks of the MNIST demos; nothing here knows about ranks.

``load_dataset`` finds MNIST in a folder or downloads it, or else makes do with scikit-learn's
digits. ``build_network`` makes one of the networks of Lasagne's own MNIST example, and
``build_graph`` adds what is to be computed with it.
"""

import gzip
import warnings
import zlib
from collections import namedtuple
from pathlib import Path

import lasagne
import numpy as np
import theano
import theano.tensor as T

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SHA256SUMS = """\
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  t10k-labels-idx1-ubyte.gz
"""
CHECKSUMS = {name: checksum for checksum, name in map(str.split, SHA256SUMS.splitlines())}
LEAST = {"train": 6, "t10k": 1}  # images; every sixth of "train" is kept to validate with
TIMEOUTS = (2, 10)  # seconds to connect to an address of the mirror, and until it says more


# Data.


def load_dataset(data=None):
    """Return X_train, y_train, X_val, y_val, X_test, y_test.

    The images are of float32, (rows, 1, 28, 28), from 0 to less than 1; the labels of uint8. The
    validation rows are the last sixth of MNIST's 60000 for training.

    Parameters
    ----------
    data : str or Path, optional
        A folder with MNIST's four files, or ``"digits"`` for scikit-learn's digits. By default the
        current folder if all four are there, or else a download, which is kept in the cache of the
        user (or in the folder that the environment variable SYNKHRONOS_DATA names), or else the
        digits.

    Raises
    ------
    OSError, ValueError
        For files that are missing or damaged; the message says which.
    """
    if data is not None and str(data) == "digits":
        return _load_digits()
    if data is None and all(Path(name).exists() for name in CHECKSUMS):
        data = "."
    if data is not None:
        return _load_mnist({name: Path(data, name) for name in CHECKSUMS}, f"folder {data}")
    try:
        files = _download()
    except (ImportError, OSError) as error:
        reason = str(error).split("\n")[0]
        print(f"MNIST could not be downloaded: {type(error).__name__}: {reason[:100]} ...")
        print("(With its four .gz files in some folder, --data FOLDER needs no download.)")
        return _load_digits()
    return _load_mnist(files, "the cache")


def read_idx(file, ndim):
    """Return the array of bytes in a gzipped idx file, the format of MNIST."""
    try:
        with gzip.open(file) as stream:
            content = stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} is damaged ({error}). Get the file anew.") from error
    magic, header = bytes([0, 0, 8, ndim]), 4 + 4 * ndim  # 8 stands for unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise ValueError(
            f"{file} is no idx file of bytes in {ndim} dimensions: it begins with "
            f"{content[:4].hex() or 'nothing'}, not with {magic.hex()}."
        )
    shape = np.frombuffer(content, ">u4", count=ndim, offset=4).astype("int64")
    if len(content) - header != shape.prod():
        raise ValueError(
            f"{file} is damaged: it holds {len(content) - header} items, not the {shape.prod()} of "
            f"its shape {tuple(map(int, shape))}. Get the file anew."
        )
    return np.frombuffer(content, "uint8", offset=header).reshape(shape)


def _load_mnist(files, source):
    images, labels, test_images, test_labels = (
        read_idx(file, ndim=int(name.split("-idx")[1][0])) for name, file in files.items()
    )
    for name, image_array, label_array in (
        ("train", images, labels),
        ("t10k", test_images, test_labels),
    ):
        if image_array.shape != (len(label_array), 28, 28) or (label_array > 9).any():
            raise ValueError(
                f"{files[f'{name}-images-idx3-ubyte.gz']}, of shape {image_array.shape}, does not "
                f"go with {files[f'{name}-labels-idx1-ubyte.gz']}: expected images of 28 x 28 and "
                f"as many labels from 0 to 9, got {len(label_array)} up to {label_array.max()}."
            )
        if len(label_array) < LEAST[name]:
            raise ValueError(
                f"{files[f'{name}-images-idx3-ubyte.gz']} has too few images: {len(label_array)}, "
                f"where at least {LEAST[name]} are needed."
            )
    print(f"MNIST from {source}: {len(labels)} rows to train and validate, {len(test_labels)} test")
    n_train = len(labels) - len(labels) // 6
    return (
        _pixels(images[:n_train]),
        labels[:n_train],
        _pixels(images[n_train:]),
        labels[n_train:],
        _pixels(test_images),
        test_labels,
    )


def _download():
    """Return the path of each file in the cache, after downloading those that are missing."""
    import pooch

    cache = pooch.create(
        path=pooch.os_cache("synkhronos"),
        base_url=MIRROR,
        registry={name: f"sha256:{checksum}" for name, checksum in CHECKSUMS.items()},
        env="SYNKHRONOS_DATA",
    )
    downloader = pooch.HTTPDownloader(timeout=TIMEOUTS, progressbar=True)
    return {name: cache.fetch(name, downloader=downloader) for name in CHECKSUMS}


def _load_digits():
    """Return scikit-learn's 1797 digits of 8 x 8 pixels as if they were MNIST's."""
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = _pixels(zoom(digits.images, (1, 3.5, 3.5), order=1) * (255 / 16))
    labels = digits.target.astype("uint8")
    # They are in the order of their writers: every fifth is of all of them.
    turn = np.arange(len(labels)) % 5
    train, val, test = turn < 3, turn == 3, turn == 4
    print("Using scikit-learn's digits, resized to 28 x 28, IN PLACE OF MNIST")
    print(f"({train.sum()} rows to train, {val.sum()} to validate, {test.sum()} to test)")
    return images[train], labels[train], images[val], labels[val], images[test], labels[test]


def _pixels(images):
    return (images[:, np.newaxis] / 256).astype("float32")


# Networks.


def build_network(model, input_var=None):
    """Return the output layer of a network.

    Parameters
    ----------
    model : str
        ``"mlp"``, ``"cnn"`` or ``"custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"``, as in
        ``"custom_mlp:2,800,.2,.5"``: hidden layers, units in each, and the probabilities with which
        the pixels and the hidden units are dropped.
    input_var : theano variable, optional
        The images, (rows, 1, 28, 28).
    """
    build = builder(model)
    print("Building model and compiling functions...")
    return build(input_var)


def builder(model):
    """Return the function of an input variable that builds a model, or raise ValueError."""
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
    """Return the variables to compile functions from, all of them means over the rows of x and y.

    `val_loss` and `val_accuracy` are those without dropout.
    """
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("inputs"), T.ivector("targets")
    network = build_network(model, x)

    def mean_loss(predictions):
        return lasagne.objectives.categorical_crossentropy(predictions, y).mean()

    with warnings.catch_warnings():
        # Lasagne 0.1 calls Theano's conv2d with an argument's former name.
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
