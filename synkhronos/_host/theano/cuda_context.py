"""The context of a CUDA device, for each thread that uses the device.

libgpuarray makes its context current while one of its functions runs, and counts for all threads
together how many do. Its `cuda_newkernel` counts up only, if it returns a kernel that it has built
before (0.7.6): from then on the context stays current, but in that thread alone, and another one
gets CUDA_ERROR_INVALID_CONTEXT. ResNet-50 is compiled in a thread with a large stack, and then
runs in the main thread. So the context is made current for good in each thread.
"""

import ctypes
import threading


class CudaContext:
    """A context of pygpu, and its handle for CUDA's driver."""

    current = None  # that of this process, once it has opened a CUDA device

    def __init__(self, context):
        pointer, self._driver = ctypes.c_void_p, ctypes.CDLL("libcuda.so")
        find = ctypes.CDLL("libgpuarray.so.3").gpuarray_get_extension
        find.restype, find.argtypes = pointer, [ctypes.c_char_p]
        names = b"cuda_enter", b"cuda_exit"
        enter, leave = [ctypes.CFUNCTYPE(None, pointer)(find(name)) for name in names]
        self._context, self._handle = context, pointer()  # the context must live
        enter(context.ptr)
        self._driver.cuCtxGetCurrent(ctypes.byref(self._handle))
        leave(context.ptr)
        self._here = threading.local()

    @classmethod
    def install(cls, context) -> None:
        """Use the context of pygpu in all threads from now on."""
        cls.current = cls(context)
        cls.current.enter_thread()

    def enter_thread(self) -> None:
        """Make the context current in the calling thread."""
        if not hasattr(self._here, "is_entered"):
            self._driver.cuCtxSetCurrent(self._handle)
            self._here.is_entered = True
