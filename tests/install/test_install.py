"""The import support, in interpreters of their own, and what wheels and sdists contain."""

import configparser
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
import tarfile
import textwrap
import types
import zipfile
from pathlib import Path

import pytest
from support import running

import synkhronos
from synkhronos._host import pythons
from synkhronos._host.theano import import_support

ROOT = Path(__file__).parents[2]
SOURCE = Path(import_support.__file__)

needs_installation = pytest.mark.skipif(
    importlib.util.find_spec("_synkhronos_import_support") is None,
    reason="synkhronos is not installed: pip install -e .",
)
needs_setup = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="setup.py is not here: run in a source tree"
)

# What an environment without the .pth file would be.
FORGET = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "TheanoFinder"]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a home with no files but the compile cache, which all tests of this module share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def home_with(home, tmp_path):
    """Return a function that makes a home with the given .theanorc and the common cache."""

    def make(theanorc):
        (home / ".theano").mkdir(exist_ok=True)
        (tmp_path / ".theano").symlink_to(home / ".theano")
        (tmp_path / ".theanorc").write_text(textwrap.dedent(theanorc))
        return tmp_path

    return make


def python(code, home, **variables):
    """Run `code` in a new interpreter that must succeed quietly, and return its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THEANO")}
    line = sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)
    child = running.run(*line, cwd=home, env={**environment, "HOME": str(home), **variables})
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout


PRINT_LDFLAGS = "import theano; print(theano.config.blas.ldflags)"


@needs_installation
def test_plain_import_gets_default_flags_and_writes_no_rc(home):
    expected = import_support.default_flags()["blas.ldflags"]
    assert expected
    assert python(PRINT_LDFLAGS, home) == expected + "\n"
    assert [path.name for path in home.iterdir()] == [".theano"]


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_no_device_is_opened_and_no_new_cudnn_is_tried_by_default(home):
    code = """
    import os
    before = dict(os.environ)
    import theano
    assert before == dict(os.environ)
    print(theano.config.device, theano.config.force_device, theano.config.dnn.enabled)
    """
    assert python(code, home) == "cpu True False\n"
    flags = "dnn.enabled=auto,force_device=False"
    assert python(code, home, THEANO_FLAGS=flags) == "cpu False auto\n"


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_scipy_is_not_imported_to_find_it(home):
    code = """
    import sys, _synkhronos_import_support as support
    support.default_flags()
    print([name for name in sys.modules if name.split(".")[0] in ("scipy", "numpy", "theano")])
    """
    assert python(code, home) == "[]\n"


@needs_installation
@pytest.mark.slow("compiles with an empty cache")
def test_gemm_calls_the_blas_of_scipys_wheel(home):
    code = """
    import subprocess, numpy as np, theano, theano.tensor as T
    x, y = T.fmatrices(2)
    f = theano.function([x, y], T.dot(x, y))
    a, b = np.random.RandomState(0).rand(2, 8, 8).astype("float32")
    np.testing.assert_allclose(f(a, b), a.dot(b), rtol=1e-5)
    [node] = f.maker.fgraph.toposort()
    needed = [line.split()[-1] for line in open("/proc/self/maps") if "libopenblasp-r0" in line]
    print(type(node.op).__name__, any("scipy.libs" in path for path in needed))
    print([flag for flag in node.op.c_libraries() if "openblasp" in flag] != [])
    """
    # Its speed beside NumPy's is a figure of `synkhronos info`.
    assert python(code, home).split() == ["Dot22", "True", "True"]


@needs_installation
@pytest.mark.slow("compiles a scan with an empty cache")
def test_scan_works_and_pickles(home):
    code = """
    import pickle, numpy as np, theano, theano.tensor as T
    x = T.dvector()
    y, _ = theano.scan(lambda a, total: total + a, sequences=x, outputs_info=np.float64(0))
    f = theano.function([x], y)
    for f in f, pickle.loads(pickle.dumps(f)):
        assert f([1, 2, 3]).tolist() == [1, 3, 6]
    """
    assert python(code, home) == ""


SLOW = pytest.mark.slow("imports Theano in a new interpreter")


@needs_installation
@pytest.mark.parametrize(
    ("theanorc", "variables", "expected"),
    [
        ("[blas]\nldflags = -lm\n[global]\nfloatX = float32\n", {}, "-lm float32\n"),
        pytest.param(
            "[blas]\nldflags = -lm\n",
            {"THEANO_FLAGS": "blas.ldflags=-lc"},
            "-lc float64\n",
            marks=SLOW,
        ),
        pytest.param(
            "[blas]\ncheck_openmp = False\n[global]\nfloatX = float32\n",
            {},
            f"{import_support.find_blas()[0]} float32\n",
            marks=SLOW,
        ),
        pytest.param("", {"THEANORC": "rc:absent"}, "-lc float64\n", marks=SLOW),
    ],
    ids=["theanorc", "THEANO_FLAGS", "theanorc without ldflags", "THEANORC"],
)
def test_settings_of_the_user_win(home_with, theanorc, variables, expected):
    home = home_with(theanorc)
    (home / "rc").write_text("[blas]\nldflags = -lc\n")
    code = "import theano; print(theano.config.blas.ldflags, theano.config.floatX)"
    assert python(code, home, **variables) == expected


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_folder_with_a_space_links(home_with, tmp_path):
    flags, origin = import_support.find_blas()
    if origin != "SciPy's wheel":
        pytest.skip("SciPy has no library of its own here: install its wheel")
    folder, library = shlex.split(flags)
    (tmp_path / "a folder").symlink_to(folder[len("-L") :])
    home = home_with(f"[blas]\nldflags = '-L{tmp_path}/a folder' {library}\n")
    code = """
    import theano, theano.tensor as T
    x, y = T.dvectors(2)
    print(theano.function([x, y], T.outer(x, y))([1, 2], [3, 4]).tolist())
    """
    assert python(code, home) == "[[3.0, 4.0], [6.0, 8.0]]\n"


@pytest.mark.slow("imports Theano in a new interpreter")
def test_source_tree_supports_theano_without_an_installation(home):
    code = f"{FORGET}\nsys.path.insert(0, {str(SOURCE.parents[3])!r})\nimport synkhronos\n"
    expected = import_support.find_blas()[0]
    assert python(code + PRINT_LDFLAGS, home) == expected + "\n"


def test_install_is_idempotent_across_copies(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_support.install()
    before = list(sys.meta_path)
    runpy.run_path(str(SOURCE))["install"]()
    import_support.install()
    assert sys.meta_path == before


def test_interpreters_pay_for_no_import(home):
    code = f"""
    import sys
    source, before = open({str(SOURCE)!r}).read(), set(sys.modules)
    exec(source, {{"__name__": "support"}})
    print(sorted(set(sys.modules) - before))
    """
    assert python(code, home) == "[]\n"


def test_defaults_keep_a_percent_sign(monkeypatch):
    flags = {"blas.ldflags": "-L/100%/lib -lopenblas"}
    monkeypatch.setattr(import_support, "default_flags", lambda: flags)
    # set_defaults() writes it; monkeypatch puts back what was there before.
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    theano_configparser = types.SimpleNamespace(
        THEANO_FLAGS_DICT={},
        theano_cfg=configparser.ConfigParser(),
        theano_raw_cfg=configparser.RawConfigParser(),
    )
    import_support.set_defaults(theano_configparser)
    for config in theano_configparser.theano_cfg, theano_configparser.theano_raw_cfg:
        assert config.get("blas", "ldflags") == flags["blas.ldflags"]


@pytest.mark.skipif(sys.platform != "linux", reason="the flags are those of Linux")
@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ({"openblas": "libopenblas.so.0"}, ("-l:libopenblas.so.0", "the system")),
        ({"blas": "libblas.so.3"}, ("-l:libblas.so.3", "the system")),
        ({}, ("", "nowhere")),
    ],
)
def test_blas_without_the_wheel_of_scipy(monkeypatch, system, expected):
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", system.get)
    assert import_support.find_blas() == expected


def test_supported_pythons_have_one_host_each_and_others_get_a_sentence():
    for version in ((3, 8, 0), (3, 11, 7), (3, 12), (3, 14, 2)):
        pythons.check(version)
        assert pythons.is_for_theano(version) == (version < (3, 12))
    for version in ((2, 7), (3, 7), (3, 15), (4, 0)):
        with pytest.raises(ImportError, match=r"needs Python 3\.8 to 3\.11, with Theano, or 3\.12"):
            pythons.check(version)
    for platform, name in (("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")):
        with pytest.raises(ImportError, match=f"needs Linux, and this is {name}: run it in a virt"):
            pythons.check((3, 11), platform)


def test_an_import_without_a_package_says_what_to_install():
    done = running.code("import sys; sys.modules['posix_ipc'] = None; import synkhronos")
    last = done.stderr.splitlines()[-1]
    assert last.endswith("packages that are not installed here: pip install posix_ipc")


# A Python whose site-packages are not there.
WITHOUT_THEANO = f"""
import importlib.util, sys
from importlib.machinery import ModuleSpec, PathFinder
exec(open({str(SOURCE)!r}).read())
install(has_theano=False)
print(importlib.util.find_spec("theano"))
for name in ("theano", "theano.tensor", "theanos"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name, error)
sys.meta_path.append(PathFinder)  # as of another installation, begun later
sys.path.append(sys.argv[1])
import theano
print(theano.own)
"""


def test_an_import_of_theano_on_a_python_without_it_says_what_to_write(tmp_path):
    (tmp_path / "theano.py").write_text("own = True")
    sys_path = str(tmp_path)
    done = running.python("-I", "-S", "-c", WITHOUT_THEANO, sys_path)
    assert done.stdout.splitlines() == [
        "None",
        f"theano {import_support.NO_THEANO}",
        f"theano {import_support.NO_THEANO}",
        "theanos No module named 'theanos'",
        "True",
    ]
    assert f"Python {pythons.span(pythons.THEANO)}, and this" in import_support.NO_THEANO


@pytest.mark.parametrize("numpy", ["1.24.0", "2.4.6"])
def test_a_numpy_that_is_too_new_for_theano_is_named_with_what_to_install(tmp_path, numpy):
    for name, version, code in [
        ("numpy", numpy, f"__version__ = {numpy!r}"),
        ("theano", "1.0.5", "import numpy; numpy.bool" if numpy < "2" else "raise KeyError"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        (tmp_path / f"{name.title()}-{version}.dist-info").mkdir()
    said = f"Theano 1.0.5 needs numpy<1.24, and this is {numpy}: pip install 'numpy<1.24'"
    path = {"PYTHONPATH": running.python_path(tmp_path, ROOT)}
    done = running.code(f"{FORGET}import synkhronos; import theano", cwd=tmp_path, **path)
    lines = done.stderr.splitlines()
    assert lines[0] == f"<string>:4: UserWarning: {said}" and lines[-1] == f"ImportError: {said}"


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """Copy what a wheel is built from, so that building leaves nothing in the repository."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "synkhronos", tree / "synkhronos", ignore=ignored)
    return tree


def build(source_tree, folder, kind):
    """Build a wheel without a network, and return its files by name."""
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    child = running.code(code, cwd=source_tree)
    assert child.returncode == 0, child.stderr
    with zipfile.ZipFile(folder / child.stdout.split()[-1]) as wheel:
        return {name: wheel.read(name).decode() for name in wheel.namelist()}


@pytest.fixture(scope="module")
def wheel(source_tree, tmp_path_factory):
    """Return the files of a wheel by name."""
    return build(source_tree, tmp_path_factory.mktemp("wheel"), "wheel")


@needs_setup
@pytest.mark.parametrize("kind", ["wheel", pytest.param("editable", marks=pytest.mark.thorough)])
def test_wheels_hold_the_import_support_and_remove_it(source_tree, wheel, tmp_path, kind):
    files = wheel if kind == "wheel" else build(source_tree, tmp_path, kind)
    record = next(text for name, text in files.items() if name.endswith("/RECORD"))
    for name in ("_synkhronos_import_support.py", "synkhronos-import-support.pth"):
        # pip removes what RECORD lists.
        assert name in files
        assert f"\n{name}," in "\n" + record
    assert files["_synkhronos_import_support.py"] == SOURCE.read_text()
    assert files["synkhronos-import-support.pth"].count("\n") == 1  # Python runs each line
    entry_points = next(text for name, text in files.items() if name.endswith("entry_points.txt"))
    assert "synkhronos = synkhronos.__main__:main" in entry_points


@needs_setup
def test_wheel_holds_every_module(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "synkhronos").rglob("*.py")}
    assert {Path(each).name for each in modules - set(wheel)} == {"conftest.py"}  # only for tests
    assert "synkhronos/py.typed" in wheel  # tells type checkers that the package has type hints


@needs_setup
def test_sdist_has_all_that_is_not_generated(source_tree, tmp_path):
    kept = ("docs/page.rst", "tests/unit/test_page.py", ".ci/run", "Makefile", "demos/one.cfg")
    for name in (*kept, "docs/_build/page.html", "tests/unit/__pycache__/test_page.pyc"):
        (source_tree / name).parent.mkdir(parents=True, exist_ok=True)
        (source_tree / name).touch()
    code = f"from setuptools import build_meta as b; b.build_sdist({str(tmp_path)!r})"
    child = running.code(code, cwd=source_tree)
    assert child.returncode == 0, child.stderr
    with tarfile.open(next(tmp_path.iterdir())) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*kept, "synkhronos/conftest.py", "README.md", "LICENSE"} <= names
    assert not [name for name in names if "_build" in name or "__pycache__" in name]


@needs_setup
def test_the_index_shows_a_readme_whose_links_lead_somewhere(metadata):
    fields, _, readme = metadata.partition("\n\n")
    assert f"\nVersion: {synkhronos.__version__}\n" in fields
    assert "\nDescription-Content-Type: text/markdown\n" in fields
    assert "## Install" in readme
    links = re.findall(r"\]\((.*?)\)", readme)
    page = f"/blob/v{synkhronos.__version__}/docs/installation.rst"
    assert all(link.startswith("https://") for link in links)
    assert any(link.endswith(page) for link in links)


# What pip and the build see of a newer Python.
NEWER = """
import contextlib, platform, shutil, sys

with contextlib.suppress(ImportError):
    import packaging.requirements  # before: it asks for the version when it is imported

class Version(tuple):
    major, minor, micro = (property(lambda self, n=n: self[n]) for n in range(3))
    releaselevel, serial = "final", 0

sys.version_info = Version((3, 15, 1, "final", 0))
platform.python_version = lambda: "3.15.1"
platform.python_version_tuple = lambda: ("3", "15", "1")
rmtree = shutil.rmtree
shutil.rmtree = lambda *args, onexc=None, **kwargs: rmtree(*args, **kwargs)
"""


@needs_setup
def test_pip_shows_a_sentence_on_another_system(source_tree, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.platform = 'darwin'")
    code = "from setuptools import build_meta as b; b.get_requires_for_build_wheel()"
    done = running.code(code, cwd=source_tree, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Synkhronos needs Linux, and this is macOS: ")


@needs_setup
def test_setup_py_itself_ends_with_a_sentence_on_a_newer_python(source_tree, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NEWER)
    done = running.python("setup.py", "--version", cwd=source_tree, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Synkhronos needs Python 3.8 to 3.11, with")


def requirements(metadata, python, extra=""):
    """Return what pip installs for a wheel's metadata on a Python, by name."""
    requirement = pytest.importorskip("packaging.requirements")
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    found = [requirement.Requirement(line) for line in re.findall("Requires-Dist: (.*)", metadata)]
    return {
        each.name.lower().replace("_", "-"): str(each.specifier)
        for each in found
        if each.marker is None or each.marker.evaluate(environment)
    }


@pytest.fixture(scope="module")
def metadata(wheel):
    return next(text for name, text in wheel.items() if name.endswith("METADATA"))


BOTH = {"posix-ipc", "threadpoolctl", "cloudpickle"}


@needs_setup
@pytest.mark.parametrize("python", ["3.8", "3.11"])
def test_old_pythons_get_theano_and_the_numpy_that_it_works_with(metadata, python):
    needed = requirements(metadata, python)
    assert {*needed} == BOTH | {"theano", "numpy", "scipy", "setuptools"}
    assert (needed["theano"], needed["numpy"]) == ("==1.0.5", "<1.24")


@needs_setup
@pytest.mark.parametrize("python", ["3.12", "3.14"])
def test_new_pythons_get_pytensor_and_nothing_of_theano(metadata, python):
    needed = requirements(metadata, python)
    assert {*needed} == BOTH | {"pytensor", "numpy", "scipy"}
    assert (needed["pytensor"], needed["numpy"], needed["scipy"]) == ("<3.4,>=3.1", ">=2", "")
    for extra in ("dev", "demos", "test"):
        assert not {"theano", "lasagne", "downhill", "keras"} & {
            *requirements(metadata, python, extra)
        }


@needs_setup
def test_pymc_is_an_extra_that_pip_refuses_beside_theano(metadata):
    for python in ("3.11", "3.12"):
        assert {"pymc", "pytensor"} <= {*requirements(metadata, python, "pymc")}
        assert "pytensor" in requirements(metadata, python, "pytensor")
    assert not {"pymc", "pytensor"} & {*requirements(metadata, "3.11", "dev")}
    assert {"pymc", "pytensor"} <= {*requirements(metadata, "3.12", "dev")}
    assert requirements(metadata, "3.15") == {}  # nothing to compile where it is not supported


@needs_setup
@pytest.mark.parametrize(("python", "has_theano"), [((3, 11), True), ((3, 12), False)])
def test_pth_says_whether_this_python_has_theano(wheel, monkeypatch, python, has_theano):
    called = []
    support = types.SimpleNamespace(install=called.append)
    line = wheel["synkhronos-import-support.pth"]
    monkeypatch.setitem(sys.modules, "_synkhronos_import_support", support)
    monkeypatch.setattr(sys, "version_info", python)
    exec(line)
    assert called == [has_theano]


OLD_MODELS = """
import theano, lasagne
from theano.tensor.signal import downsample
x = theano.tensor.dmatrix()
image = x.dimshuffle("x", "x", 0, 1)
pooled = downsample.max_pool_2d(image, ds=(2, 2), st=(1, 1), ignore_border=True, padding=(0, 0))
print(pooled.eval({x: [[1, 2, 3], [4, 5, 6]]}).tolist())
layer = lasagne.layers.MaxPool2DLayer(lasagne.layers.InputLayer((None, 1, 2, 4)), 2)
print(lasagne.layers.get_output_shape(layer))
"""


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_lasagne_from_pypi_finds_the_pooling_that_it_asks_for(home):
    pytest.importorskip("lasagne")
    assert python(OLD_MODELS, home) == "[[[[5.0, 6.0]]]]\n(None, 1, 1, 2)\n"


@needs_installation
@pytest.mark.slow("imports Keras in a new interpreter")
def test_keras_finds_the_names_that_collections_had(home):
    pytest.importorskip("h5py")
    code = """
        import sys
        import collections
        before = hasattr(collections, "Mapping") and sys.version_info >= (3, 10)
        import keras
        from keras import layers, models
        model = models.Sequential([layers.Dense(2, input_shape=(3,))])
        model.compile("sgd", "mse")  # looks for collections.Mapping
        print(before, collections.Mapping is collections.abc.Mapping)
    """
    theano = {"KERAS_BACKEND": "theano", "THEANO_FLAGS": "mode=FAST_COMPILE"}
    done = running.code(code, HOME=str(home), **theano)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"]), done.stderr


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_a_folder_named_keras_is_imported_like_any_other(home, tmp_path):
    (tmp_path / "keras").mkdir()  # with no __init__.py
    (tmp_path / "keras" / "own.py").write_text("number = 3")
    code = f"""
        import sys
        # Before the real one would be found.
        sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if "site-packages" not in p)]
        import keras.own
        print(keras.own.number, keras.__file__)
    """
    assert python(code, home) == "3 None\n"


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_what_is_missing_in_theano_is_missing_still(home):
    code = """
    import importlib
    for name in ("theano.tensor.signal.upsample", "theano.nothing"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert python(code, home) == "theano.tensor.signal.upsample\ntheano.nothing\n"


@needs_installation
@pytest.mark.slow("imports Theano in a new interpreter")
def test_theano_does_not_start_mpi(home):
    """Theano imports mpi4py's MPI, which starts MPI, if it can: then no process may be forked."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    done = python(
        """
        import sys, theano, theano.tensor.io
        print("mpi4py.MPI" in sys.modules, theano.tensor.io.mpi_enabled)
        import mpi4py; mpi4py.rc.initialize = False
        from mpi4py import MPI
        print(MPI.Is_initialized(), MPI is sys.modules["mpi4py.MPI"])
        """,
        home,
    )
    assert done.split() == ["False", "False", "False", "True"]
