"""Where a profile is written to: checked before there is anything to write."""

import os
from pathlib import Path


def check_file(argument, file, suffixes, what) -> Path:
    """Return the path of a file with one of some suffixes.

    Raises ``TypeError`` for what is no path, ``ValueError`` for other suffixes, which `what` names.
    """
    if not isinstance(file, (str, os.PathLike)) or not isinstance(os.fspath(file), str):
        raise TypeError(f"{argument} must be a path, got {file!r}.")
    path = Path(file)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{argument} must end in {what}, got {str(path) if file else ''!r}.")
    return path


def refuse_unwritable(argument, path) -> None:
    """Raise ``ValueError`` for a path where no file can be written, as far as that shows."""
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {str(folder)!r}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "you may not write there"
    else:
        return
    raise ValueError(f"{argument} must be a file that can be written, got {str(path)!r}: {reason}.")
