"""Model files are found by a dotted name or a path, and looked at without being run."""

import sys

import pytest

from synkhronos.rules import modelfile


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cifar10.py").write_text(
        "raise SystemExit('it was run')\nclass Cifar10_model: pass\nOther = Cifar10_model\n"
        "try:\n    from a import B\nexcept ImportError:\n    class C: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["models.cifar10", "models/cifar10.py", "./models/cifar10.py"])
@pytest.mark.parametrize("of_class", ["Cifar10_model", "Other", "B", "C"])
def test_found(folder, name, of_class):
    found = modelfile.find(name, of_class)
    assert found.resolve() == folder / "models" / "cifar10.py"


def test_found_on_the_path_and_in_packages(folder, monkeypatch):
    (folder / "lib" / "net").mkdir(parents=True)
    (folder / "lib" / "net" / "__init__.py").write_text("from .parts import *\n")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    assert modelfile.find("net", "Any") == folder / "lib" / "net" / "__init__.py"
    (folder / "net.py").write_text("class Any: pass\n")
    assert modelfile.find("net", "Any").name == "__init__.py"  # the working folder is the last


def test_a_file_that_this_python_cannot_read_is_left_to_the_ranks(folder):
    (folder / "old.py").write_text("print 'Python 2'\n")
    assert modelfile.find("old", "Model").name == "old.py"


@pytest.mark.parametrize(
    ("name", "of_class", "error", "message"),
    [
        ("models.cifar1", "A", FileNotFoundError, r"models/cifar1.py is neither in .* nor on"),
        ("models.cifar1", "A", FileNotFoundError, r"Perhaps you meant cifar10.py"),
        ("models/cifar1.py", "A", FileNotFoundError, r"no model file .*Perhaps you meant cifar10"),
        ("models", "A", FileNotFoundError, "there is no module 'models'"),
        ("models..x", "A", ValueError, "modelfile must be a dotted name such as models.cifar10"),
        ("", "A", ValueError, "modelfile must be a dotted name"),
        (None, "A", TypeError, "modelfile must be a text, got None"),
        ("models.cifar10", 3, TypeError, "modelclass must be a text, got 3"),
        ("models.cifar10", "a b", ValueError, "the name of a class, got 'a b'"),
        (
            "models.cifar10",
            "Cifar10_modle",
            ValueError,
            "has no class 'Cifar10_modle'; its classes are C, Cifar10_model. Perhaps you meant Cif",
        ),
        ("theanompi.models.nothing", "A", FileNotFoundError, "theanompi/models/nothing.py"),
    ],
)
def test_refused(folder, name, of_class, error, message):
    with pytest.raises(error, match=message):
        modelfile.find(name, of_class)


def test_a_file_without_classes(folder):
    (folder / "empty.py").write_text("")
    with pytest.raises(ValueError, match="it has no class"):
        modelfile.find("empty", "Model")


@pytest.mark.parametrize(
    ("text", "missing", "extra"),
    [
        ("import numpy, lasagne.layers", "lasagne", "demos"),
        ("from keras.layers import Dense", "keras", "demos"),
        ("from theanompi.models.data import Cifar10_data", "sklearn", "rules"),
        ("from theanompi.models.data import ImageNet_data", "sklearn", None),
        ("try:\n    import h5py\nexcept ImportError:\n    pass", "h5py", None),
        ("from .keras import Dense", "keras", None),
        ("import a_package_of_mine", "a_package_of_mine", None),
        ("import lasagne  # the folder's own", "lasagne", None),
        ("import sys\nsys.path.append('libraries')\nimport lasagne", "lasagne", None),
        ("print 'Python 2'", "lasagne", None),
    ],
)
def test_a_package_that_a_model_needs_is_named_with_its_extra(
    folder, monkeypatch, text, missing, extra
):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    monkeypatch.setenv("SYNKHRONOS_DATA", "digits")
    file = folder / "models" / "needs.py"
    file.write_text(text)
    if "own" in text:
        (folder / "lasagne.py").write_text("")
    if extra is None:
        modelfile.check_packages(file, "models.needs")
        return
    said = rf"models.needs needs {missing}, .* pip install 'synkhronos\[{extra}\]'$"
    with pytest.raises(ImportError, match=said):
        modelfile.check_packages(file, "models.needs")
