"""The tests themselves: no test imports another one, and what they share is in ``support``."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# The check for machines with GPUs and the benchmarks are programs of their own; tests/ported has
# programs that tests run, and tests/support/on_pytensor has Theano's names for tests on PyTensor.
OTHER_PROGRAMS = {"benchmarks", "forging", "gpu", "on_pytensor"}
FILES = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if OTHER_PROGRAMS.isdisjoint(path.relative_to(TESTS).parts)
    and not path.name.startswith("serial_")
]
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]
SHARED = [path for path in FILES if path.parent == TESTS / "support"]


def names(paths):
    return [str(path.relative_to(TESTS)) for path in paths]


@functools.lru_cache(maxsize=None)
def imported(path):
    """Return the modules that a file imports, anywhere in it, also in scripts that it has as text.

    Of a name that comes from a module the full name is returned, which may be a module too.
    """
    found, trees = set(), [ast.parse(path.read_text())]
    for node in ast.walk(trees[0]):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "import" in node.value
        ):
            try:
                trees.append(ast.parse(node.value))
            except SyntaxError:
                continue  # a sentence
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_is_imported():
    tests = {each.stem for each in TEST_FILES} | {"conftest"}
    for path in FILES:
        assert not [name for name in imported(path) if tests & set(name.split("."))], path


def test_files_of_tests_have_names_of_their_own():
    # Pytest imports test files by their name, without that of the folder.
    assert [name for name, count in Counter(p.stem for p in TEST_FILES).items() if count > 1] == []


def test_every_file_with_tests_is_in_a_folder_that_says_what_it_is_about():
    assert names(path for path in TESTS.glob("*.py")) == ["conftest.py"]
    assert names(p for p in FILES if p not in TEST_FILES + SHARED) == ["conftest.py"]


@pytest.mark.parametrize("code", [r"'\s'", "1 is 1"])
def test_what_the_compiler_says_of_installed_packages_is_no_error(code):
    # It is said only where they were installed without byte code: PYTHONDONTWRITEBYTECODE=1.
    compile(code, "/usr/lib/python3/site-packages/theano/gpuarray/fft.py", "exec")
    with pytest.raises(SyntaxError):
        compile(code, "/home/theano/synkhronos/session.py", "exec")
