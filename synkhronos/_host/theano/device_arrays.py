"""Arrays on a device. Only this module imports pygpu's arrays, and Theano's backend for them.

    shared memory ──▶ write ──▶ GpuArray ──▶ read ──▶ shared memory

The rank that a device is bound to opens it once, after the fork. Nothing here opens a device before
that. On CPU ranks this module imports NumPy only.
"""

import copy
import functools
import os
import sys

import numpy as np

from synkhronos._host.theano import cudnn
from synkhronos._host.theano.cuda_context import CudaContext
from synkhronos.errors import SessionError

# Optimizations that move operations to the device for which OpenCL has no working kernel.
_NOT_ON_OPENCL = (
    "local_gpua_cumop",
    "local_gpua_scan_to_gpua",
    "local_gpua_crossentropysoftmaxargmax1hotwithbias",
    "local_gpua_crossentropysoftmax1hotwithbiasdx",
)

when_open = []  # functions to call when this process has opened a device
# The devices that this process has tried to open. Even a failed attempt starts threads, so the
# process must not fork afterwards.
_tried = set()


def refuse_open_device() -> None:
    """Raise if this process has opened a device: processes forked from it could not use any."""
    backend = sys.modules.get("theano.gpuarray")
    opened = {*_tried}
    if backend is not None and backend.pygpu:
        opened.update(backend.init_dev.devmap)
    if opened:
        raise SessionError(
            f"fork() must come before anything opens a device, but this process has opened "
            f"{', '.join(sorted(opened))}: by THEANO_FLAGS or .theanorc (device=, contexts=), by "
            "theano.gpuarray.use, or by an earlier session on devices. Start again with the flags "
            "device=cpu,force_device=True: Synkhronos opens the device of each rank by itself."
        )
    wanted = "cpu" if backend is None else backend.config.device
    if wanted != "cpu":
        raise SessionError(
            f"THEANO_FLAGS or .theanorc has device={wanted}, which Theano could not open: it has "
            "printed why, and computes on the CPU. `synkhronos info` says what is missing. Start "
            "again with device=cpu: Synkhronos opens the device of each rank by itself."
        )


def require_open_device(device: str) -> None:
    """Raise unless Theano, when it was imported, has opened this device, which its flags name."""
    if device not in import_device_backend().init_dev.devmap:
        raise RuntimeError(
            f"The device {device} can't be opened: Theano has printed why. `synkhronos info` "
            "counts the devices, and says what is missing."
        )


def import_device_backend(names=()):
    """Import Theano's backend for devices, which needs pygpu; this opens no device."""
    of_jax = [name for name in names if name.startswith("jax:")]
    if of_jax:
        raise ImportError(f"{of_jax[0]}: ranks compute with JAX only if the host is PyTensor.")
    try:
        import pygpu  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Ranks on GPUs and OpenCL devices need pygpu, which can't be imported here ({error}). "
            "`synkhronos info` says how to install it; CPU ranks work without it."
        ) from error
    cudnn.tf32()  # bad values are refused before the fork
    import theano.gpuarray

    return theano.gpuarray


def open_device(device: str, rank: int, threads: int, is_first: bool = True) -> None:
    """Open the device of this rank; if it `is_first` of its kind, log their common warnings."""
    if device.startswith("opencl"):
        _prepare_pocl(rank, threads)
    backend = import_device_backend()
    _tried.add(device)
    wanted = cudnn.hold_back() if device.startswith("cuda") else "False"
    try:
        backend.use(device)
    except Exception as error:
        reason = error.args[0] if error.args else error
        if isinstance(reason, bytes):  # pygpu's messages are bytes
            reason = reason.decode(errors="replace")
        raise RuntimeError(
            f"The device {device} can't be opened: {type(error).__name__}: {reason}. "
            "`synkhronos info` counts the devices, and says what is missing."
        ) from error
    if device.startswith("opencl"):
        _work_around_opencl()
    else:
        _let_reductions_be_cached()
        cudnn.enable(device_context(), wanted, is_first)
        CudaContext.install(device_context())
    for function in when_open:
        function()


def _prepare_pocl(rank, threads):
    """Let several processes use PoCL at the same time, which makes OpenCL devices of CPU cores."""
    # By default PoCL starts a thread for every core in each process.
    os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", str(threads))
    # If processes build the same kernel in one cache at the same time, some of them fail.
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("POCL_CACHE_DIR", os.path.join(caches, "pocl", f"synkhronos-{rank}"))


def _work_around_opencl():
    """Leave operations without an OpenCL kernel on the CPU, and fix kernels that can be fixed."""
    from theano import scalar
    from theano.compile.mode import optdb
    from theano.gpuarray import opt

    for database in (opt.gpu_optimizer, opt.gpu_optimizer2):
        for name in _NOT_ON_OPENCL:
            [optimization] = database.__db__[name]
            for tag in ("fast_run", "fast_compile"):
                database.__db__[tag].discard(optimization)
        [careduce] = database.__db__["local_gpua_careduce"]
        careduce.transform = _unless_half_precision(careduce.transform)
    # CLBlast adds 0 times the old contents of the result of a matrix-vector product, even if NaN.
    optdb.add_tags("local_gpua_alloc_empty_to_zeros", "fast_run", "fast_compile")
    # PoCL has no nan(""), and Theano ends the process when a kernel can't be built.
    for op in (scalar.Maximum, scalar.Minimum):
        _replace_in_code(op, 'nan("")', "NAN")


def _let_reductions_be_cached():
    """Let processes find reductions for CUDA in Theano's compile cache."""
    from theano.gpuarray.elemwise import GpuCAReduceCuda

    original = GpuCAReduceCuda.c_code_cache_version_apply

    @functools.wraps(original)
    def c_code_cache_version_apply(self, node):
        counted = copy.copy(self)
        counted.verbose = self.verbose + 1  # Theano takes a 0 for no version
        return original(counted, node)

    GpuCAReduceCuda.c_code_cache_version_apply = c_code_cache_version_apply


def _unless_half_precision(transform):
    def wrapper(first, *rest):
        # One database passes a node, the other an operation, a context, inputs and outputs.
        inputs = rest[1] if rest else first.inputs
        if any(getattr(x, "dtype", None) == "float16" for x in inputs):
            return None
        return transform(first, *rest)

    return wrapper


def _replace_in_code(op, old, new):
    c_code, version = op.c_code, op.c_code_cache_version

    def mended(self, *args, **kwargs):
        return c_code(self, *args, **kwargs).replace(old, new)

    def next_version(self):
        # Another version, so that kernels compiled without the change are not taken from the cache.
        return (*version(self), old, new)

    op.c_code, op.c_code_cache_version = mended, next_version


def device_context():
    """Return the context of this process's device, or None."""
    backend = sys.modules.get("theano.gpuarray.type")
    return None if backend is None else backend._context_reg.get(None)


def is_device_type(type_) -> bool:
    """Return whether variables of a Theano type hold arrays on a device."""
    return getattr(type_, "context_name", "cpu") != "cpu"


def is_on_device(value) -> bool:
    """Return whether a value is an array on a device."""
    pygpu = sys.modules.get("pygpu")
    return pygpu is not None and isinstance(value, pygpu.gpuarray.GpuArray)


def to_host(value):
    """Return a value, copied to the host if it is on a device."""
    return np.asarray(value) if is_on_device(value) else value


def copy_from_device(value, out) -> None:
    """Copy an array from the device into a host array of its shape, casting to its dtype."""
    direct = value.flags.c_contiguous and out.flags.c_contiguous and value.dtype == out.dtype
    if direct and value.size:
        value.read(out)
    else:
        out[...] = np.asarray(value)


@functools.lru_cache(maxsize=None)
def _scaling(dtype):
    """Return the kernel that scales arrays of a dtype. Cached: a kernel's memory is never freed."""
    from pygpu import elemwise

    arguments = [
        elemwise.arg("a", dtype, read=True, write=True),
        elemwise.arg("b", dtype, scalar=True, read=True),
    ]
    return elemwise.GpuElemwise(device_context(), "a = a * b", arguments, convert_f16=True)


def scale_on_device(value, factor) -> None:
    """Multiply an array on the device by a number, in place."""
    _scaling(value.dtype.name)(value, value.dtype.type(factor))


def copy_to_device(value, array) -> None:
    """Copy an array, of the host or on the device, into an equal one on the device."""
    if not value.size:
        return
    if value.flags.c_contiguous and not (is_on_device(array) and value.ndim):
        value.write(np.ascontiguousarray(array))  # also without axes, which pygpu can't index
    else:
        value[...] = array


def empty_on_device(shape, dtype):
    """Return a new array on this rank's device, of any contents."""
    import pygpu

    return pygpu.empty(shape, dtype=dtype, context=device_context())


def empty_like(value):
    """Return a new array, of any contents, like a given one: on the device or on the host."""
    if is_on_device(value):
        return empty_on_device(value.shape, value.dtype)
    return np.empty_like(value)


def to_device(value):
    """Return a value, copied to this rank's device if it is on the host."""
    import pygpu

    if isinstance(value, list):  # parts of different shapes
        return [to_device(part) for part in value]
    if is_on_device(value):
        return value
    return pygpu.array(value, context=device_context())


def join_on_device(arrays, dtype):
    """Return host arrays joined along axis 0, on this rank's device."""
    joined = empty_on_device((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    at = 0
    for array in arrays:
        if array.size:
            copy_to_device(joined[at : at + len(array)], array)
        at += len(array)
    return joined


def take_on_device(value, rows):
    """Return rows of an array on the device, on the device: a view of a range, else a copy."""
    import pygpu

    if isinstance(rows, range) and rows.step > 0:
        return value[rows.start : rows.stop : rows.step]
    rows = np.asarray(rows, np.int64)
    if not len(rows):
        return value[:0]
    if not value.flags.c_contiguous:
        value = pygpu.gpuarray.ascontiguousarray(value)
    return value.take1(pygpu.array(rows, context=value.context))
