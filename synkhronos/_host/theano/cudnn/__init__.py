"""Let Theano's operations of cuDNN, which are for cuDNN 5 to 7, run with cuDNN 8 and 9.

    use("cuda0")   Theano opens the device; hold_back() keeps it from trying cuDNN by itself
    enable()       find() the library that the loader opens, and its headers
                   make a handle, and change the module theano.gpuarray.dnn of this process
    C compiler     the folder include/ comes first: its cudnn.h supplies what cuDNN has no longer
    pickles        facts(): a worker refuses functions compiled for another cuDNN

The loader's folder must have ``libcudnn.so``, a name without version, to link with. The headers
lie where the library really is, as in NVIDIA's wheels, or where systems have headers.
"""

import ctypes
import functools
import logging
import os
import re
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

from synkhronos._machine.log import log

VARIABLE = "SYNKHRONOS_TF32"
INCLUDE = Path(__file__).with_name("include")
OLDEST, NEWEST = 8, 9
# Theano's default algorithms are slow, and one gives different results in each run. With this value
# cuDNN chooses one for each shape. "guess_once" keeps a workspace, too small for larger shapes.
ALGORITHM = "guess_on_shape_change"
ALGORITHMS = ("algo_fwd", "algo_bwd_data", "algo_bwd_filter")
_USUAL_FOLDERS = ("/usr/include", "/usr/local/cuda/include")

_enabled = []  # the Facts of this process, once it uses cuDNN


class UnusableError(Exception):
    """cuDNN is there, but can't be used; the message says why."""


class CuDNN(NamedTuple):
    """A cuDNN that can be used: its version as it numbers itself, such as 92800."""

    version: int
    folder: str  # with libcudnn.so
    headers: str


class Facts(NamedTuple):
    """The properties of cuDNN that compiled functions depend on."""

    version: int
    tf32: bool
    deterministic: bool

    def __str__(self):
        rest = ["TF32"] * self.tf32 + ["deterministic=more"] * self.deterministic
        return " and ".join([f"cuDNN {shown(self.version)}", *rest])


def tf32() -> bool:
    """Return whether the environment wants float32 convolutions in TF32."""
    text = os.environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} must be 1 (float32 convolutions in TF32, which "
            f"is fast and keeps 10 bits of the mantissa) or 0 (in float32), but it is {text!r}"
        )
    return text == "1"


def facts():
    """Return the Facts of this process, or None where convolutions run without cuDNN."""
    return _enabled[0] if _enabled else None


def refuse_other(theirs) -> None:
    """Raise if functions that the master compiled don't fit the cuDNN of this process."""
    mine = facts()
    if theirs != mine:
        raise RuntimeError(
            f"The master computes with {theirs or 'no cuDNN'}, this rank with {mine or 'none'}. "
            "The ranks must agree: install the same on all machines, or set dnn.enabled=False in "
            "THEANO_FLAGS."
        )


def shown(version: int) -> str:
    """Return a version as people write it.

    >>> shown(8907), shown(92800)
    ('8.9.7', '9.28.0')
    """
    return "{}.{}.{}".format(*_split(version))


def _split(version):
    # cuDNN 9 and later number their versions in another way.
    major, rest = divmod(version, 10000 if version >= 90000 else 1000)
    return major, rest // 100, rest % 100


def hold_back() -> str:
    """Keep Theano from trying cuDNN 8 or later itself; return dnn.enabled, or "auto" if unset."""
    import theano
    from theano import configparser
    from theano.gpuarray import dnn

    wanted = theano.config.dnn.enabled
    if "dnn.enabled" in getattr(configparser, "set_by_synkhronos", ()):
        wanted = "auto"
    if dnn.version.v is not None and dnn.version.v < 1000 * OLDEST:
        return "False"  # one that Theano knows, which it has found by the user's flags
    theano.config.dnn.enabled = "False"
    dnn.dnn_present.avail, dnn.dnn_present.msg = False, "not enabled yet"
    return wanted


def enable(context, wanted: str, warns: bool) -> None:
    """Use cuDNN on a device, if there is one of a version that works here.

    If `wanted` is "auto", a cuDNN that can't be used is only logged, as a warning if this rank
    `warns`; if it is "True" or "no_check", a missing or unusable cuDNN raises RuntimeError.
    """
    if wanted == "False":
        return
    try:
        found = find()
        if found is not None:
            _use(found, context)
        elif wanted != "auto":
            raise UnusableError("libcudnn.so is not found")
    except UnusableError as problem:
        if wanted != "auto":
            raise RuntimeError(
                f"cuDNN can't be used, but the flag dnn.enabled is {wanted}: {problem}. "
                "`synkhronos info` says more."
            ) from problem
        text = "cuDNN can't be used: %s. Convolutions run as matrix products, which are slower."
        log.log(logging.WARNING if warns else logging.INFO, text, problem)


def find():
    """Return the CuDNN in the folders of Theano's flags, else the loader's; None if neither."""
    from theano import config

    folder, headers = config.dnn.library_path, config.dnn.include_path
    try:
        library = ctypes.CDLL(os.path.join(folder, "libcudnn.so"))
    except OSError as error:
        if "libcudnn.so: cannot open shared object file" in str(error):
            return None
        raise UnusableError(f"{error}") from None
    path = _path_of(library)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    version = library.cudnnGetVersion()
    check_version(path, version)
    return CuDNN(version, os.path.dirname(path), find_headers(path, version, headers))


def check_version(library: str, version: int) -> None:
    """Raise UnusableError if this module does not support a version of cuDNN."""
    if not OLDEST <= _split(version)[0] <= NEWEST:
        raise UnusableError(
            f"{library} is cuDNN {shown(version)}, but this is for {OLDEST} and {NEWEST}"
        )


def find_headers(library: str, version: int, given: str = "") -> str:
    """Return the folder with headers of a library's version; search only `given` if it is given."""
    real = Path(os.path.realpath(library)).parent.parent / "include"
    usual = [Path(folder) for folder in _USUAL_FOLDERS]
    multiarch = Path("/usr/include", sysconfig.get_config_var("MULTIARCH") or "")
    others = {}
    for folder in [Path(given)] if given else [real, multiarch, *usual]:
        of_header = header_version(folder)
        if of_header == version:
            return str(folder)
        if of_header:
            others[str(folder)] = shown(of_header)
    problem = f"its header cudnn.h is not in {given or real}"
    if others:
        [(folder, of_header), *_] = others.items()
        problem = f"{folder}/cudnn.h is of {of_header}"
    raise UnusableError(f"{library} is cuDNN {shown(version)}, but {problem}")


def header_version(folder: Path):
    """Return the version of the cudnn.h in a folder, or None if there is none."""
    numbers = {}
    for name in ("cudnn_version.h", "cudnn.h"):  # the first from cuDNN 8 on
        try:
            text = (folder / name).read_text(errors="replace")
        except OSError:
            if name == "cudnn.h":
                return None
            continue
        for what, number in re.findall(r"#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) (\d+)", text):
            numbers.setdefault(what, int(number))
    if len(numbers) < 3:
        return None
    step = 10000 if numbers["MAJOR"] >= 9 else 1000
    return numbers["MAJOR"] * step + numbers["MINOR"] * 100 + numbers["PATCHLEVEL"]


class _LinkMap(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _path_of(library) -> str:
    """Return the path by which the loader has opened a library, without following links."""
    link_map = ctypes.POINTER(_LinkMap)()
    ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), 2, ctypes.byref(link_map))
    return os.path.abspath(os.fsdecode(link_map.contents.name))


def _use(found, context):
    """Let Theano use this cuDNN in this process, or leave it without cuDNN if that fails."""
    from theano import config
    from theano.gpuarray import dnn

    before = config.dnn.library_path, config.dnn.bin_path
    config.dnn.library_path = config.dnn.bin_path = found.folder
    _enabled[:] = [Facts(found.version, tf32(), config.deterministic == "more")]
    try:
        context.cudnn_handle = dnn._make_handle(context)
        _change_theano(found)
        dnn.dnn_present.avail, dnn.dnn_present.msg = True, None
        dnn.version.v = found.version
        # It compiles a module, which tells now whether headers and library fit the compiler.
        capsule = dnn.handle_type.make_value(context.cudnn_handle.value)
        # Never freed: at exit Python frees it after the device is closed, and it needs the device.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
        context.cudnn_handle_param = capsule
    except Exception as error:
        config.dnn.library_path, config.dnn.bin_path = before
        dnn.dnn_present.avail, dnn.dnn_present.msg = False, f"{error}"
        dnn.version.v = None
        _enabled.clear()
        reason = " ".join(" ".join(map(str, error.args)).split()) or repr(error)
        raise UnusableError(
            f"cuDNN {shown(found.version)} in {found.folder}: {reason[:500]}"
        ) from error
    config.dnn.enabled = "auto"
    for name in ALGORITHMS:
        flag = getattr(type(config.dnn.conv), name)
        if flag.is_default and getattr(config.dnn.conv, name) == flag.default:
            setattr(config.dnn.conv, name, ALGORITHM)
    log.info("with %s in %s", facts(), found.folder)


def _change_theano(found):
    """Let the C compiler find headers and library, and refuse operations that cuDNN 9 can't run.

    Pickled types and operations hold the paths of the process that made them: the replaced methods
    return those of the process that compiles.
    """
    from theano.gof.type import CDataType
    from theano.gpuarray import dnn

    mine = facts()
    checksum = zlib.crc32(b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h"))))
    parts = {
        "c_header_dirs": [str(INCLUDE), found.headers],
        "c_lib_dirs": [found.folder],
        "c_compile_args": [
            f"-Wl,-rpath,{found.folder}",
            f"-DSYNKHRONOS_TF32={int(mine.tf32)}",
            f"-DSYNKHRONOS_DETERMINISTIC={int(mine.deterministic)}",
            f"-DSYNKHRONOS_HEADERS={checksum}",  # only for the key of the compile cache
        ],
    }
    for kind in (dnn.DnnBase, dnn.GpuDnnConvDesc, CDataType):
        for name, more in parts.items():
            _put_first(kind, name, more)
    original = CDataType.c_code_cache_version
    CDataType.c_code_cache_version = lambda self: (
        (*original(self), found.version) if _is_of_cudnn(self) else original(self)
    )
    for kind in (dnn.GpuDnnConv, dnn.GpuDnnConvGradW, dnn.GpuDnnConvGradI):
        _ask_for_memory_later(kind)
    if found.version >= 90000:
        for kind in (dnn.RNNBlock, dnn.GpuDnnRNNOp):
            _refuse_to_make(kind, found.version)


def _put_first(kind, name, more):
    original = getattr(kind, name)

    @functools.wraps(original)
    def extended(self):
        return more + list(original(self)) if _is_of_cudnn(self) else original(self)

    setattr(kind, name, extended)


def _is_of_cudnn(part):
    return "cudnn" in part.c_libraries()


def _ask_for_memory_later(kind):
    """Let convolutions ask for free memory only when they choose an algorithm, not in each call."""
    ask = "c_get_largest_free_block_size(c);"
    check = "\n        if (PyErr_Occurred()) { cuda_exit(c->ctx); return 1; }\n"
    choose = "if (params->choose_time) {\n        int count;"
    changes = {
        f"size_t maxfree = {ask}": "size_t maxfree = 0;",
        choose: f"maxfree = {ask}{check}{choose}",
    }
    original = kind.load_c_code

    def load_c_code(self, files):
        original(self, files)
        for old, new in changes.items():
            assert sum(code.count(old) for code in self.func_codes) == 1
            self.func_codes = [code.replace(old, new) for code in self.func_codes]
            for name, code in self.code_sections.items():
                self.code_sections[name] = code.replace(old, new)

    kind.load_c_code = load_c_code


def _refuse_to_make(kind, version):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            f"theano.gpuarray.dnn.{kind.__name__} needs calls that cuDNN {shown(version)} has no "
            "longer. Use theano.scan, or install cuDNN 8: pip install 'nvidia-cudnn-cu12<9'"
        )

    kind.__init__ = __init__
