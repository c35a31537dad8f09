"""Theano's operations of cuDNN fit cuDNN 8 and 9, as far as that shows without a GPU.

Headers and names of functions are those of the real cuDNN, out of its wheels. What cuDNN answers
comes from a small library, which the compiler makes.
"""

import ctypes
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from support import cudnn as _real
from support import running
from support.host_library import ON_PYTENSOR

from synkhronos._host.theano import cudnn

needs_pygpu = pytest.mark.skipif(
    importlib.util.find_spec("pygpu") is None, reason="pygpu is not installed"
)
needs_theano = pytest.mark.skipif(ON_PYTENSOR, reason="for Theano only")
BOTH = pytest.mark.parametrize("major", [8, 9])

# Answers with lists of algorithms, and remembers the math type that a call ran in.
LIBRARY = r"""
#include <cudnn.h>
struct Answer { int algorithm, status, determinism; size_t size; int status_of_size; };
static Answer answers[9];
static int n_answers, type, math;
extern "C" {
void start(int type_) { type = type_; n_answers = 0; math = -1; }
void answer(int algorithm, int status, int determinism, size_t size, int status_of_size) {
  answers[n_answers++] = {algorithm, status, determinism, size, status_of_size};
}
int ran_in() { return math; }
size_t cudnnGetVersion() { return VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t) { return "an error"; }
cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  *handle = (cudnnHandle_t)7;
  return (cudnnStatus_t)CREATED;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t, int, cudnnDataType_t *of,
                                         int *, int *, int *) {
  *of = (cudnnDataType_t)type;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t, cudnnMathType_t given) {
  math = given;
  return CUDNN_STATUS_SUCCESS;
}
#define A(Kind, a, b, c, Short) \
  cudnnStatus_t cudnnGetConvolution##Kind##Algorithm_v7( \
      cudnnHandle_t, const a, const b, const cudnnConvolutionDescriptor_t, const c, \
      const int, int *count, cudnnConvolution##Short##AlgoPerf_t *found) { \
    for (*count = 0; *count < n_answers; ++*count) { \
      const Answer &each = answers[*count]; \
      found[*count].algo = (cudnnConvolution##Short##Algo_t)each.algorithm; \
      found[*count].status = (cudnnStatus_t)each.status; \
      found[*count].determinism = (cudnnDeterminism_t)each.determinism; \
    } \
    return CUDNN_STATUS_SUCCESS; \
  } \
  cudnnStatus_t cudnnFindConvolution##Kind##AlgorithmEx( \
      cudnnHandle_t handle, const a x, const void *, const b y, const void *, \
      const cudnnConvolutionDescriptor_t convolution, const c z, void *, const int n, int *count, \
      cudnnConvolution##Short##AlgoPerf_t *found, void *, size_t) { \
    return cudnnGetConvolution##Kind##Algorithm_v7(handle, x, y, convolution, z, n, count, found); \
  } \
  cudnnStatus_t cudnnGetConvolution##Kind##WorkspaceSize( \
      cudnnHandle_t, const a, const b, const cudnnConvolutionDescriptor_t, const c, \
      cudnnConvolution##Short##Algo_t algorithm, size_t *size) { \
    for (const Answer &each : answers) \
      if (each.algorithm == algorithm) { \
        *size = each.size; \
        return (cudnnStatus_t)each.status_of_size; \
      } \
    return CUDNN_STATUS_SUCCESS; \
  } \
  cudnnStatus_t cudnnConvolution##Kind( \
      cudnnHandle_t, const void *, const a, const void *, const b, const void *, \
      const cudnnConvolutionDescriptor_t, cudnnConvolution##Short##Algo_t, void *, size_t, \
      const void *, const c, void *) { \
    return CUDNN_STATUS_SUCCESS; \
  }
A(Forward, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, Fwd)
A(BackwardData, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, BwdData)
A(BackwardFilter, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
  BwdFilter)
}
"""
# Calls it as Theano does.
CALLS = r"""
#include <cudnn.h>
#define B(Kind, LIMIT, a, b, c, Short) \
  extern "C" int guess_##Kind(size_t limit, int *algorithm, size_t *) { \
    return cudnnGetConvolution##Kind##Algorithm(0, (a)0, (b)0, 0, (c)0, LIMIT, limit, \
                                                (cudnnConvolution##Short##Algo_t *)algorithm); \
  } \
  extern "C" int find_##Kind(size_t limit, int *algorithm, size_t *size) { \
    int count; \
    cudnnConvolution##Short##AlgoPerf_t found; \
    cudnnStatus_t status = cudnnFindConvolution##Kind##AlgorithmEx( \
        0, (a)0, 0, (b)0, 0, 0, (c)0, 0, 1, &count, &found, 0, limit); \
    *algorithm = count ? found.algo : -1; \
    *size = found.memory; \
    return status; \
  } \
  extern "C" int size_##Kind(size_t, int *algorithm, size_t *size) { \
    return cudnnGetConvolution##Kind##WorkspaceSize( \
        0, (a)0, (b)0, 0, (c)0, (cudnnConvolution##Short##Algo_t)*algorithm, size); \
  } \
  extern "C" int run_##Kind(size_t, int *algorithm, size_t *) { \
    void *none = 0; \
    return cudnnConvolution##Kind(0, none, (a)0, none, (b)0, none, 0, \
                                  (cudnnConvolution##Short##Algo_t)*algorithm, none, size_t(0), \
                                  none, (c)0, none); \
  }
B(Forward, CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT, cudnnTensorDescriptor_t,
  cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, Fwd)
B(BackwardData, CUDNN_CONVOLUTION_BWD_DATA_SPECIFY_WORKSPACE_LIMIT, cudnnFilterDescriptor_t,
  cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, BwdData)
B(BackwardFilter, CUDNN_CONVOLUTION_BWD_FILTER_SPECIFY_WORKSPACE_LIMIT, cudnnTensorDescriptor_t,
  cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, BwdFilter)
"""
KINDS = "Forward", "BackwardData", "BackwardFilter"
FLOAT, DOUBLE, HALF = 0, 1, 2  # the numbers of cuDNN's types and math types
DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3
NOT_SUPPORTED, OF_ITS_SHAPE = {8: 9, 9: 3000}, {8: 9, 9: 3002}


def made(folder, real, calls="", version=None, created=0, flags=()):
    """Make a libcudnn.so in a folder lib/, beside the real headers; return it."""
    library = folder / "lib" / "libcudnn.so"
    library.parent.mkdir(parents=True)
    (folder / "include").symlink_to(real / "include")
    version = version or cudnn.header_version(real / "include")
    defined = [f"-DVERSION={version}", f"-DCREATED={created}", *flags]
    objects = []
    for name, text in (("library", LIBRARY), ("calls", calls)):
        # Only the calls see what Theano's code sees.
        paths = [f"-I{cudnn.INCLUDE}"] if name == "calls" else ["-idirafter", str(cudnn.INCLUDE)]
        objects.append(str(folder / f"{name}.o"))
        command = ["g++", "-Wall", "-Werror", "-fPIC", "-c", "-x", "c++", "-", "-o", objects[-1]]
        paths += [f"-I{real / 'include'}"]
        subprocess.run([*command, *defined, *paths], input=text, text=True, check=True)
    soname = f"-Wl,-soname,libcudnn.so.{version}"
    subprocess.run(["g++", "-shared", soname, *objects, "-o", str(library)], check=True)
    return library


class Calls:
    """The calls of one kind of convolution, after answers that the test gives."""

    def __init__(self, library, kind):
        self.library, self.kind = library, kind
        library.answer.argtypes = [ctypes.c_int] * 3 + [ctypes.c_size_t, ctypes.c_int]

    def __call__(self, name, type_, *answers, limit=1000, algorithm=0):
        """Return the status, the algorithm and the size."""
        self.library.start(type_)
        for each in answers:
            self.library.answer(*each)
        algorithm, size = ctypes.c_int(algorithm), ctypes.c_size_t()
        function = getattr(self.library, f"{name}_{self.kind}")
        status = function(ctypes.c_size_t(limit), ctypes.byref(algorithm), ctypes.byref(size))
        return status, algorithm.value, size.value


@BOTH
def test_the_first_algorithm_that_works_within_the_limit_is_chosen(major, tmp_path):
    library = ctypes.CDLL(str(made(tmp_path, _real.of_wheel(major), CALLS)))
    unsupported, reason = NOT_SUPPORTED[major], OF_ITS_SHAPE[major]
    fails, large, breaks = (4, unsupported, 1, 0, 0), (5, 0, 1, 1001, 0), (2, 0, 1, 0, reason)
    fits, later = (1, 0, 0, 1000, 0), (0, 0, 1, 0, 0)
    for kind in KINDS:
        calls = Calls(library, kind)
        assert calls("guess", FLOAT, fails, large, breaks, fits, later)[:2] == (0, 1)
        assert calls("find", FLOAT, fails, large, breaks, fits, later) == (0, 1, 1000)
        for name in ("guess", "find"):  # the general code, which Theano knows
            assert calls(name, FLOAT, fails, large, breaks)[0] == unsupported
            assert calls(name, FLOAT)[0] == unsupported
        assert calls("size", FLOAT, breaks, algorithm=2)[0] == unsupported


@BOTH
def test_only_algorithms_that_repeat_their_results_are_chosen_if_asked(major, tmp_path):
    flags = ["-DSYNKHRONOS_DETERMINISTIC=1"]
    library = ctypes.CDLL(str(made(tmp_path, _real.of_wheel(major), CALLS, flags=flags)))
    for kind in KINDS:
        calls = Calls(library, kind)
        assert calls("guess", FLOAT, (0, 0, 0, 0, 0), (3, 0, 1, 0, 0))[:2] == (0, 3)
        assert calls("find", FLOAT, (0, 0, 0, 0, 0))[0] == NOT_SUPPORTED[major]


@BOTH
@pytest.mark.parametrize("tf32", [0, 1])
def test_each_call_sets_the_math_type_of_its_data(major, tf32, tmp_path):
    flags = [f"-DSYNKHRONOS_TF32={tf32}"]
    library = ctypes.CDLL(str(made(tmp_path, _real.of_wheel(major), CALLS, flags=flags)))
    expected = {
        FLOAT: DEFAULT_MATH if tf32 else FMA_MATH,
        DOUBLE: DEFAULT_MATH,
        HALF: TENSOR_OP_MATH,
    }
    for kind in KINDS:
        for name in ("guess", "find", "size", "run"):
            for type_, math in expected.items():
                Calls(library, kind)(name, type_, (0, 0, 1, 0, 0))
                assert library.ran_in() == math, (kind, name, type_)


@needs_pygpu
@BOTH
@pytest.mark.slow("compiles all operations of cuDNN")
def test_all_operations_compile_and_find_their_functions(major):
    folder = _real.of_wheel(major)
    script = Path(_real.__file__).with_name("compiling_cudnn.py")
    child = running.python(script, folder)
    assert child.returncode == 0, child.stderr
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert [each for each in results if each["failed"] or each["said"]] == []
    names = {each["name"] for each in results}
    assert not any(each["asks_at_once"] for each in results)
    assert {"GpuDnnConv", "GpuDnnConvGradW", "GpuDnnConvGradI", "GpuDnnTransformerGradT"} < names
    assert ("GpuDnnRNNOp" in names) == (major == 8)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", folder / "lib" / "libcudnn.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    there = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    needed = {symbol for each in results for symbol in each["symbols"]}
    assert "cudnnConvolutionForward" in needed
    assert needed - there == set()


ENABLE = """
import json, logging, sys, types as modules
import theano.gpuarray
from theano.gpuarray import dnn, type as types
from synkhronos._host.theano import device_arrays
from synkhronos._machine.log import log

class Context:
    kind, bin_id = b"cuda", b"compute_90"
    __enter__ = __exit__ = lambda *ignored: None

said = []
log.setLevel(logging.INFO)
log.addHandler(type("List", (logging.Handler,), {"emit": lambda self, record: said.append(
    f"{record.levelname} {record.getMessage()}")})())
# Stand in for the driver: Theano refuses to use a device if the flag says so and there is no cuDNN.
def use(device):
    types._context_reg[None] = Context()
    assert theano.config.dnn.enabled == "False" and not dnn.dnn_available(None)

sys.modules.setdefault("pygpu", modules.ModuleType("pygpu"))
theano.gpuarray.use = use
device_arrays.CudaContext.install = lambda context: None  # test_cuda_context.py tests it
try:
    device_arrays.open_device("cuda0", rank=0, threads=1)
except RuntimeError as error:
    said.append(f"raised {error}")
algorithm = theano.config.dnn.conv.algo_fwd
available = dnn.dnn_available(None)
rnn = ""
if available:
    try:
        dnn.RNNBlock("float32", 8, 1, "lstm")
    except (NotImplementedError, TypeError) as error:  # the latter of this Context
        rnn = str(error)
keys = [dnn.DnnBase.c_compile_args(dnn.GpuDnnSoftmax("accurate", "channel"))] if available else []
print(json.dumps([available, dnn.version(raises=False), algorithm, said, rnn, keys]))
"""


def enable(library, **variables):
    """Return what a rank with this library says about cuDNN."""
    path = ":".join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": path}
    environment.pop("THEANO_FLAGS", None)
    child = running.run(
        *(running.sys.executable, "-W", "error::UserWarning", "-c", ENABLE),
        env={**environment, **variables},
    )
    assert child.returncode == 0, child.stderr
    assert "more recent" not in child.stderr
    names = "available", "version", "algorithm", "said", "rnn", "keys"
    return dict(zip(names, json.loads(child.stdout.splitlines()[-1])))


@needs_theano
@needs_pygpu
@pytest.mark.slow("imports Theano in new interpreters")
@BOTH
def test_a_cudnn_is_enabled_and_its_flags_are_obeyed(major, tmp_path):
    real = _real.of_wheel(major)
    library = made(tmp_path, real)
    version = cudnn.header_version(real / "include")
    found = enable(library, SYNKHRONOS_TF32="1")
    assert (found["available"], found["version"]) == (True, version), found
    assert found["algorithm"] == "guess_on_shape_change"
    assert found["said"] == [f"INFO with cuDNN {cudnn.shown(version)} and TF32 in {library.parent}"]
    assert ("theano.scan" in found["rnn"]) == (major == 9)
    plain = enable(library, THEANO_FLAGS="dnn.enabled=True,dnn.conv.algo_fwd=none")
    assert (plain["available"], plain["algorithm"]) == (True, "none")
    assert plain["keys"] != found["keys"]  # so that the compile cache has both
    off = enable(library, THEANO_FLAGS="dnn.enabled=False")
    assert (off["available"], off["version"], off["said"]) == (False, -1, [])


@needs_theano
@pytest.mark.slow("imports Theano in new interpreters")
def test_a_cudnn_that_can_not_be_used_is_told_of(tmp_path):
    real = _real.of_wheel(9)
    problem = made(tmp_path / "a", real, created=1001)
    found = enable(problem)
    assert (found["available"], found["version"]) == (False, -1)
    [line] = found["said"]
    assert line.startswith("WARNING cuDNN can't be used: cuDNN 9.") and "too old driver" in line
    [line] = enable(problem, THEANO_FLAGS="dnn.enabled=True")["said"]
    assert line.startswith("raised cuDNN can't be used, but the flag dnn.enabled is True: cuDNN 9.")
    [line] = enable(made(tmp_path / "b", real, version=100000))["said"]
    assert "libcudnn.so is cuDNN 10.0.0, but this is for 8 and 9" in line
    [line] = enable(made(tmp_path / "c", real, version=90100))["said"]
    assert "is cuDNN 9.1.0, but" in line and "/cudnn.h is of 9." in line


def test_headers_are_of_the_version_of_the_library(tmp_path):
    for folder, numbers in {"include": (9, 1, 2), "older": (8, 9, 7), "odd": ()}.items():
        (tmp_path / folder).mkdir()
        names = zip(("MAJOR", "MINOR", "PATCHLEVEL"), numbers)
        text = "".join(f"#define CUDNN_{name} {number}\n" for name, number in names)
        (tmp_path / folder / "cudnn_version.h").write_text(text)
        (tmp_path / folder / "cudnn.h").write_text('#include "cudnn_version.h"\n')
    library = str(tmp_path / "lib" / "libcudnn.so")
    assert cudnn.find_headers(library, 90102) == str(tmp_path / "include")
    assert cudnn.find_headers(library, 8907, str(tmp_path / "older")) == str(tmp_path / "older")
    with pytest.raises(
        cudnn.UnusableError, match=r"is cuDNN 9.1.0, but .*include/cudnn.h is of 9.1.2"
    ):
        cudnn.find_headers(library, 90100)
    with pytest.raises(cudnn.UnusableError, match=r"its header cudnn.h is not in .*odd"):
        cudnn.find_headers(library, 90100, str(tmp_path / "odd"))


def test_bad_values_and_ranks_that_differ_are_refused(monkeypatch):
    for text, wanted in {"": False, "0": False, " 1 ": True}.items():
        monkeypatch.setenv(cudnn.VARIABLE, text)
        assert cudnn.tf32() == wanted
    monkeypatch.setenv(cudnn.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"SYNKHRONOS_TF32 must be 1 .* or 0 .*, but it is 'yes'"):
        cudnn.tf32()
    cudnn.refuse_other(None)
    theirs = cudnn.Facts(92800, tf32=True, deterministic=False)
    with pytest.raises(
        RuntimeError, match=r"computes with cuDNN 9.28.0 and TF32, this rank with none"
    ):
        cudnn.refuse_other(theirs)


@needs_theano
def test_workers_refuse_what_was_compiled_for_another_cudnn(monkeypatch):
    from synkhronos._host.theano import pickling

    monkeypatch.setattr(cudnn, "_enabled", [cudnn.Facts(8907, tf32=False, deterministic=True)])
    alike, portable = (pickling.dump({}, {}, {}, portable=each) for each in (False, True))
    assert pickling.load(alike, {}) == ({}, ())
    monkeypatch.setattr(cudnn, "_enabled", [])
    assert pickling.load(portable, {}) == ({}, ())
    with pytest.raises(RuntimeError, match=r"with cuDNN 8.9.7 and deterministic=more, this rank"):
        pickling.load(alike, {})
