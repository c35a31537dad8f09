"""The headers and the front library of cuDNN 8 and 9, out of the wheels that pip finds."""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from support.running import run

REQUIREMENTS = {8: "nvidia-cudnn-cu12<9", 9: "nvidia-cudnn-cu12>=9,<10"}
CACHE = Path(__file__).parents[2] / "build"
IN_WHEEL = "nvidia/cudnn/"


def of_wheel(major):
    """Return the folder of a cuDNN, with include/ and lib/; skip the test if it can't be had.

    A wheel has 700 MB, of which this reads 1 MB, once: the files stay in the folder build.
    """
    folder = CACHE / f"cudnn-{major}"
    if not folder.exists():
        problem = _fetch(major, folder)
        if problem:
            pytest.skip(f"no headers of cuDNN {major}: {problem}")
    return folder


@functools.lru_cache(maxsize=None)  # a failure takes long, and comes again
def _fetch(major, folder):
    try:
        from remotezip import RemoteZip
    except ImportError:
        return "remotezip is not installed"
    options = "--quiet --dry-run --no-deps --ignore-installed --only-binary=:all: --report=-"
    options += " --retries=1 --timeout=10"
    child = run(sys.executable, "-m", "pip", "install", *options.split(), REQUIREMENTS[major])
    if child.returncode:
        return f"pip finds no wheel: {child.stderr.strip().splitlines()[-1:]}"
    url = json.loads(child.stdout)["install"][0]["download_info"]["url"]
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as part:
        files = Path(part, IN_WHEEL)
        try:
            with RemoteZip(url) as wheel:
                names = f"{IN_WHEEL}include/", f"{IN_WHEEL}lib/libcudnn.so"
                wheel.extractall(
                    part, [each for each in wheel.namelist() if each.startswith(names)]
                )
        except Exception as error:  # of the network, or of an index without range requests
            return f"{type(error).__name__}: {error}"
        (files / "lib" / "libcudnn.so").symlink_to(f"libcudnn.so.{major}")
        try:
            os.rename(files, folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    return None
