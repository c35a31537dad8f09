"""Arrays on a device of JAX. The value of a shared variable is one from its first use there.

An array of JAX can't be written: a new value replaces it. Scripts get copies, as NumPy's arrays. A
rank opens its device after the fork; on CPU ranks this module imports NumPy only.
"""

import importlib

import numpy as np
import pytensor

from synkhronos._host.pytensor import jax_devices

_opened = []  # the device of this process


def refuse_open_device() -> None:
    """Raise if this process has opened a device: no process that it forks could use JAX."""
    if _opened:
        jax_devices.refuse_started("fork()")


def import_device_backend(names) -> None:
    """Raise unless ranks can be on these devices; this starts nothing."""
    if any(name.startswith("opencl") for name in names):
        raise ImportError("OpenCL devices need Theano 1.0.5 with pygpu, on Python 3.8 to 3.11.")
    if "cpu" in names:
        raise ValueError(
            f"devices has {', '.join(names)}, but with PyTensor all ranks compute with JAX, or "
            'none: for JAX on CPU cores write "jax:cpu".'
        )
    jax_devices.require_package()
    jax_devices.refuse_started("fork()")


def open_device(device: str, rank: int, threads: int, is_first: bool = True) -> None:
    """Open the device of this rank, on which functions in PyTensor's default mode compute then."""
    _opened.append(jax_devices.start(device, threads))
    importlib.import_module("synkhronos._host.pytensor.jax_functions")  # it changes the mode JAX
    pytensor.config.mode = "JAX"


def device_context():
    """Return this process's device, or None."""
    return _opened[0] if _opened else None


def is_on_device(value) -> bool:
    """Return whether a value is an array of JAX, in a process that has opened a device."""
    return bool(_opened) and isinstance(value, importlib.import_module("jax").Array)


def to_host(value):
    """Return a value, copied to the host if it is on a device."""
    return np.array(value) if is_on_device(value) else value


def copy_from_device(value, out) -> None:
    """Copy an array from the device into a host array of its shape, casting to its dtype."""
    out[...] = np.asarray(value)


def to_device(value):
    """Return a value, copied to this rank's device if it is on the host."""
    import jax  # on CPU cores it may use the memory of an array that it is given

    if is_on_device(value):
        return value
    value = np.array(value) if _opened[0].platform == "cpu" else value
    return jax.block_until_ready(jax.device_put(value, _opened[0]))


def join_on_device(arrays, dtype):
    """Return host arrays joined along axis 0, on this rank's device."""
    return to_device(np.concatenate(arrays).astype(dtype, copy=False))


def take_on_device(value, rows):
    """Return rows of an array on the device, there; JAX compiles for each number of rows."""
    import jax

    if isinstance(rows, range) and rows.step == 1:
        return jax.lax.dynamic_slice_in_dim(value, rows.start, len(rows))
    return jax.numpy.take(value, np.asarray(rows, np.int64), axis=0)


def on_no_device(*arguments):
    """Raise NotImplementedError: only devices of Theano have this."""
    raise NotImplementedError(
        "Only devices of Theano can do this, and these ranks compute with JAX."
    )


require_open_device = copy_to_device = empty_on_device = scale_on_device = on_no_device
empty_like = np.empty_like
