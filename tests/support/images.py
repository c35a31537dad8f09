"""Operations on images, in NumPy: of shape (rows, channels, height, width)."""

import numpy as np


def correlated(x, W, stride=1, pad=0):
    """Return the cross-correlation of images with filters."""
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    height, width = W.shape[2:]
    rows = range(0, x.shape[2] - height + 1, stride)
    columns = range(0, x.shape[3] - width + 1, stride)
    parts = [[x[:, :, i : i + height, j : j + width] for j in columns] for i in rows]
    found = [[np.tensordot(part, W, [(1, 2, 3), (1, 2, 3)]) for part in row] for row in parts]
    return np.array(found).transpose(2, 3, 0, 1)


def places(found, x):
    """Return (row, column, is mirrored) of each image of `found` in the images `x`."""
    places = []
    for crop, image in zip(found, x):
        n, m = crop.shape[1:]
        [place] = [
            (i, j, mirrored)
            for i in range(image.shape[1] - n + 1)
            for j in range(image.shape[2] - m + 1)
            for mirrored in (False, True)
            if (image[:, i : i + n, j : j + m] == (crop[..., ::-1] if mirrored else crop)).all()
        ]
        places.append(place)
    return places
