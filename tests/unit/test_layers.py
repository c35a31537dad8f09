"""What modules of the package may know of, beside what they import: see `make lint` for that."""

import ast

from support.sources import MODULES

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
    "launch",
    "_host.theano.import_support",
    "parameter_server.engine",  # in its own process
    "parameter_server.stores",  # in its own process
    "parameter_server.remote.mover",  # of a script with its mover
    "parameter_server.remote.node",
    "profiling.status",
    "rules.loading",  # of a rank with its loader
    "rules.session",  # of a script with its launcher
    "rules.worker",  # in its own process
    "session",
    "tools",
    "__main__",
}


def is_in(name, rooms):
    """Return whether a module is one of these, or in a folder of them."""
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


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


def test_what_prepares_python_for_theano_imports_nothing_of_the_package():
    assert not [each for each in imports("_host.theano.import_support") if "synkhronos" in each]


def test_few_modules_follow_references():
    own = {"comm.shared", "comm.mpi", "_machine.shared_memory"}
    own |= {"parameter_server.remote"}  # of a script with its mover
    own |= {"extensions.pymc"}  # of a process with workers that it has forked
    for name in [name for name in MODULES if not is_in(name, own)]:
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(MODULES[name])}
        assert not names & {"SegmentRef", "ArrayRef", "Segments"}, name


def test_modules_are_not_long():
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
