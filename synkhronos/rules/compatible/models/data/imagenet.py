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

import numpy as np

from synkhronos.rules import array_files
from synkhronos.rules.compatible.models.data import sources
from synkhronos.rules.compatible.models.data.batches import Batches

PAGE = "https://www.image-net.org/download.php (then preprocessed by theano_alexnet)"
STD = np.array([0.229, 0.224, 0.225], "float32").reshape(3, 1, 1, 1)
RGB_MEAN = np.array([123.675, 116.28, 103.53], "float32").reshape(3, 1, 1, 1)


class ImageNet_data(Batches):
    """Colour images in 1000 classes, a file for each batch; `batch` reads it when it is needed.

    Files are those of `np.save` (``.npy``) or of hickle (``.hkl``).

    See `Batches` for the attributes; items of ``train_img`` and ``val_img`` are the paths of files,
    or for made-up data names.

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

    def get_data(self) -> None:
        """Find the files, and read labels and mean image."""
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
        self.rawdata.append(mean.reshape(*mean.shape[:3], 1))
        self.height, self.width = mean.shape[1:3]

    def _make_up(self) -> None:
        self.rawdata = []
        for part, batches in zip(("train", "val"), sources.made_batches()):
            names = [f"made {part} {number}" for number in range(batches)]
            labels = [self._made(name)[1] for name in names]
            self.rawdata += [names, np.concatenate(labels)]
        self.rawdata.append(np.full((3, self.height, self.width, 1), 127, "float32"))

    def _made(self, name):
        _, part, number = name.split()
        seed = 2 * int(number) + (part == "val")
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
            self._make_up()
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
        if item.startswith("made "):
            return self._made(item)[0]
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
        mean=None,
        scale=255 * STD,
    ):
        """Return images of a batch of this rank, of shape (3, crop, crop, rows), and labels.

        The mean image, or another mean, is subtracted, and the result divided by 255 and by the
        standard deviation of each colour, or by another scale. For training, parts at random places
        are cut out, and mirrored or not: of all rows alike with `batch_crop_mirror`. Places depend
        on the seed, the epoch, the rank and `number`, so training that was stopped goes on with the
        same ones.
        """
        images, labels = self.batch(mode, number)
        if images.shape[-1] != len(labels):
            raise ValueError(
                f"{getattr(self, f'{mode}_img_shard')[number]} has {images.shape[-1]} images, but "
                f"{len(labels)} labels: file_batch_size is not that of the files, or files are "
                "missing."
            )
        random = None
        if mode == "train" and rand_crop:
            random = np.random.RandomState([self.seed, int(epoch), rank, self.stream, number])
        mean = self.rawdata[4] if mean is None else mean
        return prepare(images, mean, crop, random, batch_crop_mirror, scale), labels


def prepare(images, mean, crop, random=None, batch_crop_mirror=True, scale=255 * STD):
    """Return bytes of shape (3, height, width, rows) as numbers around 0, cropped.

    Parameters
    ----------
    images : array of bytes
    mean : array
        To subtract; broadcast to the shape of the images.
    crop : int
        Height and width of the result.
    random : RandomState, optional
        For places at random, and mirror images; by default the middle is taken.
    batch_crop_mirror : bool
        Draw once for all rows, or for each row.
    scale : number or array
        To divide by.

    Examples
    --------
    >>> import numpy as np
    >>> prepare(np.full((3, 8, 8, 2), 127, "uint8"), np.float32(127), crop=6).max()
    0.0
    """
    room = images.shape[1] - crop, images.shape[2] - crop
    if min(room) < 0:
        raise ValueError(
            f"images of {images.shape[1]} x {images.shape[2]} pixels can't be cropped to {crop}."
        )
    rows = images.shape[-1]
    result = np.empty((len(images), crop, crop, rows), "float32")
    groups = [slice(None)] if random is None or batch_crop_mirror else range(rows)
    for group in groups:
        top, left, flip = room[0] // 2, room[1] // 2, False
        if random is not None:
            top, left = random.randint(room[0] + 1), random.randint(room[1] + 1)
            flip = random.randint(2)
        place = slice(top, top + crop), slice(left, left + crop)
        part = images[:, place[0], place[1], group].astype("float32")
        means = mean[:, place[0], place[1]] if np.ndim(mean) == 4 and mean.shape[1] > 1 else mean
        part -= means if part.ndim == 4 or np.ndim(mean) < 4 else means[..., 0]
        result[..., group] = part[:, :, ::-1] if flip else part
    result /= scale
    return result


def _load(file, *dimensions):
    """Return an array of a .npy file; refuse objects, which could run code."""
    try:
        array = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is missing. Get it from {PAGE}") from None
    if array.ndim not in dimensions:
        wanted = " or ".join(map(str, dimensions))
        raise ValueError(f"{file} must have {wanted} dimensions, got shape {array.shape}.")
    return array
