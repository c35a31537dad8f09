"""Which compiled functions may be run once more without an effect."""

from synkhronos._host.base.chosen_library import inner_outputs

# Other linkers print or check results in each run.
_LINKERS = {
    "CLinker", "JAXLinker", "NumbaLinker", "OpWiseCLinker", "PerformLinker", "VMLinker",
    "VM_Linker",
}  # fmt: skip
_PACKAGES = {"theano", "pytensor", "synkhronos"}
# These operations print, stop, call Python code of the script, or send and receive.
_WITH_EFFECTS = {
    "Print", "FromFunctionOp", "PdbBreakpoint", "LoadFromDisk", "MPIRecv", "MPIRecvWait", "MPISend",
    "MPISendWait", "Push", "Await",
}  # fmt: skip


def is_watched(function) -> bool:
    """Return whether a function runs under a mode that watches it, or a linker of the script."""
    linker = getattr(function.maker, "linker", None)
    return getattr(linker, "callback", None) is not None or type(linker).__name__ not in _LINKERS


def is_repeatable(function) -> bool:
    """Return whether another run has no effect: it prints nothing, and runs no code of the user."""
    if function.profile is not None or is_watched(function):
        return False
    left, seen = list(function.maker.fgraph.outputs), set()
    while left:
        node = left.pop().owner
        if node is None or node in seen:
            continue
        seen.add(node)
        package = type(node.op).__module__.partition(".")[0]
        if package not in _PACKAGES or type(node.op).__name__ in _WITH_EFFECTS:
            return False
        left += [*node.inputs, *inner_outputs(node.op)]
    return True
