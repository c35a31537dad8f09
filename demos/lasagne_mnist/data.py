"""MNIST, from a folder or a download; or else scikit-learn's digits, in the shape of MNIST."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import theano

from demos._shared import float_type

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SHA256SUMS = """\
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  t10k-labels-idx1-ubyte.gz
"""
CHECKSUMS = {name: checksum for checksum, name in map(str.split, SHA256SUMS.splitlines())}
LEAST = {"train": 6, "t10k": 1}  # images; a sixth of "train" is for validation
LARGEST = 1 << 30  # bytes of one file; MNIST's largest has 47 million
TIMEOUTS = (2, 10)  # seconds to connect to an address of the mirror, and between its answers


def load_dataset(data=None):
    """Return X_train, y_train, X_val, y_val, X_test, y_test.

    The images are of float32, (rows, 1, 28, 28), from 0 to less than 1; the labels of uint8. The
    validation rows are the last sixth of MNIST's 60000 for training.

    Parameters
    ----------
    data : str or Path, optional
        A folder with MNIST's four files, or ``"digits"`` for scikit-learn's digits. By default the
        current folder if all four are there, or else a download, which stays in the user's cache
        (or in the folder that the environment variable SYNKHRONOS_DATA names), or else the digits.

    Raises
    ------
    OSError, ValueError
        For files that are missing or damaged; the message says which.
    """
    theano.config.floatX = float_type()
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
    magic, length = bytes([0, 0, 8, ndim]), 4 + 4 * ndim  # 8 stands for unsigned bytes
    try:
        with gzip.open(file) as stream:
            header = stream.read(length)
            if header[:4] != magic or len(header) < length:
                raise ValueError(
                    f"{file} is no idx file of bytes in {ndim} dimensions: it begins with "
                    f"{header[:4].hex() or 'nothing'}, not with {magic.hex()}."
                )
            shape = struct.unpack(f">{ndim}I", header[4:])
            size = math.prod(shape)
            # Checked before reading, which allocates as much memory as the header asks for.
            if size > LARGEST:
                raise ValueError(
                    f"{file} says that its shape is {shape}, which is {size} bytes: more than "
                    f"the {LARGEST} that this demo reads."
                )
            content = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} is damaged ({error}). Get the file anew.") from error
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        raise ValueError(
            f"{file} is damaged: it holds {found} items, not the {size} of its shape {shape}. Get "
            "the file anew."
        )
    return np.frombuffer(content, "uint8").reshape(shape)


def _load_mnist(files, source):
    images, labels, test_images, test_labels = (
        read_idx(file, ndim=int(name.split("-idx")[1][0])) for name, file in files.items()
    )
    for name, image_array, label_array in (
        ("train", images, labels),
        ("t10k", test_images, test_labels),
    ):
        largest = label_array.max(initial=0)
        if image_array.shape != (len(label_array), 28, 28) or largest > 9:
            raise ValueError(
                f"{files[f'{name}-images-idx3-ubyte.gz']}, of shape {image_array.shape}, does not "
                f"go with {files[f'{name}-labels-idx1-ubyte.gz']}: expected images of 28 x 28 and "
                f"as many labels from 0 to 9, got {len(label_array)} up to {largest}."
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
    """Return scikit-learn's 1797 digits of 8 x 8 pixels, scaled to MNIST's 28 x 28."""
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = _pixels(zoom(digits.images, (1, 3.5, 3.5), order=1) * (255 / 16))
    labels = digits.target.astype("uint8")
    # The digits are in the order of their writers: every fifth digit samples all writers.
    turn = np.arange(len(labels)) % 5
    train, val, test = turn < 3, turn == 3, turn == 4
    print("Using scikit-learn's digits, resized to 28 x 28, IN PLACE OF MNIST")
    print(f"({train.sum()} rows to train, {val.sum()} to validate, {test.sum()} to test)")
    return images[train], labels[train], images[val], labels[val], images[test], labels[test]


def _pixels(images):
    return (images[:, np.newaxis] / 256).astype("float32")
