"""IMDB's film reviews as numbers of words: of the Theano tutorial, or of Keras."""

from __future__ import annotations

import gzip
import zipfile

import numpy as np

from synkhronos._machine.archives import read_header
from synkhronos.rules import plain_pickles
from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.batches import Batches

PAGE = "https://ai.stanford.edu/~amaas/data/sentiment/"
NAMES = ["imdb.pkl", "imdb.pkl.gz", "imdb.npz", "imdb/imdb.pkl", "imdb/imdb.npz"]
HINT = f"{PAGE} (as numbers: imdb.pkl of the Theano tutorial, imdb.npz of Keras)"
UNKNOWN = 1  # the number of each word that is beyond `n_words`; 0 fills short sentences


class IMDB_data(Batches):
    """Sentences of numbers of words, in classes: 2 for IMDB's reviews, good or bad.

    A batch is a pair of arrays of shape (words, rows): the numbers, and a mask that is 1 for words
    and 0 where a shorter sentence is filled up. One row in twenty of those for training is for
    validation: the same rows on all ranks, in all runs.

    With ``SYNKHRONOS_DATA=digits`` a sentence is one of scikit-learn's digits: a word for each of
    its 8 rows and 8 columns, whose number says which pixels are dark.

    See `Batches` for the other attributes.

    Parameters
    ----------
    verbose : bool
    n_words : int
        Words with greater numbers are unknown ones.
    maxlen : int
        Longer sentences are left out for training and for validation.
    seed : int, optional

    Examples
    --------
    >>> import os
    >>> os.environ.update(SYNKHRONOS_DATA="made", SYNKHRONOS_MADE_BATCHES="3")
    >>> data = IMDB_data()
    >>> data.batch_data(4)
    >>> (words, mask), labels = data.batch("train", 0)
    >>> words.shape == mask.shape, words.shape[1], labels.shape
    (True, 4, (4,))
    >>> del os.environ["SYNKHRONOS_DATA"], os.environ["SYNKHRONOS_MADE_BATCHES"]
    """

    n_class = 2

    def __init__(self, verbose=False, n_words=10000, maxlen=100, seed=None):
        self.n_words, self.maxlen = int(n_words), int(maxlen)
        super().__init__(verbose, seed)

    def get_data(self) -> None:
        """Read, or make up, sentences and labels."""
        chosen = sources.source()
        if chosen == sources.MADE:
            self._make_up(16)
            return
        if chosen == sources.DIGITS:
            sentences, labels = _digits()
            self.n_class, part = 10, 5
        else:
            (sentences, labels), part = read_sentences(sources.find(NAMES, "IMDB", HINT)), 20
        kept = [number for number, words in enumerate(sentences) if 0 < len(words) < self.maxlen]
        if len(kept) < part:
            raise ValueError(
                f"Of {len(sentences)} sentences {len(kept)} have fewer than maxlen={self.maxlen} "
                "words: too few to train with. Take a greater maxlen."
            )
        self.rawdata = []
        for numbers in sources.split(len(kept), len(kept) // part):
            chosen_rows = [kept[number] for number in numbers]
            self.rawdata += [[sentences[row] for row in chosen_rows], labels[chosen_rows]]

    def _make_up(self, batch: int) -> None:
        """Make up sentences: words with even numbers are frequent in good ones."""
        self.rawdata = []
        for seed, batches in enumerate(sources.made_batches()):
            random = np.random.RandomState(seed)
            labels = random.randint(2, size=batches * batch)
            sentences = []
            for label in labels:
                words = 2 * random.randint(1, max(2, self.n_words // 2), random.randint(5, 12))
                words += random.uniform(size=len(words)) < (0.9 if label else 0.1)
                sentences.append(words.tolist())
            self.rawdata += [sentences, labels]

    def make_batches(self, file_batch_size: int) -> None:
        """Set the lists of batches: pairs of numbers and mask."""
        if sources.source() == sources.MADE:
            self._make_up(file_batch_size)
        super().make_batches(file_batch_size)
        for name in ("train_img", "val_img"):
            setattr(self, name, [self._filled(batch) for batch in getattr(self, name)])

    def _filled(self, sentences):
        words = np.zeros((max(map(len, sentences)), len(sentences)), "int64")
        mask = np.zeros(words.shape, "float32")
        for number, sentence in enumerate(sentences):
            words[: len(sentence), number] = sentence
            mask[: len(sentence), number] = 1
        words[words >= self.n_words] = UNKNOWN
        return words, mask


def _digits():
    """Return digits as sentences of 16 words: 8 pixels are the 8 bits of a word's number."""
    images, labels = sources.digits((1, 8, 8))
    bits = (images[:, 0] > 0.4).astype(int)
    weights = 2 ** np.arange(8)
    rows, columns = bits @ weights, bits.transpose(0, 2, 1) @ weights
    # Numbers 0 and 1 have meanings of their own. A column's words differ from a row's.
    sentences = np.concatenate([rows + 2, columns + 2 + 256], axis=1)
    return sentences.tolist(), labels


def read_sentences(file):
    """Return lists of numbers of words, and labels, of the part of a file for training."""
    try:
        if file.suffix == ".npz":
            with zipfile.ZipFile(file) as archive:
                sentences, labels = (_read_array(archive, name) for name in ("x_train", "y_train"))
        else:
            opened = gzip.open if file.suffix == ".gz" else open
            with opened(file, "rb") as stream:
                sentences, labels = plain_pickles.load(stream.read(), str(file))
        sentences = [[int(word) for word in words] for words in sentences]
        labels = np.asarray(labels, "int64")
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not IMDB as numbers of words ({error}). Get it from {HINT}."
        ) from error
    if len(sentences) != len(labels):
        raise ValueError(f"{file} has {len(sentences)} sentences, but {len(labels)} labels.")
    return sentences, labels


def _read_array(archive, name):
    """Return an array of an npz file; arrays of lists are read from pickles of plain data only."""
    with archive.open(f"{name}.npy") as stream:
        shape, dtype = read_header(stream)
        if dtype.hasobject:
            return plain_pickles.load(stream.read(), f"{archive.filename}: {name}", lists=True)
        return np.frombuffer(stream.read(), dtype).reshape(shape)
