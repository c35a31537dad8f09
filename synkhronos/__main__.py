"""The command line: ``synkhronos run``, ``launch``, ``info`` and others."""
# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import signal

# During the imports, which take a while, a Ctrl-C ends this process without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys

from synkhronos.launch import guard

# The guard begins before the imports below, which would cost it 15 MB on each machine.
if __name__ == "__main__":  # noqa: SIM108 - imports may follow an `if` only
    _tell = guard.begin()
else:
    _tell = guard.tell_nobody

import argparse
import functools
import importlib
import os
from pathlib import Path
from typing import Sequence

from synkhronos import _systems
from synkhronos._host import choice, pythons
from synkhronos._host.theano import import_support

try:
    from synkhronos.launch import INTERRUPTED
    from synkhronos.tools import launch, run, top

    _COMMANDS = {
        "run": ("run a script in a session; with --parallel on all ranks", run),
        "launch": ("run a script on several machines", launch),
        "top": ("watch sessions that run", top),
    }
    for system in _systems.there():
        for name, (text, module) in system.commands.items():
            _COMMANDS[name] = text, importlib.import_module(module)
except ModuleNotFoundError as error:  # all need NumPy, which comes with the host library
    if error.name != "numpy":
        raise
    sys.exit(f"synkhronos: {error}: {choice.TO_INSTALL}.")
if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

THEANORC = """\
# Written by `synkhronos theanorc`: the flags that Theano gets wherever Synkhronos is installed.
# theano.scan on Python 3.11 needs the installation, because no flag can fix it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next; this ends the process
        importlib.import_module("argcomplete").autocomplete(parser)
    arguments, unknown = parser.parse_known_args(argv or ["--help"])
    if unknown:  # argparse would print the usage of all commands
        from synkhronos._wording import nearest

        meant = nearest(unknown[0], arguments.parser._option_string_actions)
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:  # outside of a script, whose own is printed with its traceback
        return INTERRUPTED
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe: Python must not flush to it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    about = "Data parallelism for Theano and PyTensor."
    parser = argparse.ArgumentParser("synkhronos", description=about, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    info = commands.add_parser(
        "info",
        help="what works on this machine, and what to do about the rest",
        description="Look at everything that Synkhronos uses. The exit status is 1 if something "
        "that it cannot do without is missing or broken, else 0; GPUs may be missing.",
    )
    output = info.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON object")
    output.add_argument(
        "--link-cuda", metavar="DIR",
        help="make a folder of links for LD_LIBRARY_PATH, by which Theano finds the libraries of "
        "CUDA; the exit status is 1 if one that a GPU needs is missing, 2 if DIR is not made",
    )  # fmt: skip
    launch.add_hosts_arguments(
        info,
        "ask each of these machines, such as node0,node1: versions, cores, devices; the exit "
        "status is 1 if they don't agree, or one can't be reached",
    )
    launch.add_mpirun_arguments(info)
    info.set_defaults(run=_info)

    for name, (text, module) in _COMMANDS.items():
        added = commands.add_parser(name, help=text, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(added)
    commands.choices["run"].set_defaults(run=functools.partial(run.main, tell=_tell))
    commands.choices["launch"].set_defaults(run=_launch)
    commands.choices["top"].formatter_class = argparse.RawDescriptionHelpFormatter

    theanorc = commands.add_parser(
        "theanorc",
        help="write the Theano flags that Synkhronos uses to a file",
        description="Write the flags that Theano gets where Synkhronos is installed, for "
        "environments where it is not. The flags hold for the environment that runs this command.",
    )
    theanorc.add_argument(
        "file", metavar="FILE", nargs="?", default="~/.theanorc",
        help="where to (default: ~/.theanorc); - prints",
    )  # fmt: skip
    theanorc.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    theanorc.set_defaults(run=_theanorc)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        version = pythons.installed_version("synkhronos")
        print("synkhronos", version or "(a source tree that is not installed)")
        parser.exit()


def _launch(options):
    for added in _systems.launch_options():
        if any(getattr(options, name[2:]) is not None for name in added.options):
            return importlib.import_module(added.module).main(options)
    return launch.main(options)


def _info(arguments: argparse.Namespace) -> int:
    from synkhronos.tools import info, turns
    from synkhronos.tools.info import machines

    if arguments.link_cuda is not None:
        return _link_cuda(arguments.link_cuda)
    if arguments.hosts is not None or arguments.hostfile is not None:
        return machines.main(arguments)
    with turns.shown("looking at this machine: a few seconds, and up to 15 the first time"):
        results = info.checks()
    if arguments.json:
        print(info.as_json(results))
    else:
        print(info.table(results, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return int(any(check.failed for check in results))


def _link_cuda(name: str) -> int:
    from synkhronos._wording import printable
    from synkhronos.tools.info import cuda_libraries as cuda

    # Follow links: the loader needs an absolute path, and another user may own a link.
    folder = Path(os.path.realpath(os.path.expanduser(name)))
    files = cuda.find(skip=folder)
    try:
        links = cuda.link(folder, files)
    except OSError as error:
        print(printable(f"cannot make the links: {error}"), file=sys.stderr)
        return 2
    for link, path in links.items():
        print(printable(f"{folder / link} -> {path}"))
    searched = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    opened = cuda.probe({**os.environ, "LD_LIBRARY_PATH": searched})
    for library in opened.values():
        if library.error and library.name in files:
            print(printable(f"{library.name}.so does not work: {library.error}"))
    driver = opened["libcuda"].version
    newer = cuda.newer_than_driver(opened)
    if newer:
        print(f"{newer}: {cuda.how_to_install(['libnvrtc'], driver)}")
    missing = [name for name in opened if name not in files]
    if missing:
        print(f"not found: {', '.join(missing)}: {cuda.how_to_install(missing, driver)}")
    if links:
        print(f"Before Python starts:\n    {cuda.export_command(folder)}")
    return int(any(opened[name].error or name not in files for name in cuda.NEEDED))


def theanorc() -> str:
    """Return the default flags as the text of a .theanorc."""
    sections: dict[str, list[str]] = {}
    for name, value in import_support.default_flags().items():
        section, option = import_support.section_and_option(name)
        # Theano's parser of this file reads % as the start of a substitution.
        sections.setdefault(section, []).append(f"{option} = {value.replace('%', '%%')}\n")
    parts = [f"\n[{section}]\n{''.join(lines)}" for section, lines in sections.items()]
    return THEANORC + "".join(parts)


def _theanorc(arguments: argparse.Namespace) -> int:
    if arguments.file == "-":
        print(theanorc(), end="")
        return 0
    path = Path(arguments.file).expanduser()
    try:
        # Mode x checks and creates in one step, so a file that appears in between is safe too.
        with open(path, "w" if arguments.force else "x") as file:
            file.write(theanorc())
    except FileExistsError:
        print(f"{path} exists: --force overwrites it, FILE names another", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
