"""The systems that stand on the core, in one table: what each adds to its commands and messages.

The core is what ``import synkhronos`` gives, with the commands ``run``, ``launch``, ``info``,
``top`` and ``theanorc``. It runs without the folders of the systems, and imports a module
of a row only when it is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, Mapping, NamedTuple


class LaunchOptions(NamedTuple):
    """Options of ``synkhronos launch``: if one is given, ``main(options)`` of `module` runs."""

    title: str
    description: str
    options: Mapping[str, Mapping[str, Any]]  # by their names, for argparse
    module: str


class SystemRow(NamedTuple):
    """A system, which is there if its module is."""

    module: str
    # Name -> (what it does, the module whose `add_arguments(parser)` sets `run`).
    commands: Mapping[str, tuple[str, str]] = {}
    launch: LaunchOptions | None = None
    # Modules that its commands or scripts run as processes: `top` shows who started them.
    programs: tuple[str, ...] = ()
    # Scripts that import this module may compile functions for one process on purpose.
    compiles_in: str = ""
    # (title, distribution) of a package that only it needs: `info` checks it on PyTensor.
    package: tuple[str, str] | None = None
    # Topic -> what a message of the core adds, because this system has a remedy.
    advice: Mapping[str, str] = {}


_ALL = (
    SystemRow(
        "synkhronos.rules",
        commands={
            "rule": ("train a model by one of Theano-MPI's rules", "synkhronos.rules.command")
        },
        programs=("synkhronos.rules.worker",),
    ),
    SystemRow(
        "synkhronos.parameter_server",
        launch=LaunchOptions(
            "parameter server",
            "With --workers, launch starts servers and workers of a parameter server instead: each "
            "worker is a process that runs the script. Servers and then workers fill the machines "
            "in order, as many on each as its number says, or evenly: --servers 1 --workers 3 "
            "--hosts a:2,b:2.",
            {
                "--servers": {"metavar": "S", "type": int, "help": "servers (default: 1)"},
                "--workers": {"metavar": "W", "type": int, "help": "each runs the script"},
            },
            "synkhronos.parameter_server.remote.nodes",
        ),
        programs=("synkhronos.parameter_server.remote.node",),
        compiles_in="synkhronos.parameter_server.stores",
    ),
    SystemRow(
        "synkhronos.extensions",
        advice={
            "own rows": (
                " (a rule such as Lasagne's takes a list of these in place of the loss), or let "
                "synkhronos.extensions.train.make_train_step make the function"
            ),
            "running statistics": (
                ", and running statistics with synkhronos.extensions.train.average_updates"
            ),
            "any loss": (
                "; or let synkhronos.extensions.train.make_train_step divide the loss, whatever "
                "it is"
            ),
        },
    ),
    SystemRow(
        "synkhronos.extensions.pymc",
        compiles_in="synkhronos.extensions.pymc",
        package=("PyMC", "pymc"),
        advice={
            "JAX": (
                " Of a PyMC model, functions of JAX call the ranks in a block of "
                "synkhronos.extensions.pymc.likelihood."
            )
        },
    ),
    SystemRow(
        "synkhronos.tools.bench",
        commands={"bench": ("run a benchmark", "synkhronos.tools.bench.command")},
    ),
)


def there() -> list[SystemRow]:
    """Return the systems whose folders are there."""
    found = []
    for system in _ALL:
        with contextlib.suppress(ModuleNotFoundError):  # its parent package is not there
            if importlib.util.find_spec(system.module) is not None:
                found.append(system)
    return found


def launch_options() -> list[LaunchOptions]:
    """Return the options of ``synkhronos launch`` that these systems add."""
    return [system.launch for system in there() if system.launch is not None]


def advice(topic: str) -> str:
    """Return what systems say about a topic, as the end of a sentence; empty without them."""
    return "".join(system.advice.get(topic, "") for system in there())
