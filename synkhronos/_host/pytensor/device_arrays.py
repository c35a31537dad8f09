"""PyTensor has no devices: all ranks compute on the cores of the CPU, with arrays of NumPy."""

import numpy as np


def refuse_open_device() -> None:
    """Do nothing: no process has opened a device."""


def import_device_backend(*arguments, **options):
    """Raise ImportError: ranks on devices need Theano."""
    raise ImportError(
        "The host library is PyTensor, with which all ranks are on the cores of the CPU: write "
        "fork(n) without use_gpu and devices. Ranks on GPUs and OpenCL devices need Theano 1.0.5 "
        "with pygpu, on Python 3.8 to 3.11."
    )


def device_context():
    """Return None: no device is open."""
    return None


def is_on_device(value) -> bool:
    """Return False: no value is on a device, and no variable has values there."""
    return False


def to_host(value):
    """Return the value, or the variable: it is on the host, and stays there."""
    return value


def on_no_device(*arguments):
    """Raise RuntimeError: this function is only for values and ranks on devices."""
    raise RuntimeError("PyTensor has nothing on devices; this is a mistake of Synkhronos.")


open_device = require_open_device = import_device_backend
to_device, empty_like = to_host, np.empty_like
copy_from_device = copy_to_device = empty_on_device = join_on_device = on_no_device
scale_on_device = take_on_device = on_no_device
