"""The public names: what users import with its arguments, options of commands, and variables.

``python -m support.public_names`` in the folder ``tests`` prints them, one on each line.
"""

import argparse
import importlib
import inspect
import re
from pathlib import Path

from synkhronos import __main__ as command_line
from synkhronos.rules import cfg, tmlauncher
from synkhronos.tools import bench
from synkhronos.tools.bench import frame

MODULES = (
    "synkhronos",
    "synkhronos.host",
    "synkhronos.ops",
    "synkhronos.extensions.train",
    "synkhronos.extensions.update_rules",
    "synkhronos.extensions.updates",
    "synkhronos.extensions.rules",
    "synkhronos.parameter_server",
    "synkhronos.rules",
)
OTHERS = (
    "synkhronos.functions.Function",
    "synkhronos.inputs.Data",
    "synkhronos.profiling.Profile",
    "synkhronos.profiling.status.ArrayStatus",
    "synkhronos.profiling.status.FunctionStatus",
    "synkhronos.profiling.status.RankStatus",
    "synkhronos.profiling.status.Status",
    "synkhronos.rules.loading.Loader",
    "synkhronos.rules.preprocessing.Preprocess",
    "synkhronos.rules.recorder.Recorder",
    "synkhronos.rules.recorder.draw",
    "synkhronos.rules.recorder.read",
)
DOCS = Path(__file__).parents[2] / "docs"


def all_names():
    """Return a sorted list of all of them."""
    found = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found.update(_of(f"{module.__name__}.{name}", getattr(module, name)))
    for path in OTHERS:
        module, name = path.rsplit(".", 1)
        found.update(_of(path, getattr(importlib.import_module(module), name)))
    found.update(_options("synkhronos", command_line._parser()))
    for name, module in bench.BENCHMARKS.items():
        parser = frame.parser(f"synkhronos bench {name}", importlib.import_module(module))
        found.update(_options(parser.prog, parser))
    found.update(f"tmlauncher {name}" for name in re.findall(r" (--?\w+)", tmlauncher.__doc__))
    found.update(f"tmlauncher: {name} in a file" for name in cfg.KEYS)
    for page in DOCS.glob("*.rst"):
        found.update(re.findall(r"\bSYNKHRONOS_[A-Z0-9_]+", page.read_text(encoding="utf-8")))
    return sorted(found)


def _of(path, value):
    if not inspect.isclass(value):
        return {path + _arguments(value)}
    if issubclass(value, Exception):
        return {path}
    found = {path + _arguments(value)}
    for name, member in inspect.getmembers_static(value):
        is_ours = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__module__", path)
        if not name.startswith("_") and str(is_ours).startswith("synkhronos"):
            found.add(f"{path}.{name}{_arguments(getattr(value, name))}")
    return found


def _arguments(value):
    """Return names, kinds and defaults of arguments, without hints."""
    if not callable(value):
        return ""
    signature = inspect.signature(value)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r"<(\w+ )?([\w.]+)[^>]*>", r"<\2>", text)


def _options(command, parser):
    found = {command}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                found |= _options(f"{command} {name}", each)
        else:
            names = action.option_strings or [action.metavar or action.dest]
            found.update(f"{command} {name}" for name in names)
    return found


if __name__ == "__main__":
    print(*all_names(), sep="\n")
