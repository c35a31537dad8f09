"""Train a model by one of Theano-MPI's rules, with a process for each device.

The model is a class in Theano-MPI's contract, in a file that is named by a path or as in an import.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import runpy
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from synkhronos import _wording
from synkhronos._machine.devices import module_command
from synkhronos._machine.files import held
from synkhronos._machine.log import has_terminal
from synkhronos.launch import mpirun, where
from synkhronos.parameter_server.group.launching import run_of_group
from synkhronos.rules import cores
from synkhronos.rules import options as _options
from synkhronos.rules.job import TELLS
from synkhronos.rules.places import by_host
from synkhronos.rules.request import DEVICES, Request
from synkhronos.tools import launch

_OF_DEVICES = re.compile(r"(device|contexts|init_gpu_device)\s*=")


class _CommandParser(argparse.ArgumentParser):
    """A parser that names the nearest option for one that is not there."""

    def parse_known_args(self, args=None, namespace=None):
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            wrong = extras[0].partition("=")[0]
            resumed = getattr(found, "resume", None)
            name, rule = wrong.lstrip("-").replace("-", "_"), self.get_default("rule")
            if rule is not None and wrong == _options.flag(name) and name in _options.TABLE:
                self.error(f"{wrong}: {_options.unknown(rule, name, _options.of_rule(rule))}")
            meant = _wording.nearest(wrong, flags) if wrong.startswith("-") else ""
            if isinstance(resumed, str) and resumed.endswith(".py"):
                meant = f" --resume took {resumed!r} for a snapshot: write --resume at the end."
            self.error(f"unexpected {extras[0]!r}.{meant}")
        return found, extras


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rules, with their options, to the parser of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _all_options()
    rules = parser.add_subparsers(metavar="RULE", required=True, parser_class=_CommandParser)
    for name in _options.RULES:
        own = rules.add_parser(
            name, help=_options.SUMMARIES[name], description=f"{name}: {_options.SUMMARIES[name]}.",
            allow_abbrev=False,
        )  # fmt: skip
        _add_arguments_of(own, name)
        own.set_defaults(run=main, rule=name)
    script = rules.add_parser(
        "script", help="run a session script of Theano-MPI, as it is",
        description="Run a script that imports theanompi, which stays as it is.",
    )  # fmt: skip
    script.add_argument(
        "--devices", metavar="LIST", help="in place of those that the script names: cpu,cpu"
    )
    script.add_argument("script", metavar="SCRIPT", help="a file of Python")
    script.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own")
    script.set_defaults(run=_script)
    show = rules.add_parser("show", help="draw the curves of files of the recorder")
    show.add_argument("files", metavar="FILE", nargs="+", help="such as inforec/inforec.pkl")
    show.add_argument("-o", "--output", metavar="PNG", default="curves.png", help="the picture")
    show.set_defaults(run=_show)


def _add_arguments_of(parser, rule):
    parser.add_argument("modelfile", metavar="MODELFILE", help="models/cifar10.py, models.cifar10")
    parser.add_argument("modelclass", metavar="MODELCLASS", help="the class in it")
    parser.add_argument(
        "--devices", metavar="LIST", action="append",
        help="the device of each rank: cpu,cpu (of each host) or node0:cuda0,cuda1,node1:cpu",
    )  # fmt: skip
    launch.add_hosts_arguments(parser)
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[],
        type=_typed(_options.parse_setting),
        help="set an attribute of the model or its data: n_epochs=3, data.n_batch_train=10",
    )  # fmt: skip
    for option in _options.of_rule(rule).values():
        words: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        words["help"] = _help(option)
        if option.name == "resume":
            words.update(nargs="?", const=True, metavar="FILE")
        if option.name == "bind":
            words.update(action="store_true")
        else:
            words.update(type=_typed(option.parse))
            words.setdefault("metavar", _metavar(option))
        parser.add_argument(_options.flag(option.name), **words)
    launch.add_mpirun_arguments(parser)
    launch.add_lost_after(parser)
    launch.add_attempts_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command line of mpirun, or of each rank of this machine, and don't run it",
    )
    # `synkhronos.rules` reads the exit status from a file, and its runs end with the script.
    parser.add_argument("--report", help=argparse.SUPPRESS)
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)


def _typed(parse):
    """Wrap `parse` so that argparse shows the messages of its errors."""

    def typed(text):
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _metavar(option):
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return {int: "N", float: "X", bool: "{True,False}"}.get(option.kind, "PATH")


def _help(option):
    default = "" if option.default in (None, False) else f" (default: {option.default})"
    return f"{option.sentence}{default}".replace("%", "%%")


def _all_options():
    lines = ["options of the rules; RULE --help shows all of one rule:"]
    by_rules: dict[tuple[str, ...], list[Any]] = {}
    for rule in _options.RULES:
        for option in _options.of_rule(rule).values():
            if option not in by_rules.setdefault(option.rules, []):
                by_rules[option.rules].append(option)
    for rules, of_them in by_rules.items():
        lines += ["", "all rules:" if rules == _options.RULES else f"{', '.join(rules)}:"]
        for option in of_them:
            name = (
                f"{_options.flag(option.name)} {'' if option.name == 'bind' else _metavar(option)}"
            )
            lines.append(f"  {name}")
            lines.append(f"      {_help(option)}".replace("%%", "%"))
    return "\n".join(lines).replace("%", "%%")


def main(options: argparse.Namespace) -> int:
    """Train a model as the command line says; return the exit status."""
    names = _options.of_rule(options.rule)
    values = {name: value for name, value in vars(options).items() if name in names}

    def make(hosts, **changed):
        named = [f"{each.name}:" * bool(each.name) + ",".join(each.devices) for each in hosts]
        return Request.of(
            options.rule,
            named if any(each.devices for each in hosts) else [],
            options.modelfile,
            options.modelclass,
            dict(options.set),
            {**values, **changed},
            **{name: getattr(options, name) for name in vars(mpirun.Options())},
        )

    try:
        limits = launch.limits(options)
        hosts = launch.find_hosts(options)
        if not hosts:
            raise ValueError(f"--discover {options.discover!r} names no host at the start.")
        asked = make(hosts)
    except (TypeError, ValueError, OSError, ImportError) as error:
        return refuse(error, 1 if isinstance(error, ImportError) else 2, options.report)
    more = {"report": options.report, "ends_with_stdin": options.until_stdin_ends}
    resume_line = ["synkhronos", "rule", *asked.arguments(resume=True)]
    if limits is None or options.dry_run:
        return start(asked, resume_line, dry_run=options.dry_run, **more)
    return start(
        asked, resume_line, attempts=functools.partial(_attempts, options, limits, make), **more
    )


def _attempts(options, limits, make, begin):
    """Run attempts; each one after the first resumes from the newest snapshot of the run."""
    before: dict[Path, tuple] | None = None

    def begin_on(hosts, variables):
        nonlocal before
        asked = make(hosts)
        if before is None:
            before = _snapshots(asked.options["snapshot_path"])
        newest = _newest(asked.options["snapshot_path"], before)
        return begin(asked if newest is None else make(hosts, resume=str(newest)), variables)

    def say(sentence):
        print(_wording.printable(f"synkhronos rule: {sentence}"), file=sys.stderr, flush=True)

    return launch.run_attempts(options, limits, begin_on, say)


def refuse(error: object, status: int, report: str | None = None) -> int:
    """Print why a run can't be started; return the exit status."""
    print(_wording.printable(f"synkhronos rule: {error}"), file=sys.stderr)
    _report(report, status, str(error), [])
    return status


def start(
    asked: Request,
    resume_line: Sequence[str],
    dry_run: bool = False,
    report: str | None = None,
    ends_with_stdin: bool = False,
    refused: int = 2,
    attempts: Callable[..., Any] | None = None,
) -> int:
    """Run a request to its end; return the exit status, `refused` if it can't be started.

    Messages name `resume_line`, the command that resumes the run. The exit status and the problem
    are written to the file `report`. With `ends_with_stdin` the run ends when its standard input
    does. If the run may be repeated, ``attempts(begin)`` runs one attempt after another.
    """

    def begin(asked, variables=None):
        bound = cores.of_ranks(asked.ranks, asked.reach) if asked.bind else []
        run = run_of_group(
            _hosts(asked),
            asked.reach,
            worker_command(asked, bound),
            {**_variables(asked), **(variables or {}), **({TELLS: "1"} if tells else {})},
            mpirun.new_token(),
            dry_run,
            names=[place.device for place in asked.ranks],
            is_served=asked.is_served,
            outlives=asked.outlives_ranks,
            ends_with_stdin=ends_with_stdin,
            grace=asked.grace,
        )
        if run is not None:
            run.folder = _new_folder(Path(asked.log_path))
            print(_wording.printable(banner(asked, run.folder)), flush=True)
            if tells:
                run.say("the ranks load the model and its data")
        return run

    tells = has_terminal()
    before = _snapshots(asked.options["snapshot_path"])
    with contextlib.ExitStack() as held_folders:
        try:
            if not dry_run:
                _hold_folders(asked, held_folders)
            if attempts is not None:
                status, run = attempts(begin)
            else:
                status, run = 0, begin(asked)
        except (ValueError, OSError) as error:
            return refuse(error, refused, report)
        if run is None:
            _report(report, status, "Too few hosts have answered." if status else "", [])
            return status
        if attempts is None:
            status = run.run()
    said = _ending(asked, run, status, before, resume_line)
    for sentence in said:
        run.say(sentence)
    cause = run.cause
    lines = run.ranks[cause].last_lines if cause is not None else run.own_words.splitlines()[-20:]
    _report(report, status, " ".join(said), lines)
    return status


def _hold_folders(asked, stack):
    """Lock the folders that this run writes into; raise BlockingIOError if another run has one."""
    names = ["snapshot_path", "inforec_path"]
    if len({os.path.realpath(asked.options[name]) for name in names}) == 1:
        names.pop()
    for name in names:
        path = asked.options[name]
        _options.check_folder(name, path)
        try:
            os.makedirs(path, exist_ok=True)
            stack.enter_context(held(os.path.join(path, "run"), 0.0))
        except BlockingIOError:
            raise BlockingIOError(
                f"{name}: another run writes into {path!r}, and each would replace the other's "
                f"files. Give this one a folder of its own, {_options.flag(name)} FOLDER."
            ) from None
        except OSError:  # the ranks check it: it may exist on other machines only
            continue


def worker_command(asked: Request, cores: list[list[int] | None]) -> list[str]:
    """Return the command of each rank."""
    job = asked.job(cores).as_json()
    return module_command("synkhronos.rules.worker", job, unbuffered=True)


def _hosts(asked):
    """Return the hosts of a request, each with its number of ranks."""
    devices_of = by_host(asked.ranks)
    return [where.Host(name or "localhost", len(devices)) for name, devices in devices_of.items()]


def _variables(asked):
    """Return the environment variables that differ between the ranks and this process."""
    variables, flags = launch.lost_after(asked.reach.lost_after), os.environ.get("THEANO_FLAGS")
    if flags is not None:
        variables["THEANO_FLAGS"] = without_devices(flags)
    return variables


def without_devices(flags: str) -> str:
    """Return THEANO_FLAGS without a device, as each rank has its own; print what is left out.

    >>> without_devices("floatX=float32")
    'floatX=float32'
    """
    parts = [part.strip() for part in flags.split(",") if part.strip()]
    left_out = [part for part in parts if _OF_DEVICES.match(part)]
    if left_out:
        print(
            f"synkhronos rule: {', '.join(left_out)} in THEANO_FLAGS is left out, as each rank "
            "has the device that --devices names.",
            file=sys.stderr,
        )
    return ",".join(part for part in parts if part not in left_out)


def _new_folder(parent):
    """Make a new folder for the log files of this run; return it."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        folder = parent / (now if number == 1 else f"{now}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def banner(asked: Request, folder: Path) -> str:
    """Return the line that is printed when a run starts."""
    kinds = [asked.options["sync_type"]] if "sync_type" in asked.options else []
    kinds.append(asked.options["exch_strategy"])
    n_workers = len(asked.ranks) - asked.is_served
    server = " and a server" if asked.is_served else ""
    devices = ", ".join(
        f"{place.host}:{place.device}" if place.host else place.device for place in asked.ranks
    )
    workers = _wording.count(n_workers, "worker")
    return f"{asked.rule}({', '.join(kinds)}): {workers}{server} on {devices}; logs in {folder}"


def _ending(asked, run, status, before, resume_line):
    """Return the sentences that are printed at the end of a run."""
    if status == 0:
        return []
    said = run.failure_summary()
    if not run.has_started:
        return said
    newest = _newest(asked.options["snapshot_path"], before)
    if run.interrupted_by and (newest is None or newest.stat().st_mtime < run.interrupted_at - 1):
        said.append("The ranks have ended before they wrote a snapshot for this interrupt.")
    resume = shlex.join(resume_line)
    if newest is not None:
        said.append(f"The newest snapshot is {newest}; this goes on from it: {resume}")
    elif not run.interrupted_by:
        said.append("There is no snapshot of this run.")
    return said


def _snapshots(folder):
    """Return the time and the inode of each snapshot, by which later ones are told from them."""
    files = {path: path.stat() for path in Path(folder).glob("snapshot_*.npz")}
    return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in files.items()}


def _newest(folder, before):
    """Return the newest snapshot that was not there before, or None."""
    # Not by the time of this machine: the clock of a file server may differ.
    files = [
        (found, path) for path, found in _snapshots(folder).items() if before.get(path) != found
    ]
    return max(files)[1] if files else None


def _report(path, status, problem, last_lines):
    if path is not None:
        text = json.dumps({"status": status, "problem": problem, "last_lines": last_lines})
        Path(path).write_text(text)


def _script(options):
    """Run a script as Python would, with ``theanompi`` served in its process."""
    from synkhronos import rules

    if options.devices:
        os.environ[DEVICES] = options.devices
    if not Path(options.script).is_file():
        return refuse(f"there is no script {options.script!r} in {os.getcwd()}.", 2)
    rules.theanompi()
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    runpy.run_path(options.script, run_name="__main__")
    return 0


def _show(options):
    from synkhronos.rules import recorder

    try:
        recorder.draw(options.files, options.output)
    except (OSError, ValueError) as error:
        return refuse(error, 1)
    print(f"wrote {options.output}")
    return 0
