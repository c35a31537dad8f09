"""The rooms of the package, computed from its sources: imports look down, and never in a circle."""

import ast
import functools
import re

from support.sources import MODULES, PACKAGE

# From the ground up. A module imports modules of its own floor and of the floors below it.
FLOORS = [
    ["errors", "_wording"],
    ["_arithmetic"],
    ["_machine"],
    ["_host"],
    ["_hints"],
    ["comm"],
    ["_rank"],
    ["_master"],
    ["inputs"],
    ["_calls"],
    ["functions", "collectives", "values", "ops", "checkpoints"],
    ["profiling"],
    ["session"],
    ["porting"],
    ["extensions"],
    ["rules", "parameter_server"],
    ["function_module", "data_module"],
    ["__init__"],
    ["tools"],
    ["__main__"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# It prepares Python for Theano, so it comes before everything, and imports nothing of the package.
BASEMENT = {"_host.theano.import_support"}

# The only importers of what they hide: modules, or all of a folder.
ONLY = {
    "theano": {
        "_host.theano",
        "tools.bench.networks",  # pooling and batch normalization, which no other host has
        "rules.compatible",  # for model files, which are written for Theano
    },
    "pytensor": {"_host.pytensor", "extensions.pymc"},
    "numba": {"_host.pytensor", "extensions.pymc"},
    "pymc": {"extensions.pymc", "tools.bench.pymc"},
    "pygpu": {"_host.theano", "comm.nccl", "rules.nccl", "_machine.devices", "tools.info"},
    "posix_ipc": {"_machine.shared_memory", "tools.info"},
    "mpi4py": {"comm.mpi", "tools.bench.machines.processes"},
    "torch": set(),
    "keras": {"extensions.keras"},
    "matplotlib": {
        "profiling",
        "rules.recorder",
        "tools.bench",
    },
    "threadpoolctl": {"_machine.devices", "tools"},
    "multiprocessing": {"rules.loading", "tools.bench"},
}

# What only ranks of one machine can use, and who may assume that they share it.
OF_ONE_MACHINE = {"os.getpid", "os.kill", "os.fork", "mmap", "signal"}
ON_ONE_MACHINE = {
    "_machine",
    "comm.shared",
    "comm.mpi.link",  # of a process with the carrier of its machine
    "comm.mpi.carrier",
    "comm.mpi.library",  # in its own process
    "comm.mpi.folders",
    "comm.reports",
    "_rank.worker",  # in its own process
    "_rank.leader",
    "tools.relay",  # of mpirun, and of the process that mpirun has started
    "_host.theano.import_support",
    "parameter_server.engine",  # in its own process
    "parameter_server.stores",  # in its own process
    "parameter_server.remote.mover",  # of a script with its mover
    "parameter_server.remote.node",
    "profiling.status",
    "rules.loading",  # of a rank with its loader
    "rules.places",
    "rules.session",  # of a script with its launcher
    "rules.worker",  # in its own process
    "session",
    "tools",
    "__main__",
}

SPEAK = {"__main__", "tools", "_host.pythons", "_host.theano.probe", "_host.pytensor.probe"}


def is_in(name, rooms):
    """Return whether a module is one of these, or in a folder of them."""
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def imports(name):
    """Return the full names of all that a module imports, at the top or inside a function."""
    return imported_by(MODULES[name], name)


@functools.lru_cache(maxsize=None)
def imported_by(tree, name):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            text = ast.unparse(node.args[0]) if hasattr(ast, "unparse") else ""
            if re.match(r"'synkhronos\.[\w.]+'$", text):
                found.append(ast.literal_eval(text))
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


def circles():
    """Return the groups of modules that import one another (Tarjan's algorithm)."""
    order, lowest, stack, found = {}, {}, [], []

    def visit(name):
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in own_imports(name):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in MODULES:
        if name not in order:
            visit(name)
    return found


def test_no_modules_import_one_another():
    assert circles() == []


def test_a_circle_would_be_found(monkeypatch):
    added = ast.parse("def late():\n    from synkhronos import functions")
    monkeypatch.setitem(MODULES, "_wording", added)
    assert any({"_wording", "functions"} <= set(group) for group in circles())


def test_imports_look_down():
    for name in MODULES:
        for other in own_imports(name) - BASEMENT:
            above, below = name.split(".")[0], other.split(".")[0]
            assert FLOOR_OF[below] <= FLOOR_OF[above], f"{name} imports {other}"
    assert not [name for name in BASEMENT if own_imports(name)]


def test_at_most_twelve_folders_stand_beside_the_public_modules():
    public = {
        "session",
        "porting",
        "functions",
        "inputs",
        "collectives",
        "values",
        "ops",
        "errors",
        "checkpoints",
    }
    public |= {"function_module", "data_module", "__init__", "__main__"}
    rooms = {name.split(".")[0] for name in MODULES} - public
    assert rooms == {room for floor in FLOORS for room in floor} - public
    assert len([room for room in rooms if (PACKAGE / room).is_dir()]) <= 12


def test_the_parser_sees_what_is_there():
    assert own_imports("functions") >= {"_master.current", "inputs", "_calls.request"}
    used = {"_arithmetic.reduction", "_machine.interrupts", "comm.reports", "errors"}
    assert own_imports("comm") == used
    assert "_rank.worker" in own_imports("_master.session")
    assert own_imports("comm.transports") >= {"comm.single", "comm.shared", "comm.nccl"}


def test_what_is_hidden_is_imported_in_one_place():
    for name in MODULES:
        for full in imports(name):
            top = full.split(".")[0]
            assert is_in(name, ONLY.get(top, {name})), f"{name} imports {full}"


def test_few_modules_follow_references():
    own = {"comm.shared", "comm.mpi", "rules.machine_sums", "_machine.shared_memory"}
    own |= {"parameter_server.remote"}  # of a script with its mover
    own |= {"extensions.pymc"}  # of a process with workers that it has forked
    for name in [name for name in MODULES if not is_in(name, own)]:
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(MODULES[name])}
        assert not names & {"SegmentRef", "ArrayRef", "Segments"}, name


def test_no_print_in_the_library():
    for name in [name for name in MODULES if not is_in(name, SPEAK)]:
        calls = [node for node in ast.walk(MODULES[name]) if isinstance(node, ast.Call)]
        names = [c.func.id for c in calls if isinstance(c.func, ast.Name)]
        assert "print" not in names, name


def test_modules_say_what_they_are_for_and_are_not_long():
    assert not [name for name, tree in MODULES.items() if not ast.get_docstring(tree)]
    lengths = {name: len(lines_of_code(tree)) for name, tree in MODULES.items()}
    assert not {name: length for name, length in lengths.items() if length > 400}


def lines_of_code(tree):
    """Return the numbers of the lines that hold code: no docstrings, comments and blank lines."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
    }
    found = set()
    for node in ast.walk(tree):
        if (
            hasattr(node, "lineno")
            and not isinstance(node, ast.Expr)
            and id(node) not in docstrings
        ):
            end = node.lineno if hasattr(node, "body") else node.end_lineno
            found.update(range(node.lineno, end + 1))
    return found


def test_only_the_ranks_of_one_machine_know_that_they_share_it():
    for name in [name for name in MODULES if not is_in(name, ON_ONE_MACHINE)]:
        used = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(MODULES[name])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not OF_ONE_MACHINE & (used | {full.split(".")[0] for full in imports(name)}), name
        strings = [n.value for n in ast.walk(MODULES[name]) if isinstance(n, ast.Constant)]
        paths = [each for each in strings if isinstance(each, str) and each.startswith("/proc")]
        assert not paths, name
