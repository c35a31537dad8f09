"""The choice of the host library, and what is said about graphs of the other one."""

import sys
from types import SimpleNamespace

import pytest
from support.running import python, python_path

from synkhronos._host import choice, pythons
from synkhronos.tools import info

OLD, NEW = (3, 11), (3, 12)
MODULE = SimpleNamespace()


def chosen(environment=None, imported=(), installed=(), version=OLD):
    return choice.choose(
        {} if environment is None else {choice.VARIABLE: environment},
        dict.fromkeys(imported, MODULE),
        set(installed).__contains__,
        version,
    )


@pytest.mark.parametrize(
    "environment, imported, installed, version, host",
    [
        (None, (), ["theano"], OLD, "theano"),
        (None, (), ["pytensor"], OLD, "pytensor"),
        ("", (), ["pytensor"], NEW, "pytensor"),
        (None, (), ["theano", "pytensor"], OLD, "theano"),
        (None, (), ["theano", "pytensor"], NEW, "pytensor"),
        (None, (), ["theano"], NEW, "theano"),  # whose import says what is missing
        (None, ["pytensor"], ["theano", "pytensor"], OLD, "pytensor"),
        (None, ["theano"], ["theano", "pytensor"], NEW, "theano"),
        (None, ["pytensor", "theano"], ["theano", "pytensor"], OLD, "theano"),
        ("theano", ["pytensor"], ["theano", "pytensor"], OLD, "theano"),
        (" PyTensor ", ["theano"], ["theano", "pytensor"], OLD, "pytensor"),
    ],
)
def test_the_library_that_is_named_or_imported_or_else_installed_is_chosen(
    environment, imported, installed, version, host
):
    assert chosen(environment, imported, installed, version) == host


def test_none_in_place_of_a_module_is_not_imported():
    modules = {"theano": None, "pytensor": MODULE}
    assert choice.choose({}, modules, lambda name: True, OLD) == "pytensor"


def test_what_is_unknown_or_not_there_is_refused():
    with pytest.raises(ValueError, match=r"must be 'theano' or 'pytensor'.*got 'jax'"):
        chosen("jax", (), ["theano"])
    with pytest.raises(ImportError, match="asks for PyTensor, which is not installed"):
        chosen("pytensor", (), ["theano"])


@pytest.mark.parametrize("version, numbers", [(OLD, "3.11"), (NEW, "3.12")])
def test_without_a_library_the_commands_are_named(version, numbers):
    with pytest.raises(ImportError) as caught:
        chosen(None, (), (), version)
    message = str(caught.value)
    assert f"Python {numbers}" in message
    assert "`pip install synkhronos` installs PyTensor" in message
    assert pythons.REQUIREMENT in message and message.endswith("`.")


@pytest.mark.parametrize(
    ("missing", "last"),
    [
        ("numpy", f"None in sys.modules: {choice.TO_INSTALL}."),
        ("shlex", "ModuleNotFoundError: import of shlex halted; None in sys.modules"),
    ],
)
def test_the_command_line_says_what_to_install_if_numpy_is_missing(missing, last):
    code = f"import sys; sys.modules[{missing!r}] = None; import synkhronos.__main__"
    done = python("-c", code)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(last)


def test_this_process_has_a_host_that_it_has_imported():
    from synkhronos import _host

    name = choice.choose()
    assert _host.library.__name__.split(".")[0] in (name, "theano")
    assert choice.needs_cures() == (name == "theano")


def test_a_module_without_a_spec_counts_as_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "theano", SimpleNamespace(__spec__=None))
    assert choice._is_installed("theano")


def test_values_of_the_other_library_are_recognized():
    Graph = type("TensorVariable", (), {"__module__": "pytensor.tensor.variable"})
    Own = type("Own", (Graph,), {"__module__": "my_script"})
    for value in (Graph(), Own()):
        assert choice.library_of(value) == "pytensor"
        assert choice.advice(value, "PyTensor") == ""
        assert "is of PyTensor, but the host library of this process is Theano" in choice.advice(
            value, "Theano"
        )
    assert choice.library_of(3) == choice.advice(3, "Theano") == ""


def test_another_release_of_pytensor_is_told_what_to_install(tmp_path):
    (tmp_path / "pytensor.py").write_text("__version__ = '2.38.1'")
    path = python_path(tmp_path)
    done = python(
        "-c", "import synkhronos; synkhronos.fork(2)", SYNKHRONOS_HOST="pytensor", PYTHONPATH=path
    )
    sentence = pythons.advice_of_release("2.38.1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}."
    facts = {"pytensor": "2.38.1", "path": str(tmp_path)}
    assert info.check_pytensor(facts, "").advice == sentence
    assert pythons.advice_of_release("3.1.0") == pythons.advice_of_release("3.3.9") == ""
