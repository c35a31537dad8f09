"""Parts of the ResNet demos with and without ranks: arguments, images, graph, loop, table."""

import argparse
import math
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import get_all_params, get_output
from tqdm import tqdm

from demos._arguments import above_zero, number_type, positive
from demos._shared import progress
from demos._tables import table
from demos.resnet.models import DEPTHS, build_resnet
from synkhronos.extensions import train as synkhronos_train

classes = number_type(int, lambda value: value >= 2, "a whole number of at least 2")
warm_up = number_type(float, lambda value: 0 <= value < math.inf, "a number of zero or more")


def add_arguments(parser):
    """Add arguments that describe the model, the images and the training."""
    add = parser.add_argument
    add("--depth", type=int, choices=sorted(DEPTHS), default=14, metavar="N",
        help=f"layers with weights, one of {', '.join(map(str, sorted(DEPTHS)))} (14)")  # fmt: skip
    add("--width", type=positive, default=16, metavar="N", help="channels of the first stage (16)")
    add("--size", type=positive, default=32, metavar="N", help="pixels, both ways (32)")
    add("--classes", type=classes, metavar="N", help="(10, or what is in the folder)")
    add("--images", type=Path, metavar="FOLDER", help="with a folder of images for each class")
    add("--examples", type=positive, metavar="N", help="to train with (1024, or all images)")
    add("--batch", type=positive, default=32, metavar="N", help="rows of each rank (32)")
    add("--epochs", type=positive, default=4, metavar="N", help="passes over the examples (4)")
    add("--rate", type=above_zero, default=0.05, metavar="R",
        help="learning rate, for the rows of one rank (0.05)")  # fmt: skip
    add("--warm-up", type=warm_up, default=1, metavar="EPOCHS",
        help="until the rate is that for all ranks (1)")  # fmt: skip
    add("--max-norm", type=above_zero, metavar="NORM", help="clip gradients to this global norm")
    add("--no-validation", dest="validate", action="store_false", help="don't after each epoch")


class NoImages(ValueError):
    """A folder has no images, or not the folders and files that it must have."""


@dataclass
class Images:
    """Pixels of shape (rows, 3, size, size), and labels: arrays, or Data."""

    x: object
    y: object
    x_valid: object
    y_valid: object
    n_classes: int

    def as_arrays(self):
        """Return the same images as NumPy arrays: views of the memory of Data."""
        parts = self.x, self.y, self.x_valid, self.y_valid
        return Images(*map(np.asarray, parts), self.n_classes)


def load(arguments, empty):
    """Return the images that the arguments name; ``empty(shape, dtype)`` makes their arrays."""
    if arguments.images is None:
        print("Loading data (synthetic)")
        n_classes = arguments.classes or 10
        n_train = arguments.examples or 1024
        counts = n_train, -(-n_train // 4)
        fill = _synthetic(n_classes, arguments.size, arguments.seed)
    else:
        print(f"Loading data ({arguments.images})")
        files, n_classes = find_images(arguments.images, arguments.classes)
        train_files, valid_files = (shuffled(part, arguments.seed) for part in files)
        files = [train_files[: arguments.examples], valid_files]
        counts = [len(part) for part in files]
        fill = _reader(files)
    arrays = []
    for part, n in enumerate(counts):
        x = empty((n, 3, arguments.size, arguments.size), theano.config.floatX)
        y = empty((n,), "int32")
        # Filled row by row, so that large data are never in memory twice.
        for row in progress(range(n), desc="images"):
            x[row], y[row] = fill(part, row, arguments.size)
        arrays += [x, y]
    return Images(*arrays, n_classes)


def _synthetic(n_classes, size, seed):
    """Return a function that makes images: the pattern of a class, shifted, dimmed, with noise."""
    random = np.random.RandomState(seed)
    blocks = random.normal(size=(n_classes, 3, 4, 4)).astype("float32")
    cell = -(-size // 4)
    patterns = np.kron(blocks, np.ones((cell, cell), "float32"))[:, :, :size, :size]

    def fill(part, row, size):
        label = random.randint(n_classes)
        shift = random.randint(-(size // 8), size // 8 + 1, 2)
        pattern = np.roll(patterns[label], shift, (1, 2))
        noise = random.standard_normal(pattern.shape)
        return random.uniform(0.2, 0.8) * pattern + noise, label

    return fill


def find_images(folder, n_classes=None):
    """Return lists of (file, label) to train and to validate with, and the number of classes.

    The classes are the subfolders in alphabetic order; every fifth file of each is for validation.
    """
    if not folder.is_dir():
        raise NoImages(f"{folder} is not a folder.")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and _is_seen(path))
    if len(classes) < 2:
        raise NoImages(
            f"{folder} must have a folder of images for each class, two or more; it has "
            f"{len(classes)}."
        )
    if n_classes not in (None, len(classes)):
        raise NoImages(f"{folder} has {len(classes)} classes, not {n_classes}.")
    train, valid = [], []
    for label, path in enumerate(classes):
        files = sorted(file for file in path.iterdir() if file.is_file() and _is_seen(file))
        if len(files) < 2:
            raise NoImages(
                f"{path} must have two images at least, one to train and one to validate with; it "
                f"has {len(files)}."
            )
        for number, file in enumerate(files):
            (valid if number % 5 == 1 else train).append((file, label))
    return (train, valid), len(classes)


def _is_seen(path):
    return not path.name.startswith(".")


def shuffled(items, seed):
    """Return a list of the items in random order."""
    return [items[i] for i in np.random.RandomState(seed).permutation(len(items))]


def _reader(files):
    def fill(part, row, size):
        file, label = files[part][row]
        return read_image(file, size), label

    return fill


# Common formats, without EPS: for that Pillow would run Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def read_image(file, size):
    """Return the middle of an image, scaled to size x size pixels of about -2 to 2."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # A small file can hold enough pixels to fill the memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                pixels = ImageOps.fit(image.convert("RGB"), (size, size))
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        # repr() quotes the name: it may hold control codes for the terminal.
        raise NoImages(f"{str(file)!r} can't be read as an image: {error}") from error
    return (np.asarray(pixels, "float32").transpose(2, 0, 1) - 127.5) / 64


class Graph:
    """The model, its loss and its accuracy.

    Nothing in it knows about ranks, except the batch normalization with ``synchronized=True``.
    """

    def __init__(self, arguments, n_classes, synchronized=False):
        lasagne.random.set_rng(np.random.RandomState(arguments.seed))
        self.x, self.y = T.tensor4("x"), T.ivector("y")
        network = build_resnet(
            self.x, arguments.depth, arguments.width, n_classes, arguments.size, synchronized
        )
        self.params = get_all_params(network, trainable=True)
        self.kept = get_all_params(network, trainable=False)
        self.statistics = OrderedDict()  # updates of the running statistics
        probabilities = get_output(network, statistics=self.statistics)
        self.loss = T.nnet.categorical_crossentropy(probabilities, self.y).mean()
        probabilities = get_output(network, deterministic=True)
        found = T.eq(probabilities.argmax(axis=1), self.y)
        self.accuracy = found.mean(dtype=theano.config.floatX)


def learning_rate(arguments, n_ranks, n_examples):
    """Return the rate for minibatches of all ranks: n_ranks times the rate, after a warm-up."""
    steps = round(arguments.warm_up * -(-n_examples // (n_ranks * arguments.batch)))
    if steps < 1 or n_ranks == 1:
        return arguments.rate * n_ranks
    return synkhronos_train.warm_up(arguments.rate, n_ranks, steps)


def train(log, arguments, batch, n_examples, step, validate, n_epochs=None):
    """Train with ``step(rows)``, which returns the loss of a minibatch: the same for all runs."""
    random = np.random.RandomState(arguments.seed)
    starts = range(0, n_examples, batch)
    n_epochs = n_epochs or arguments.epochs
    log.batch = min(batch, n_examples)
    with progress(total=n_epochs * len(starts), desc=log.label) as bar:
        for epoch in range(1, n_epochs + 1):
            began = time.perf_counter()
            order = random.permutation(n_examples)
            total = 0.0
            for start in starts:
                rows = order[start : start + batch]
                start_of_step = time.perf_counter()
                loss = step(rows)
                log.seconds.append(time.perf_counter() - start_of_step)
                total += float(loss) * len(rows)
                bar.update()
            log.losses.append(total / n_examples)
            lines = [f"Epoch:  {epoch}", f"Training Loss: {log.losses[-1]:.3f}"]
            if arguments.validate:
                log.accuracies.append(float(validate()))
                lines.append(f"Validation accuracy: {100 * log.accuracies[-1]:.1f} %")
            seconds = time.perf_counter() - began
            tqdm.write("\n".join([*lines, f"(epoch total time {seconds:.1f} s)"]))


def summary(logs, n_ranks=None):
    """Return a table of runs; if `n_ranks` is given, it compares the first run with the others.

    The efficiency is the speedup over the second run, which has one thread, divided by `n_ranks`.
    """
    titles = ["", "examples/s", "ms/minibatch", "training s", "last loss", "accuracy"]
    scaling = n_ranks is not None and len(logs) > 1
    titles += ["speedup", "efficiency"] if scaling else []
    rows = []
    for number, log in enumerate(logs):
        row = [log.label, f"{log.rows_per_second:.1f}", f"{log.milliseconds:.1f}"]
        row += [f"{sum(log.seconds):.1f}", f"{log.losses[-1]:.4f}"]
        row += [f"{100 * log.accuracies[-1]:.1f} %" if log.accuracies else ""]
        if scaling:
            speedup = log.milliseconds / logs[0].milliseconds
            row.append(f"{speedup:.2f}" if number > 0 else "")
            row.append(f"{100 * speedup / n_ranks:.0f} %" if number == 1 else "")
        rows.append(row)
    return table(titles, rows)


def new_parser(description):
    """Return a parser with the arguments of both demos."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return parser
