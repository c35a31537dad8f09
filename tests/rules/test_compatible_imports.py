"""What model files import: ``theanompi.*``, stand-ins, and names of Python 2 and of GPUs."""

import fcntl
import importlib
import importlib.util
import sys
import textwrap

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compatible import restored
from support.images import correlated
from theano.tensor.nnet import conv2d

from synkhronos.rules import array_files, compatible, modelfile
from synkhronos.rules.compatible.stand_ins import dnn

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(autouse=True)
def imports_restored():
    with restored():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder, with a function that writes a module into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return path

    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("models", "helper", "model_of_theirs", "tools_of_theirs"):
            del sys.modules[name]


def test_theirs_are_our_modules_and_no_copies():
    package = compatible.install()
    import theanompi.lib.opt

    from synkhronos.rules.compatible.lib import opt

    assert sys.modules["theanompi"] is package is compatible
    assert theanompi.lib.opt is opt and sys.modules["theanompi.lib.opt"] is opt
    assert opt.__spec__.name == opt.__name__ == "synkhronos.rules.compatible.lib.opt"
    assert compatible.install() is package
    assert sys.meta_path.count(compatible.finder.AliasFinder) == 1


@pytest.mark.parametrize("name", ["theanompi.models.data", "theanompi.models.layers2"])
def test_folders_are_served_too(name):
    compatible.install()
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations


def test_a_module_that_is_not_served_is_named():
    compatible.install()
    with pytest.raises(ModuleNotFoundError, match=r"lib\.nothing.*serves theanompi\.lib"):
        importlib.import_module("theanompi.lib.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"vgg16.*theanompi\.models\.lasagne_model_zoo"):
        importlib.import_module("theanompi.models.vgg16")
    with pytest.raises(AttributeError, match="no attribute 'DSP'"):
        compatible.DSP  # noqa: B018


def test_models_answer_to_their_names_in_theano_mpi():
    compatible.install()
    alex_net = importlib.import_module("theanompi.models.alex_net")
    assert alex_net.AlexNet is importlib.import_module("theanompi.models").AlexNet
    assert alex_net.__name__ == "synkhronos.rules.compatible.zoo.alex_net"
    lstm = importlib.import_module("theanompi.models.lstm_theanompi")
    assert lstm.LSTM is importlib.import_module("theanompi.models.lstm").LSTM
    for name in ("lasagne_model_zoo.vgg16", "lasagne_model_zoo.resnet50", "lasagne_model_zoo.wgan",
                 "lasagne_model_zoo.lsgan", "lasagne_model_zoo.lsgan_cifar10",
                 "keras_model_zoo.wresnet", "cifar10", "googlenet"):  # fmt: skip
        path = modelfile.find(f"theanompi.models.{name}", classes[name.rpartition(".")[2]])
        assert path.parent.name == "zoo" and path.stem == name.rpartition(".")[2]
    assert modelfile.find("theanompi.models", "Cifar10_model").parent.name == "models"


classes = {
    "vgg16": "VGG16", "resnet50": "ResNet50", "wgan": "WGAN", "lsgan": "LSGAN",
    "lsgan_cifar10": "LSGAN", "wresnet": "Wide_ResNet", "cifar10": "Cifar10_model",
    "googlenet": "GoogLeNet",
}  # fmt: skip


def test_an_installed_theano_mpi_is_hidden(folder):
    folder("theanompi/__init__.py", "raise ImportError('the real one')")
    compatible.install()
    assert importlib.import_module("theanompi") is compatible


def test_one_that_is_imported_already_is_refused(folder):
    folder("theanompi/__init__.py", "")
    importlib.import_module("theanompi")
    with pytest.raises(RuntimeError, match=r"imported already, from .*theanompi/__init__\.py"):
        compatible.install()


def test_rules_are_attributes_of_the_package():
    pytest.importorskip("synkhronos.rules.rule_classes", reason="needs the launcher's session API")
    compatible.install()
    from synkhronos.rules import rule_classes

    for name in compatible.RULES:
        assert getattr(importlib.import_module("theanompi"), name) is getattr(rule_classes, name)


# Model files.

OF_PYTHON_2 = """
    from theanompi.lib import opt
    import helper

    def lists():
        found = [map(str, xrange(3)), filter(None, [0, 1]), zip("ab", (1, 2)), map(None, "ab")]
        return found + [filter(str.isdigit, "a1"), filter(None, (0, 1))]

    def synced(p):
        p.container.value.sync()
        return p

    class Model(object):
        pass
"""


def test_names_of_python_2_are_there_and_builtins_stay(folder):
    folder("helper.py", "listed = isinstance(map(str, [1]), list)")
    folder("models/model_of_theirs.py", OF_PYTHON_2)
    module = compatible.import_model("models.model_of_theirs")
    expected = [["0", "1", "2"], [1], [("a", 1), ("b", 2)], ["a", "b"], "1", (1,)]
    assert module.lists() == expected
    assert not module.helper.listed  # it mentions nothing of Theano-MPI
    assert not isinstance(map(str, [1]), list) and not hasattr(importlib, "xrange")
    assert not (module.__spec__.cached and importlib.util.find_spec("models").origin)


def test_a_helper_that_mentions_theanompi_gets_them_and_the_model_in_any_case(folder):
    folder("helper.py", "# part of a model of theanompi\nlisted = isinstance(map(str, [1]), list)")
    folder("model_of_theirs.py", "import helper\nlisted = [helper.listed, type(zip()) is list]")
    assert compatible.import_model("model_of_theirs").listed == [True, True]


def test_a_model_is_imported_by_its_path(folder, tmp_path, monkeypatch):
    path = folder("models/model_of_theirs.py", "import os\nnumbers = map(int, '12')")
    module = compatible.import_model("models/model_of_theirs.py")
    assert module.numbers == [1, 2] and module.__name__ == "models.model_of_theirs"
    monkeypatch.chdir(tmp_path.parent)
    path.with_name("tools_of_theirs.py").write_text("import model_of_theirs as m\nn = m.numbers")
    elsewhere = compatible.import_model(str(path.with_name("tools_of_theirs.py")))
    assert elsewhere.__name__.endswith("models.tools_of_theirs") and [*elsewhere.n] == [1, 2]


def test_a_file_is_not_hidden_by_a_module_of_its_name(folder, tmp_path, monkeypatch):
    path = folder("models/json.py", "mine = zip([1], [2])")
    monkeypatch.chdir(tmp_path.parent)
    known = sys.modules["json"]
    try:
        assert compatible.import_model(str(path)).mine == [(1, 2)]
    finally:
        sys.modules["json"] = known


@pytest.mark.parametrize(
    "line, said",
    [
        ("print 'cost', 1", "written in Python 2: convert it with `2to3 -w"),
        ("try:\n    pass\nexcept ValueError, error:\n    pass", "Python 2"),
        ("raise ValueError, 'no'", "Python 2"),
        ("n = 0777", "Python 2"),
        ("if 1 <> 2: pass", "Python 2"),
    ],
)
def test_a_file_in_python_2_says_so(folder, line, said):
    path = folder("model_of_theirs.py", f"import theanompi\n{line}\n")
    with pytest.raises(SyntaxError, match=said) as caught:
        compatible.import_model("model_of_theirs")
    assert caught.value.filename == str(path) and caught.value.lineno > 1
    assert "model_of_theirs" not in sys.modules


def test_another_mistake_is_left_as_it_is(folder):
    folder("model_of_theirs.py", "import theanompi\nx = (1,\n")
    with pytest.raises(SyntaxError, match=r"never closed|EOF|unexpected") as caught:
        compatible.import_model("model_of_theirs")
    assert "Python 2" not in str(caught.value)


@pytest.mark.parametrize(
    "modelfile, kind, said",
    [
        ("models.missing", ModuleNotFoundError, r"No module models\.missing below .*PYTHONPATH"),
        ("theanompi.models.vgg16", ModuleNotFoundError, "lasagne_model_zoo.{vgg16"),
        ("models/missing.py", FileNotFoundError, r"No model file models/missing\.py"),
        ("", TypeError, "modelfile must be a dotted name"),
        (None, TypeError, "modelfile must be a dotted name"),
    ],
)
def test_a_model_that_is_not_there_is_refused(folder, modelfile, kind, said):
    folder("models/other.py", "")
    with pytest.raises(kind, match=said):
        compatible.import_model(modelfile)


def test_what_a_model_lacks_is_not_taken_for_the_model(folder):
    folder("model_of_theirs.py", "import helper.missing_part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'helper'"):
        compatible.import_model("model_of_theirs")


def test_parameters_of_a_cpu_rank_pass_for_those_of_a_gpu(folder):
    folder(
        "model_of_theirs.py",
        """
        from theano.gpuarray.type import GpuArraySharedVariable

        def check(p):
            p.container.value.sync()
            return [isinstance(p, GpuArraySharedVariable), isinstance(p, (int, str)),
                    isinstance(3, GpuArraySharedVariable), isinstance(3, (str, (int, bytes)))]
        """,
    )
    module = compatible.import_model("model_of_theirs")
    assert module.check(theano.shared(np.zeros(3), "p")) == [True, False, False, True]
    assert type(theano.shared(np.zeros(3)).container.value) is np.ndarray


def test_sync_of_anything_else_is_called(folder):
    folder("model_of_theirs.py", "def f(x):\n    return x.sync()")
    module = compatible.import_model("model_of_theirs")

    class Value:
        def sync(self):
            return "waited"

    assert module.f(Value()) == "waited" and module.f(np.float32(1)) is None
    with pytest.raises(AttributeError, match="sync"):
        module.f(3)


# cuDNN's functions on a CPU rank.


@pytest.mark.slow("compiles convolutions")
@pytest.mark.parametrize("mode", ["conv", "cross"])
def test_dnn_conv_computes_on_a_cpu(mode):
    compatible.install()
    dnn.install()
    from theano.gpuarray.dnn import dnn_conv

    random = np.random.RandomState(1)
    image, filters = random.randn(2, 3, 7, 6), random.randn(4, 3, 3, 2)
    x, w = T.dtensor4(), T.dtensor4()
    made = dnn_conv(x, w, border_mode=(1, 0), subsample=(2, 2), conv_mode=mode, algo="small")
    padded = np.pad(image, [(0, 0), (0, 0), (1, 1), (0, 0)])
    flipped = filters[:, :, ::-1, ::-1] if mode == "conv" else filters
    expected = correlated(padded, flipped, stride=2)
    f = theano.function([x, w], made, mode="FAST_RUN")
    np.testing.assert_allclose(f(image, filters), expected)


def test_dnn_functions_are_theanos_of_the_cpu():
    compatible.install()
    dnn.install()
    from theano.gpuarray.dnn import dnn_conv, dnn_pool

    for mode, flip in [("conv", True), ("cross", False)]:
        op = dnn_conv(T.dtensor4(), T.dtensor4(), "half", (2, 1), conv_mode=mode).owner.op
        assert (op.filter_flip, op.border_mode, op.subsample) == (flip, "half", (2, 1))
    op = dnn_pool(T.dtensor4(), (3, 3), (2, 2), mode="average").owner.op
    assert op.ignore_border and op.mode == "average_inc_pad"


def test_dnn_refuses_modes_that_cudnn_has_not():
    with pytest.raises(ValueError, match="conv_mode must be"):
        dnn.dnn_conv(T.dtensor4(), T.dtensor4(), conv_mode="flip")
    with pytest.raises(ValueError, match="mode must be one of max"):
        dnn.dnn_pool(T.dtensor4(), (2, 2), mode="min")


@pytest.mark.slow("compiles pooling")
@pytest.mark.parametrize("mode", ["max", "average_exc_pad", "average_inc_pad", "average"])
def test_dnn_pool_computes_on_a_cpu(mode):
    image = np.random.RandomState(1).rand(1, 2, 7, 7)  # the last rows fill no window
    x = T.dtensor4()
    made = dnn.dnn_pool(x, (2, 2), stride=(2, 2), mode=mode, pad=(1, 1))
    got = theano.function([x], made, mode="FAST_RUN")(image)
    filled = -np.inf if mode == "max" else (np.nan if mode == "average_exc_pad" else 0.0)
    padded = np.pad(image, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=filled)
    reduce = {"max": np.max, "average_exc_pad": np.nanmean}.get(mode, np.mean)
    expected = [
        [reduce(padded[0, c, i : i + 2, j : j + 2]) for i in (0, 2, 4, 6) for j in (0, 2, 4, 6)]
        for c in (0, 1)
    ]
    expected = np.reshape(expected, (1, 2, 4, 4))[:, :, : got.shape[2], : got.shape[3]]
    assert got.shape == (1, 2, 4, 4)
    np.testing.assert_allclose(got, expected)


def test_a_process_with_a_gpu_calls_theanos_own(monkeypatch):
    monkeypatch.setattr(dnn, "list_contexts", lambda: [None])
    monkeypatch.setitem(dnn._theirs, "dnn_conv", lambda *args, **kwargs: (args, kwargs))
    assert dnn.dnn_conv(1, 2, conv_mode="x") == ((1, 2), {"conv_mode": "x"})
    assert dnn.conv2d is conv2d


# Files of arrays.


def test_hickle_is_served_where_it_is_not_installed(tmp_path):
    pytest.importorskip("h5py")
    if importlib.util.find_spec("hickle"):
        pytest.skip("hickle is installed, so the real one is imported")
    compatible.install()
    hickle = importlib.import_module("hickle")
    array = np.arange(24, dtype="uint8").reshape(2, 3, 4)
    hickle.dump(array, str(tmp_path / "a.hkl"), mode="w")
    found = hickle.load(str(tmp_path / "a.hkl"))
    assert found.dtype == "uint8" and (found == array).all()
    assert (array_files.read(tmp_path / "a.hkl") == array).all()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_files_of_each_version_of_hickle_are_read(tmp_path, version):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hkl", "w") as file:
        file.attrs["CLASS"], file.attrs["VERSION"] = "hickle", version
        if version == 1:
            file["data"], file["type"] = [1.5, 2.5], [b"ndarray"]
        else:
            parent = file.create_group("data_0") if version == 2 else file
            parent["data_0" if version == 3 else "data"] = [1.5, 2.5]
    assert array_files.read(tmp_path / "a.hkl").tolist() == [1.5, 2.5]


def test_a_file_is_read_without_a_lock(tmp_path):
    """Some file systems of clusters have none."""
    pytest.importorskip("h5py")
    array_files.write_hickle(tmp_path / "a.hkl", np.arange(3))
    with open(tmp_path / "a.hkl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert array_files.read(tmp_path / "a.hkl").tolist() == [0, 1, 2]


def test_files_of_numpy_are_read(tmp_path):
    np.save(tmp_path / "a.npy", [1, 2])
    np.savez(tmp_path / "b.npz", [3, 4])
    assert array_files.read(tmp_path / "a.npy").tolist() == [1, 2]
    assert array_files.read(tmp_path / "b.npz").tolist() == [3, 4]


def test_files_without_one_array_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    np.savez(tmp_path / "two.npz", a=1, b=2)
    np.save(tmp_path / "object.npy", np.array([{}]))
    with h5py.File(tmp_path / "none.hkl", "w"):
        pass
    (tmp_path / "text.hkl").write_text("no HDF5")
    for name, said in [
        ("two.npz", "must have one array of numbers, but has 2: a, b"),
        ("object.npy", "no array that can be read without a pickle"),
        ("none.hkl", "must have one array of numbers, but has 0"),
        ("text.hkl", "no file of hickle"),
    ]:
        with pytest.raises(ValueError, match=said):
            array_files.read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing"):
        array_files.read(tmp_path / "missing.npy")
    with pytest.raises(TypeError, match="only arrays of numbers"):
        array_files.write_hickle(tmp_path / "o.hkl", np.array([{}]))
    with pytest.raises(ValueError, match="mode must be"):
        array_files.write_hickle(tmp_path / "o.hkl", np.ones(1), "r")
