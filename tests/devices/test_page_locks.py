"""Which memory is locked for a CUDA device, and which threads use it, with a stand-in driver."""

import ctypes
import gc
import os
import shutil
import subprocess
import threading
import types

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import on_ranks
from support.layouts import Layout, forked

import synkhronos as synk
from synkhronos._host.theano import compiling, cuda_context, page_locks
from synkhronos._host.theano.cuda_context import CudaContext
from synkhronos._machine.shared_memory import Map, Segments, private_memory

ROWS = page_locks.SMALLEST // 8  # of one float
LIBRARY = r"""
#include <cstdio>
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
static thread_local void *current;
static char calls[1 << 16];
static int entered = 0;
static bool mapped(void *p) {
    unsigned char c;
    return mincore((void *)((uintptr_t)p & ~4095ul), 1, &c) == 0;
}
template <class... A> static void note(const char *format, A... a) {
    snprintf(calls + strlen(calls), sizeof calls - strlen(calls), format, a...);
}
static void enter(void *context) { entered += context == (void *)77; }
static void leave(void *) { entered--; }
extern "C" {
int refuses = 0;
const char *take_calls() { static char all[1 << 16]; strcpy(all, calls); *calls = 0; return all; }
void *gpuarray_get_extension(const char *name) {
    return strcmp(name, "cuda_enter") ? (void *)leave : (void *)enter;
}
int cuCtxSetCurrent(void *handle) { current = handle; note("set "); return 0; }
int is_current() { return current == (void *)5; }
int cuCtxGetCurrent(void **handle) { *handle = entered ? (void *)5 : nullptr; return 0; }
int cuCtxPushCurrent_v2(void *handle) { entered += handle == (void *)5; return 0; }
int cuCtxPopCurrent_v2(void **handle) { *handle = (void *)5; entered--; return 0; }
int cuCtxSynchronize() { note("wait%s ", entered == 1 ? "" : "?"); return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    note("lock%s:%zu ", entered == 1 && flags == 1 && mapped(p) ? "" : "?", n);
    return refuses;
}
int cuMemHostUnregister(void *p) {
    note("unlock%s ", entered == 1 && mapped(p) ? "" : "?");
    return 0;
}
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


@pytest.fixture
def driver(library, monkeypatch):
    """Lock pages by this library; return what takes the names of its calls since the last time."""
    library.take_calls.restype = ctypes.c_char_p
    monkeypatch.setattr(cuda_context, "ctypes", types.SimpleNamespace(**vars(ctypes)))
    monkeypatch.setattr(cuda_context.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(page_locks.PageLocks, "current", None)
    monkeypatch.setattr(CudaContext, "current", None)
    monkeypatch.setenv(page_locks.VARIABLE, "4")
    library.take_calls(), page_locks._tell.cache_clear()
    yield lambda: [call for call in library.take_calls().decode().split() if call != "set"]
    ctypes.c_int.in_dll(library, "refuses").value = 0
    gc.collect()
    library.take_calls()


def install():
    page_locks.install(CudaContext(types.SimpleNamespace(ptr=77)))
    return page_locks.PageLocks.current


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_of_a_function_are_locked_from_their_second_run_on(driver, ranks):
    x = T.dmatrix("x")
    rows = 4 * ROWS
    values = np.ones((rows, 1))
    with forked(Layout(ranks)):
        f = synk.function([x], (x.sum(), "sum"))
        data = synk.data(values)
        f(values, batch=2)  # workers have the function; the master locks from here on
        install()
        calls = values, data, data, data
        batches = None, None, slice(2, None), np.arange(rows)[::-1].copy()
        for array, batch in zip(calls, batches):
            assert f(array, batch=batch) == rows - 2 * isinstance(batch, slice)
        assert driver() == ["lock:262144", "wait"]  # Data, at its second call
        for array, batch in zip(calls, batches):
            f(array, batch=batch)
        staged, rows_of_data = "lock:262144", f"lock:{262144 // ranks}"
        assert driver() == [staged, "wait", "wait", "wait", rows_of_data, "wait"]
        del data, array, calls
        gc.collect()
        f(values[:2])
        assert driver() == ["unlock"]
    del f
    gc.collect()
    assert driver() == ["unlock", "unlock"]


def test_a_worker_unlocks_the_memory_of_the_master_before_it_is_freed(driver):
    x = T.dmatrix("x")

    def numbers():
        """Return the calls since the last time as the digits of a number."""
        names = ["lock:262144", "wait", "unlock"]
        calls = cuda_context.ctypes.CDLL("").take_calls().decode().split()
        return sum((names.index(call) + 1) * 10**i for i, call in enumerate(calls))

    with forked(Layout(2)):
        f = synk.function([x], (x.sum(), "sum"))
        data = synk.data(np.ones((4 * ROWS, 1)))
        f(data)
        on_ranks(lambda: int(install() is not None))
        for _ in range(3):
            assert f(data) == 4 * ROWS
        assert on_ranks(numbers) == [221, 221]
        data.free_memory()
        f(np.ones((2, 1)))  # tells the workers what was freed
        assert on_ranks(numbers) == [3, 3]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_block_is_forgotten_before_it_is_unmapped(driver, is_shared):
    locks = install()
    block = Segments().create(1 << 20)._memory if is_shared else private_memory(1 << 20)
    array = np.ndarray(1 << 17, float, block)
    found = [locks.lock([array[1:]]), locks.lock([array])]
    assert found == [False, True]
    assert driver() == ["lock:1048576"]
    del block
    gc.collect()
    assert driver() == []
    del array
    assert driver() == ["unlock"]


def test_small_arrays_and_memory_of_others_are_not_locked(driver):
    locks = install()
    own = np.ndarray(100, float, private_memory(1 << 20))
    others = np.zeros(1 << 20), np.frombuffer(b"0" * (1 << 20)), np.float64(3), [1.0]
    for _ in range(3):
        assert not locks.lock([own, *others])
    assert driver() == []


def test_no_more_is_locked_than_the_limit(driver, monkeypatch, caplog):
    monkeypatch.setenv(page_locks.VARIABLE, f"{1.5 / 1024}")
    locks = install()
    arrays = [np.ndarray(1 << 17, float, Map(-1, 1 << 20)) for _ in range(3)]
    with caplog.at_level("DEBUG", "synkhronos"):
        found = [locks.lock([each]) for each in (*arrays, *arrays)]
    assert found == [False, False, False, True, False, False]
    assert len(caplog.messages) == 1 and "SYNKHRONOS_LOCKED_GIB allows no more" in caplog.text
    assert locks.lock(arrays[::-1]) and not locks.lock(arrays[1:])
    arrays.clear()
    fourth = np.ndarray(1 << 17, float, Map(-1, 1 << 20))
    assert [locks.lock([fourth]) for _ in range(2)] == [False, True]


def test_what_the_driver_refuses_is_not_locked_and_said_once(driver, library, caplog):
    ctypes.c_int.in_dll(library, "refuses").value = 2
    locks = install()
    arrays = [np.ndarray(1 << 17, float, Map(-1, 1 << 20)) for _ in range(2)]
    with caplog.at_level("DEBUG", "synkhronos"):
        assert not any(locks.lock(arrays) for _ in range(3))
    assert driver() == ["lock:1048576"] * 2
    assert caplog.messages == ["Some inputs are not locked in memory: error 2 of CUDA"]
    arrays.clear()
    assert driver() == []


def test_copies_by_hand_are_waited_for(driver):
    locks = install()
    array = np.ndarray(1 << 17, float, Map(-1, 1 << 20))
    page_locks.wait_for(array)
    assert driver() == []
    assert [locks.lock([array]) for _ in range(2)][1] and driver()
    page_locks.wait_for(array[3:])
    page_locks.wait_for(np.ones(3))
    assert driver() == ["wait"]
    kept = []

    class Shared:
        def set_value(self, value, borrow=False):
            kept.append((value is array, borrow))

    page_locks.wait_after_setting(Shared)
    Shared().set_value(np.ones(3))
    Shared().set_value(array, borrow=True)
    assert kept == [(False, False), (True, True)] and driver() == ["wait"]


def test_a_forked_child_leaves_locked_pages_to_its_parent(driver):
    locks = install()
    array = np.ndarray(1 << 17, float, Map(-1, 1 << 20))
    assert [locks.lock([array]) for _ in range(2)][1] and driver()
    pid = os.fork()
    if not pid:
        del array
        gc.collect()
        os._exit(len(driver()))
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("text", ["", "0", "-1"])
def test_nothing_is_locked_if_the_user_wants_none(driver, monkeypatch, text):
    monkeypatch.setenv(page_locks.VARIABLE, text)
    assert install() is None


@pytest.mark.parametrize("text", ["some", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv(page_locks.VARIABLE, text)
    with pytest.raises(ValueError, match=f"SYNKHRONOS_LOCKED_GIB is how many .* it is '{text}'"):
        page_locks.limit()


@pytest.mark.parametrize("release, is_new", [("5.8.0-1", False), ("5.9.1", True), ("odd", False)])
def test_only_kernels_that_keep_locked_pages_at_a_fork(driver, monkeypatch, release, is_new):
    uname = types.SimpleNamespace(release=release)
    monkeypatch.setattr(page_locks.os, "uname", lambda: uname)
    assert (install() is not None) == is_new


def test_each_thread_that_compiles_or_runs_has_the_context(driver, library):
    def entered():
        return library.take_calls().decode().split(), library.is_current()

    def in_a_thread(do):
        found = []
        thread = threading.Thread(target=lambda: found.append((do(), entered())))
        thread.start(), thread.join()
        return found[0]

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
