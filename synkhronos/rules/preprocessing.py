"""From a file's images to a batch: mean and deviation, crops and mirror images.

Images are (channels, rows, columns, batch), "c01b", as preprocessed ImageNet files have them, or
"bc01". All random numbers come from the caller's random state, so a batch can be made again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from synkhronos._wording import shown

ORDERS = ("c01b", "bc01")
MODES = ("train", "val")


def check_mode(mode: str) -> str:
    """Return a mode, "train" or "val"; raise ValueError for another one."""
    if mode not in MODES:
        raise ValueError(f"mode must be 'train' or 'val', got {mode!r}.")
    return mode


@dataclass(frozen=True)
class Preprocess:
    """Makes float32 batches of images: ``(x - mean) / scale / std``, cropped and mirrored.

    Parameters
    ----------
    mean : array, optional
        A mean image, a value for each channel, or a number.
    scale : float, optional
        255 for bytes.
    std : list of float, optional
        The standard deviation of each channel.
    cropsize : int, optional
        Rows and columns of the result; by default nothing is cropped.
    rand_crop : bool, optional
        Whether training crops at random and mirrors by chance.
    flag_batch : bool, optional
        Whether all images of a batch are cropped and mirrored alike.
    order : str, optional
        "c01b" or "bc01", of files and of batches.

    Examples
    --------
    >>> prepare = Preprocess(mean=100.0, scale=50.0, cropsize=2, order="bc01")
    >>> images = np.full((1, 1, 4, 4), 200, "uint8")
    >>> prepare(images, "val", None).tolist()
    [[[[2.0, 2.0], [2.0, 2.0]]]]
    """

    mean: Any = None
    scale: float = 1.0
    std: Any = None
    cropsize: Any = None
    rand_crop: bool = True
    flag_batch: bool = True
    order: str = "c01b"

    def __call__(self, images: np.ndarray, mode: str, random: Any) -> np.ndarray:
        """Return the batch of a file's images; `random` is a RandomState, unused in mode "val"."""
        x = np.asarray(images, "float32")
        if self.mean is not None:
            x = x - self._of_images(np.asarray(self.mean, "float32"))
        x = x / np.float32(self.scale)
        if self.std is not None:
            x = x / self._of_images(np.asarray(self.std, "float32"))
        if self.cropsize is None:
            return x
        return crop_and_mirror(
            x, mode, self.rand_crop, self.flag_batch, self.cropsize, random, self.order
        )

    def _of_images(self, values):
        """Return a mean image, or values of channels, in a shape that broadcasts to images."""
        if values.ndim == 1:
            values = values[:, None, None]
        if values.ndim == 3 and self.order == "c01b":
            values = values[..., None]
        return values

    def as_plain(self) -> dict[str, Any]:
        """Return the parameters as lists and numbers, for another process."""
        plain = asdict(self)
        for name in ("mean", "std"):
            if plain[name] is not None:
                plain[name] = np.asarray(plain[name], "float64").tolist()
        return plain


def crop_and_mirror(
    data: np.ndarray,
    mode: str,
    rand_crop: bool = True,
    flag_batch: bool = True,
    cropsize: Any = 227,
    random: Any = None,
    order: str = "c01b",
) -> np.ndarray:
    """Return a part of each image: at random and mirrored by chance in training, else the center.

    Parameters
    ----------
    data : array
        Images, c01b or bc01.
    mode : str
        "train" or "val".
    rand_crop : bool, optional
        Whether training is random; otherwise it has the center, too.
    flag_batch : bool, optional
        Whether all images of the batch are cropped and mirrored alike.
    cropsize : int or pair of int, optional
        Rows and columns of the result.
    random : RandomState, optional
        NumPy's global one by default, which is never seeded here.
    order : str, optional
        "c01b" or "bc01".

    Returns
    -------
    array
        Of the dtype and order of `data`.

    Raises
    ------
    ValueError
        If the images are smaller than `cropsize`, or `mode` or `order` is unknown.

    Examples
    --------
    >>> crop_and_mirror(np.arange(9).reshape(1, 3, 3, 1), "val", cropsize=1).ravel()
    array([4])
    """
    check_mode(mode)
    if order not in ORDERS:
        raise ValueError(f"order must be 'c01b' or 'bc01', got {order!r}.")
    wanted = tuple(cropsize) if isinstance(cropsize, (tuple, list)) else (cropsize, cropsize)
    images = data.transpose(3, 0, 1, 2) if order == "c01b" else data
    room = [n - m for n, m in zip(images.shape[2:], wanted)]
    if images.ndim != 4 or min(room) < 0 or min(wanted) < 1:
        raise ValueError(
            f"cropsize must be inside the images' {images.shape[2:]}, got {shown(cropsize)}."
        )
    if mode == "val" or not rand_crop:
        parts = _part(images, room[0] // 2, room[1] // 2, wanted, False)
    else:
        random = np.random if random is None else random
        number = 1 if flag_batch else len(images)
        starts = [random.randint(0, each + 1, number) for each in room]
        mirrored = random.randint(0, 2, number)
        if flag_batch:
            parts = _part(images, starts[0][0], starts[1][0], wanted, mirrored[0])
        else:
            parts = np.empty((*images.shape[:2], *wanted), images.dtype)
            for i, image in enumerate(images):
                parts[i] = _part(image, starts[0][i], starts[1][i], wanted, mirrored[i])
    return np.ascontiguousarray(parts.transpose(1, 2, 3, 0) if order == "c01b" else parts)


def _part(images, row, column, wanted, is_mirrored):
    part = images[..., row : row + wanted[0], column : column + wanted[1]]
    return part[..., ::-1] if is_mirrored else part
