"""Layers only look down: what each module imports, at any place in it, lies below it."""

import ast
from pathlib import Path

import pytest

import synkhronos

PACKAGE = Path(synkhronos.__file__).parent

# From the ground up. A module may import those of the layers below; those of one layer, each other
# in the order in which they are listed.
LAYERS = [
    [
        "errors",
        "_checks",
        "_conversion",
        "_partition",
        "_blocks",
        "_reduction",
        "_selection",
        "_host.theano.import_support",
        "_cuda_libraries",
        "_log",
        "_names",
        "_files",
        "_timeline",
        "_summary",
    ],
    [
        "_process",
        "_reports",
        "_theano_probe",
        "_host",
        "_host.theano",
        "_host.theano.devices",
        "_host.theano.graph",
        "_host.theano.rewriting",
        "_host.theano.portable",
        "_host.theano.compile_cache",
        "_host.theano.variables",
        "_host.theano.functions",
        "_host.theano.pickling",
        "_host.theano.random_numbers",
        "_host.theano.host",
        "_hints",
        "_devices",
        "_shm",
        "comm",
        "_recorder",
        "_staging",
        "_cells",
        "_gate",
    ],
    [
        "comm.composition",
        "comm.single",
        "comm.outboxes",
        "comm.homes",
        "comm.exchanges",
        "comm.shared",
        "comm.nccl",
        "comm.transports",
        "_outputs",
        "_replica",
        "_commands",
    ],
    ["_worker"],
    ["_registry", "_garbage", "_master", "_current"],
    # Data is made in a session, the current one.
    ["inputs", "_signature", "_binding", "_request", "_operands"],
    ["functions", "collectives", "values", "ops", "_status"],
    ["_recording", "profiling", "session"],
    [
        "extensions",
        "extensions._gradients",
        "extensions._precision",
        "extensions._adaptive",
        "extensions.rules",
        "extensions._flat",
        "extensions.updates",
        "extensions._two_steps",
        "extensions.train",
        "extensions._keras_checks",
        "extensions._keras_updates",
        "extensions.keras",
    ],
    ["_info", "function_module", "data_module"],
    ["__init__"],
    [
        "benchmarks",
        "benchmarks.call",
        "benchmarks.function",
        "benchmarks.options",
        "benchmarks.imports",
        "benchmarks.models",
        "benchmarks.peers",
        "benchmarks.collectives",
        "benchmarks.networks",
        "benchmarks.training",
        "benchmarks.scaling",
        "__main__",
    ],
]
ORDER = {name: place for place, name in enumerate(name for layer in LAYERS for name in layer)}
# The only importers of what they hide.
ONLY = {
    "theano": {
        "_host.theano.devices",
        "_host.theano.graph",
        "_host.theano.rewriting",
        "_host.theano.portable",
        "_host.theano.compile_cache",
        "_host.theano.variables",
        "_host.theano.functions",
        "_host.theano.pickling",
        "_host.theano.random_numbers",
        "_host.theano.host",
        "_host.theano.import_support",
        "_theano_probe",
        "_info",
        "benchmarks.networks",  # pooling and batch normalization, which no other host has
    },
    "pygpu": {"_host.theano.devices", "comm.nccl", "_theano_probe", "_devices", "_info"},
    "posix_ipc": {"_shm", "_info"},
    "mpi4py": {"comm.mpi", "benchmarks.peers"},
    "torch": {"benchmarks.peers"},
    "keras": {"extensions.keras", "extensions._keras_checks"},
    "matplotlib": {
        "profiling",
        "benchmarks.collectives",
        "benchmarks.training",
        "benchmarks.scaling",
    },
    "threadpoolctl": {
        "_devices",
        "_info",
        "_theano_probe",
        "benchmarks.function",
        "benchmarks.training",
    },
    "multiprocessing": {"benchmarks.call", "benchmarks.training"},
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text())


MODULES = {name: tree for name, tree in modules() if name != "conftest"}


def imports(name):
    """Return the full names of all that a module imports, at the top or inside a function."""
    found = []
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own_imports(name):
    """Return the modules of the package that a module imports."""
    found = set()
    for full in imports(name):
        if full.split(".")[0] == "synkhronos":
            parts = full.split(".")[1:]
            while parts and ".".join(parts) not in MODULES:
                parts.pop()
            found.add(".".join(parts) or "__init__")
    return found - {name}


def test_every_module_has_its_layer():
    assert set(MODULES) <= set(ORDER)
    assert {"session", "functions", "inputs", "_gate", "_shm", "comm.shared"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_look_down(name):
    for other in own_imports(name):
        assert ORDER[other] < ORDER[name], f"{name} imports {other}"


def test_the_parser_sees_what_is_there():
    assert own_imports("functions") >= {"_current", "inputs", "_request", "_reduction"}
    assert own_imports("comm") == {"_reports", "errors"}
    assert "_worker" in own_imports("_master") and "errors" in own_imports("session")


@pytest.mark.parametrize("name", MODULES)
def test_what_is_hidden_is_imported_in_one_place(name):
    for full in imports(name):
        top = full.split(".")[0]
        assert name in ONLY.get(top, {name}), f"{name} imports {full}"


SPEAK = (
    "__main__",
    "_info",
    "_host.theano.import_support",
    "_theano_probe",
    "benchmarks",
    "benchmarks.call",
    "benchmarks.function",
    "benchmarks.options",
    "benchmarks.imports",
    "benchmarks.collectives",
    "benchmarks.training",
    "benchmarks.scaling",
)


@pytest.mark.parametrize("name", sorted(set(MODULES) - set(SPEAK)))
def test_no_print_in_the_library(name):
    calls = [node for node in ast.walk(MODULES[name]) if isinstance(node, ast.Call)]
    assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_for_and_are_not_long(name):
    assert ast.get_docstring(MODULES[name])
    assert len(lines_of_code(MODULES[name])) <= 400


def lines_of_code(tree):
    """Return the numbers of the lines that hold code: no docstrings, comments and blank lines."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
    }
    return {
        line
        for node in ast.walk(tree)
        if hasattr(node, "lineno") and not isinstance(node, ast.Expr) and id(node) not in docstrings
        for line in (
            [node.lineno] if hasattr(node, "body") else range(node.lineno, node.end_lineno + 1)
        )
    }


@pytest.mark.parametrize("name", MODULES)
def test_only_the_ranks_of_one_machine_know_that_they_share_it(name):
    shares_machine = {"os.getpid", "os.kill", "os.fork", "mmap", "signal"}
    allowed = {
        "session",
        "_gate",
        "_cells",
        "_worker",
        "_shm",
        "_process",
        "_reports",
    }
    if name not in allowed | {
        "_host.theano.import_support",
        "_info",
        "_status",
        "benchmarks.call",
        "benchmarks.function",
        "benchmarks.peers",
        "__main__",
        "_devices",
    }:
        used = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(MODULES[name])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not shares_machine & (used | {full.split(".")[0] for full in imports(name)})
