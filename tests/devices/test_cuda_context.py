"""The context of CUDA is current in each thread that uses it, with a library for the driver."""

import ctypes
import shutil
import subprocess
import threading
import types

import numpy as np
import pytest
import theano
import theano.tensor as T

from synkhronos._host.theano import compiling, cuda_context
from synkhronos._host.theano.cuda_context import CudaContext

LIBRARY = r"""
#include <cstring>
static thread_local void *current;
static char calls[1 << 10];
static int entered = 0;
static void enter(void *context) { entered += context == (void *)77; }
static void leave(void *) { entered--; }
extern "C" {
const char *take_calls() { static char all[1 << 10]; strcpy(all, calls); *calls = 0; return all; }
void *gpuarray_get_extension(const char *name) {
    return strcmp(name, "cuda_enter") ? (void *)leave : (void *)enter;
}
int cuCtxGetCurrent(void **handle) { *handle = entered ? (void *)5 : nullptr; return 0; }
int cuCtxSetCurrent(void *handle) { current = handle; strcat(calls, "set "); return 0; }
int is_current() { return current == (void *)5; }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return a library with the functions of the driver and of libgpuarray that are called."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(LIBRARY)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", "driver.so", "driver.cpp"], cwd=folder, check=True
    )
    return ctypes.CDLL(str(folder / "driver.so"))


def test_each_thread_that_compiles_or_runs_has_the_context(library, monkeypatch):
    def entered():
        return library.take_calls().decode().split(), library.is_current()

    def in_a_thread(do):
        found = []
        thread = threading.Thread(target=lambda: found.append((do(), entered())))
        thread.start(), thread.join()
        return found[0]

    monkeypatch.setattr(cuda_context, "ctypes", types.SimpleNamespace(**vars(ctypes)))
    monkeypatch.setattr(cuda_context.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(CudaContext, "current", None)
    library.take_calls.restype = ctypes.c_char_p
    x = y = T.dscalar("x")
    for _ in range(700):
        y = y + 1
    CudaContext.install(types.SimpleNamespace(ptr=77))
    assert entered() == (["set"], 1)
    function = compiling.compile_function([x], [y], mode=theano.Mode("py", None))
    assert entered() == (["set"], 1)  # in the thread with a large stack
    one = [np.array(1.0)]
    assert compiling.run(function, one) == [701] and entered() == ([], 1)
    assert in_a_thread(lambda: compiling.run(function, one)) == ([701], (["set"], 1))
    assert in_a_thread(lambda: 3) == (3, ([], 0))
