"""ImageNet, from folders of files with one batch each, as theano_alexnet preprocesses it.

$SYNKHRONOS_DATA/prepdata_1000cat_128b/
    train_hkl_128b/*.hkl      images of bytes, of shape (3, 256, 256, 128)
    val_hkl_128b/*.hkl
    labels/train_labels.npy   one number for each image, in the order of the sorted files
    labels/val_labels.npy
    misc/img_mean.npy         of shape (3, 256, 256)

The number 128 is that of the images in a file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import weakref

import numpy as np

from synkhronos._machine.archives import load_npy
from synkhronos.rules import array_files
from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.batches import Batches
from synkhronos.rules.loading import Loader
from synkhronos.rules.preprocessing import Preprocess, check_mode

PAGE = "https://www.image-net.org/download.php (then preprocessed by theano_alexnet)"
STD = (0.229, 0.224, 0.225)  # of each colour, of numbers from 0 to 1


class ImageNet_data(Batches):
    """Colour images in 1000 classes, a file for each batch; `batch` reads it when it is needed.

    Files are those of `np.save` (``.npy``) or of hickle (``.hkl``).

    See `Batches` for the attributes; `rawdata` has the standard deviation of each colour, too, and
    items of ``train_img`` and ``val_img`` are the paths of files.
    Made-up images are in temporary files, which end with the process.

    Parameters
    ----------
    verbose : bool
    file_batch_size : int
        Images in a file, which is in the names of the folders.
    size : int
        Height and width of made-up images.
    seed : int, optional

    Examples
    --------
    >>> import os
    >>> os.environ.update(SYNKHRONOS_DATA="made", SYNKHRONOS_MADE_BATCHES="3")
    >>> data = ImageNet_data(size=16)
    >>> data.batch_data(4)
    >>> images, labels = data.batch("train", 0)
    >>> images.shape, images.dtype, labels.shape
    ((3, 16, 16, 4), dtype('uint8'), (4,))
    >>> del os.environ["SYNKHRONOS_DATA"], os.environ["SYNKHRONOS_MADE_BATCHES"]
    """

    channels, n_class = 3, 1000

    def __init__(self, verbose=False, file_batch_size=128, size=256, seed=None):
        self.file_batch_size = int(file_batch_size)
        self.width = self.height = int(size)
        super().__init__(verbose, seed)

    def get_data(self, file_batch_size: int | None = None) -> None:
        """Find the files, of some images each, and read labels and mean image."""
        self.file_batch_size = file_batch_size or self.file_batch_size
        self._data.loader = None
        if sources.source() == sources.MADE:
            self._make_up()
            return
        if sources.source() == sources.DIGITS:
            raise ValueError(
                "SYNKHRONOS_DATA=digits is not for ImageNet_data: its images are too large, and of "
                "1000 classes. Take SYNKHRONOS_DATA=made."
            )
        b = self.file_batch_size
        name = f"prepdata_1000cat_{b}b"
        folder = sources.find([name, f"imagenet/{name}"], "Preprocessed ImageNet", PAGE)
        self.rawdata = []
        for part in ("train", "val"):
            there = sorted((folder / f"{part}_hkl_{b}b").glob("*"))
            files = [str(file) for file in there if file.suffix in (".hkl", ".npy")]
            if not files:
                raise FileNotFoundError(
                    f"{folder / f'{part}_hkl_{b}b'} has no files .hkl or .npy. Get them from {PAGE}"
                )
            self.rawdata += [files, _load(folder / "labels" / f"{part}_labels.npy", 1)]
        mean = _load(folder / "misc" / "img_mean.npy", 3, 4).astype("float32")
        self.rawdata += [mean.reshape(*mean.shape[:3], 1), _deviation()]
        self.height, self.width = mean.shape[1:3]

    def _make_up(self, writes: bool = False) -> None:
        """Make up images and labels; write the images into files, which model files may read."""
        if writes:
            self._data.folder = tempfile.mkdtemp(prefix="synkhronos-made-")
            self._data.remove = weakref.finalize(self, shutil.rmtree, self._data.folder, True)
        self.rawdata = []
        for part, batches in zip(("train", "val"), sources.made_batches()):
            names = [f"made-{part}-{number}{_made_end()}" for number in range(batches)]
            made = [self._made(2 * number + (part == "val")) for number in range(batches)]
            if writes:
                names = [os.path.join(self._data.folder, name) for name in names]
                for name, (images, _) in zip(names, made):
                    _write(name, images)
            self.rawdata += [names, np.concatenate([labels for _, labels in made])]
        self.rawdata += [np.full((3, self.height, self.width, 1), 127, "float32"), _deviation()]

    def _made(self, seed):
        # Fewer pixels are made up than are returned: each stands for a square of them.
        times = max(1, self.width // 32)
        small = (3, -(-self.height // times), -(-self.width // times))
        images, labels = sources.made_images(self.file_batch_size, small, self.n_class, seed)
        images = (255 * images).astype("uint8").transpose(1, 2, 3, 0)
        images = images.repeat(times, axis=1).repeat(times, axis=2)
        return np.ascontiguousarray(images[:, : self.height, : self.width]), labels

    def make_batches(self, file_batch_size: int) -> None:
        """Set the lists of batches: of names of files, and of the labels of their images."""
        if sources.source() == sources.MADE:
            self.file_batch_size = file_batch_size
            self._make_up(writes=True)
        for part, (files, labels) in zip(("train", "val"), (self.rawdata[:2], self.rawdata[2:4])):
            starts = range(0, len(files) * file_batch_size, file_batch_size)
            # The last file may have fewer images than the others.
            if len(labels) <= starts[-1]:
                raise ValueError(
                    f"{len(files)} files of {file_batch_size} images have {len(labels)} labels "
                    f"({part}_labels.npy). Is file_batch_size={file_batch_size} that of the files?"
                )
            setattr(self, f"{part}_img", list(files))
            rows = [labels[start : start + file_batch_size] for start in starts]
            setattr(self, f"{part}_labels", [np.asarray(each, "int64") for each in rows])

    def read(self, item):
        """Return the images of a file, of bytes, of shape (3, height, width, rows)."""
        images = array_files.read(item)
        if images.ndim != 4 or len(images) != 3:
            raise ValueError(
                f"{item} must have images of shape (3, height, width, rows), got {images.shape}."
            )
        return images

    def prepared(
        self,
        mode,
        number,
        crop,
        rand_crop=True,
        batch_crop_mirror=True,
        epoch=0,
        rank=0,
        **preprocessing,
    ):
        """Return images of a batch of this rank, of shape (3, crop, crop, rows), and labels.

        The mean image is subtracted, and the result divided by 255 and by the standard deviation of
        each colour; `preprocessing` has other keywords of `Preprocess`. For training, parts at
        random places are cut out, and mirrored or not: of all rows alike with `batch_crop_mirror`.
        Places depend on the seed, the epoch, the rank and `number`, so training that was stopped
        goes on with the same ones.

        With a loader, images come from there, and are valid until the next call.
        """
        labels = getattr(self, f"{check_mode(mode)}_labels_shard")[number]
        seed = self.seed, int(epoch), rank, self.stream
        if self._data.loader is not None:
            return self._loaded(mode, number, seed), labels
        images, _ = self.batch(mode, number)
        if images.shape[-1] != len(labels):
            raise ValueError(
                f"{getattr(self, f'{mode}_img_shard')[number]} has {images.shape[-1]} images, but "
                f"{len(labels)} labels: file_batch_size is not that of the files, or files are "
                "missing."
            )
        prepare = self._preprocess(crop, rand_crop, batch_crop_mirror, preprocessing)
        return prepare(images, mode, np.random.RandomState([*seed, number])), labels

    def _preprocess(self, crop, rand_crop, batch_crop_mirror, others):
        values = {"mean": self.rawdata[4], "scale": 255.0, "std": STD, **others}
        return Preprocess(
            cropsize=crop, rand_crop=rand_crop, flag_batch=batch_crop_mirror, **values
        )

    def spawn_load(self) -> None:
        """Note that a loader, another process, is wanted; `para_load_init` starts it."""
        self.para_load = True

    def para_load_init(
        self,
        shared_x=None,
        input_width=227,
        input_height=227,
        rand_crop=True,
        batch_crop_mirror=True,
        **preprocessing,
    ):
        """Start the loader, which reads and prepares batches while this rank computes.

        Parameters
        ----------
        shared_x : shared variable, optional
            Not used: `prepared` returns what the loader has read.
        input_width, input_height : int
            Pixels of the parts that are cut out.
        rand_crop, batch_crop_mirror : bool
        **preprocessing
            As for `prepared`.
        """
        self._must_be_batched()
        if self._data.loader is not None:
            return
        files = [*self.train_img, *self.val_img]
        crop = input_height, input_width
        self._data.loader = Loader(
            files,
            (3, *crop, self.file_batch_size),
            "float32",
            self._preprocess(crop, rand_crop, batch_crop_mirror, preprocessing),
        )
        self._data.expected = None
        self.para_load = True

    def _loaded(self, mode, number, seed):
        """Return the images of a batch from the loader; begin there if others are expected."""
        if self._data.expected != (mode, number, seed):
            offset = len(self.train_img) if mode == "val" else 0
            order = getattr(self, f"{mode}_shard") + offset
            self._data.loader.begin(order.tolist(), mode, seed, start=number)
        self._data.expected = mode, number + 1, seed
        return self._data.loader.next()

    def para_load_close(self) -> None:
        """End the loader, if there is one."""
        if self._data.loader is not None:
            self._data.loader.close()
        self._data.loader = None
        self.para_load = False


def _deviation():
    return np.array(STD, "float32").reshape(3, 1, 1, 1)


def _made_end():
    return ".hkl" if importlib.util.find_spec("h5py") else ".npy"


def _write(name, images):
    if name.endswith(".hkl"):
        array_files.write_hickle(name, images)
    else:
        np.save(name, images)


def _load(file, *dimensions):
    """Return an array of a .npy file; refuse objects, which could run code."""
    try:
        array = load_npy(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is missing. Get it from {PAGE}") from None
    if array.ndim not in dimensions:
        wanted = " or ".join(map(str, dimensions))
        raise ValueError(f"{file} must have {wanted} dimensions, got shape {array.shape}.")
    return array
