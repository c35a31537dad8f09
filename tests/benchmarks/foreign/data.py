"""Data of few rows, in the files that foreign programs read; digits are scikit-learn's, enlarged.

Each function takes the folder of a program: ``code`` with its files, ``data``, ``home``, ``tmp``.
"""

import gzip
import pickle

import numpy as np

WORDS = 200  # of the vocabulary of made sentences
_CIFAR_ROWS = 10_000  # of a file of CIFAR-10, from which Keras reads as many


def images(rows):
    """Return digits as bytes of (rows, 28, 28), each shifted somehow, and their labels."""
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    random = np.random.RandomState(0)
    chosen = random.randint(len(digits), size=rows)
    small = (digits[chosen].reshape(-1, 8, 8) * 255 / 16).astype("uint8")
    large = np.zeros((rows, 28, 28), "uint8")
    for image, digit, (i, j) in zip(large, small, random.randint(5, size=(rows, 2))):
        image[i : i + 24, j : j + 24] = np.kron(digit, np.ones((3, 3), "uint8"))
    return large, labels[chosen]


def sentences(rows, longest):
    """Return lists of words, and of which of two kinds each is; a kind prefers its own words."""
    random = np.random.RandomState(1)
    kinds = random.randint(2, size=rows)
    lengths = random.randint(longest // 3, longest, size=rows)
    words = [
        random.randint(4 + 60 * kind, WORDS - 60 * (1 - kind), size=length).tolist()
        for kind, length in zip(kinds, lengths)
    ]
    return words, kinds.tolist()


def mnist_pickle(folder):
    """Write mnist.pkl.gz, as the tutorials and theanets have it."""
    x, y = images(4200)
    x = (x.reshape(-1, 784) / 256).astype("float32")
    parts = [(x[rows], y[rows]) for rows in (slice(3000), slice(3000, 3600), slice(3600, None))]
    for place in folder / "data", folder / "tmp" / "theanets-datasets":
        place.mkdir(parents=True, exist_ok=True)
        with gzip.open(place / "mnist.pkl.gz", "wb", compresslevel=1) as file:
            pickle.dump(parts, file)


def mnist_files(folder):
    """Write the four files of MNIST beside the program; 10,000 rows to train are for validation."""
    x, y = images(12_600)
    for name, images_, labels in (
        ("train", x[:12_000], y[:12_000]),
        ("t10k", x[12_000:], y[12_000:]),
    ):
        for kind, array, n_bytes in (("images-idx3", images_, 16), ("labels-idx1", labels, 8)):
            content = bytes(n_bytes) + array.astype("uint8").tobytes()
            (folder / "code" / f"{name}-{kind}-ubyte").write_bytes(content)
            with gzip.open(folder / "code" / f"{name}-{kind}-ubyte.gz", "wb", 1) as file:
                file.write(content)


def cifar(folder, place="code", rows=640, key=str):
    """Write the six files of CIFAR-10: coloured digits."""
    place = folder / place / "cifar-10-batches-py"
    place.mkdir(parents=True)
    x, y = images(rows)
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    colours = np.random.RandomState(2).randint(128, 255, size=(rows, 3, 1, 1)) / 255
    x = (x[:, None] * colours).astype("uint8").reshape(rows, -1)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        with open(place / name, "wb") as file:
            pickle.dump({key("data"): x, key("labels"): y.tolist()}, file)


def cifar_of_densenet(folder):
    """Write CIFAR-10 where the DenseNet of Recipes looks for it."""
    cifar(folder, "code/data", rows=128)


def imdb_pickle(folder):
    """Write imdb.pkl of the tutorials."""
    with open(folder / "data" / "imdb.pkl", "wb") as file:
        for rows in 320, 100:
            pickle.dump(sentences(rows, 60), file)


def atis(folder):
    """Write a fold of ATIS: sentences whose words have labels."""
    random = np.random.RandomState(3)
    labels = "O", "B-place", "I-place", "B-time"

    def part(rows):
        words = [random.randint(40, size=random.randint(6, 14)) for _ in range(rows)]
        return words, list(words), [(each % 4).astype("int32") for each in words]

    names = {f"word{i}": i for i in range(40)}, {label: i for i, label in enumerate(labels)}
    dictionaries = {"words2idx": names[0], "labels2idx": names[1], "tables2idx": {}}
    with gzip.open(folder / "data" / "atis.fold3.pkl.gz", "wb") as file:
        pickle.dump((part(60), part(20), part(20), dictionaries), file)


def text(folder):
    """Write a text of 2,000 characters."""
    words = ["the", "network", "reads", "one", "character", "and", "tells", "the", "next"]
    random = np.random.RandomState(4)
    (folder / "code" / "text.txt").write_text(
        " The quick brown fox jumps " + " ".join(random.choice(words, 400))[:2000]
    )


def of_keras(folder):
    """Write Keras's configuration, and what its ``keras.datasets`` read."""
    place = folder / "home" / ".keras"
    (place / "datasets").mkdir(parents=True)
    settings = '{"floatx": "float64", "epsilon": 1e-07, "backend": "theano", '
    (place / "keras.json").write_text(settings + '"image_data_format": "channels_last"}')
    x, y = images(1280)
    _halves(place / "datasets" / "mnist.npz", x, y, 960)
    words, kinds = sentences(400, 120)
    words = np.array(words, dtype=object)
    _halves(place / "datasets" / "imdb.npz", words, kinds, 320)
    np.savez(place / "datasets" / "reuters.npz", x=words, y=kinds)


def _halves(file, x, y, n):
    np.savez(file, x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:])


def cifar_of_keras(folder):
    """Write what ``keras.datasets.cifar10`` reads, beside Keras's other data."""
    of_keras(folder)
    place = folder / "home" / ".keras" / "datasets"
    cifar(folder, "home/.keras/datasets", rows=_CIFAR_ROWS, key=str.encode)
    (place / "cifar-10-batches-py.tar.gz").touch()  # Keras looks whether it is there
