"""Theano-MPI's launcher: ``tmlauncher -cfg=FILE``; runs as ``synkhronos rule`` does.

Usage: tmlauncher -cfg=FILE
       tmlauncher -rule=RULE -modelfile=MODELFILE -modelclass=MODELCLASS -devices=DEVICES

    -cfg=, --config=       a file of assignments: RULE=BSP, MODELFILE=models.cifar10,
                           MODELCLASS=Cifar10_model, DEVICES=cuda0,cuda1 or
                           DEVICES=("node0:cuda0" "node1:cuda0,cuda1"), and the keys of all options
    -r=, --rule=           BSP, EASGD or another one that `synkhronos rule --help` lists
    -file=, --modelfile=   a dotted name, or the path of a file
    -class=, --modelclass= the class in it
    -d=, --devices=        cuda0,cuda1 or node0:cuda0;node1:cuda0, else the variable DEVICES
    -hosts=, -hostfile=    as of `synkhronos launch`: a,b:2 or a:cuda0,a:cuda1,b:cpu
    -bsp_sync_type=        cdd, avg or swap
    -bsp_exch_strategy=    nccl32, nccl16, ar, asa32 or asa16
    -b, -bind              bind each rank to cores of its own
    -s=, --size=           taken, and not needed: the devices say it
    -set=NAME=VALUE        set an attribute of the model, once for each
    -agent=CMD             what stands in for ssh; not in a file, which starts no programs
    -lost_after=SECONDS    after how long a machine that is not heard of is lost; 0 is never
    -mpirun_args=ARGS      more arguments of mpirun; not in a file either
    -dry-run               print the command line of mpirun, and don't run it
    -KEY=VALUE             each option of `synkhronos rule RULE --help`, such as -alpha=0.25

A file's values come before those of the command line. The file is read, and never executed. The
variable SYNKHRONOS_RULE_DEVICES names other devices for a file that stays as it is.
"""

from __future__ import annotations

import signal

# As in `synkhronos.__main__`: a Ctrl-C in the imports leaves no traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys
from dataclasses import dataclass, field
from typing import Any, Sequence

from synkhronos import _wording
from synkhronos.launch import INTERRUPTED
from synkhronos.rules import cfg
from synkhronos.rules import command as _command
from synkhronos.rules import options as _options
from synkhronos.rules.places import find_places
from synkhronos.rules.request import DEVICES, Request, devices_in_place

if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_NAMES = {
    "cfg": "cfg", "config": "cfg", "file": "modelfile", "modelfile": "modelfile",
    "class": "modelclass", "modelclass": "modelclass", "r": "rule", "rule": "rule", "s": "size",
    "size": "size", "d": "devices", "devices": "devices", "b": "bind", "set": "set",
    "hosts": "hosts", "hostfile": "hostfile", "agent": "agent",
    "mpirun_args": "mpirun_args", "lost_after": "lost_after", "bsp_sync_type": "sync_type",
    "bsp_exch_strategy": "exch_strategy", "dry_run": "dry_run", **{n: n for n in _options.TABLE},
}  # fmt: skip
_OF_LAUNCHER = ("cfg", "size", "set", "agent", "mpirun_args", "lost_after", "dry_run")
_FLAGS = {"b", "bind", "dry_run", "resume"}  # that need no value
_FOR_BSP = {"bsp_sync_type", "bsp_exch_strategy", "BSP_SYNC_TYPE", "BSP_EXCH_STRATEGY"}
_NEEDED = {
    "rule": ("RULE", "-rule=BSP"),
    "modelfile": ("MODELFILE", "-modelfile=models.cifar10"),
    "modelclass": ("MODELCLASS", "-modelclass=Cifar10_model"),
    "devices": ("DEVICES", "-devices=cuda0,cuda1"),
}


@dataclass
class _Told:
    """A value, and the place where it was given."""

    value: Any
    source: str  # as the user wrote it
    key: str


@dataclass
class _Answers:
    """All values that were given, by this package's names."""

    told: dict[str, _Told] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, name):
        """Return a value, or None."""
        return self.told[name].value if name in self.told else None

    @property
    def hosts(self):
        """The arguments of `where.find_places` that name machines."""
        named = {name: self.get(name) for name in ("hosts", "hostfile")}
        return {name: value for name, value in named.items() if value is not None}

    def take(self, name, value, source, key):
        """Take a value in place of an earlier one; settings are added to earlier ones."""
        if name == "set":
            value = [*(self.get("set") or []), *([value] if isinstance(value, str) else value)]
        self.told[name] = _Told(value, source, key)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a model as the command line and the file say; return the exit status."""
    line = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-h", "-help", "--help") for word in line):
        print(__doc__)
        return 0
    try:
        answers = _read(line)
        asked = _asked(answers)
    except (TypeError, ValueError, OSError, ImportError) as error:
        print(_wording.printable(f"tmlauncher: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    for note in answers.notes:
        print(_wording.printable(f"tmlauncher: {note}"), file=sys.stderr)
    again = [word for word in line if not word.lstrip("-").startswith("resume")]
    return _command.start(
        asked, ["tmlauncher", *again, "-resume"], dry_run=bool(answers.get("dry_run")), refused=1
    )


def _read(line):
    """Return the values of the command line, the file and the environment."""
    answers = _Answers()
    for word in line:
        _take_word(answers, word)
    if "cfg" in answers.told:
        path = answers.get("cfg")
        try:
            entries = cfg.read(path)
        except OSError as error:
            raise OSError(f"can't read the config file {path!r}: {error.strerror}.") from None
        for key, entry in entries.items():
            _take_entry(answers, path, key, entry)
    elif not any(name in answers.told for name in ("rule", "modelfile", "modelclass")):
        raise ValueError(
            "Neither config nor run options provided. Write tmlauncher -cfg=FILE; tmlauncher "
            "--help lists all options."
        )
    others = devices_in_place(None)
    if others:
        answers.take("devices", others, f"the variable {DEVICES}", "DEVICES")
    if "devices" not in answers.told and os.environ.get("DEVICES"):
        answers.take("devices", os.environ["DEVICES"], "the variable DEVICES", "DEVICES")
    for name, (key, example) in _NEEDED.items():
        if not answers.get(name) and not (name == "devices" and answers.hosts):
            raise ValueError(
                f"{key} is empty: write {key}=... in the config file, or {example} in the command."
            )
    return answers


def _take_word(answers, word):
    name, equals, value = word.lstrip("-").partition("=")
    key = name.replace("-", "_").lower() if word.startswith("-") else ""
    if key not in _NAMES:
        meant = _wording.nearest(name, [n for n in _NAMES if len(n) > 1])
        raise ValueError(f"unknown option {word!r}.{meant} tmlauncher --help lists all.")
    if not equals and key not in _FLAGS:
        raise ValueError(f"{word!r} needs a value in the same word, such as -{name}=VALUE.")
    answers.take(_NAMES[key], value if equals else "True", word, key)


def _take_entry(answers, path, key, entry):
    """Let an assignment of the file replace an option of the command line, as in Theano-MPI."""
    known = cfg.KEYS[key]
    if known != "set" and known in answers.told and answers.get(known) != entry.value:
        answers.notes.append(
            f"{path}, line {entry.line}: {key} is taken, and not {answers.told[known].source}, as "
            "a file comes before the command line."
        )
    answers.take(known, entry.value, f"{path}, line {entry.line}: {key}", key)


def _asked(answers):
    """Return the checked request."""
    rule = _options.check_rule(answers.get("rule"))
    known, chosen, hosts = _options.of_rule(rule), {}, answers.hosts
    for name, told in answers.told.items():
        if name in {*_OF_LAUNCHER, *hosts, *_NEEDED}:
            continue
        if rule != "BSP" and told.key in _FOR_BSP:
            answers.notes.append(f"{told.source} is for BSP: {rule} leaves it out.")
        elif name not in known:
            raise ValueError(f"{told.source}: {_options.unknown(rule, name, known)}")
        elif name == "bind":
            chosen[name] = _truth(told.value)
        else:
            chosen[name] = known[name].parse(told.value, told.source)
    devices = answers.get("devices")
    source = answers.told["devices"].source if devices else "DEVICES"
    count = len(find_places(devices, source, **hosts))
    size = answers.get("size")
    if size is not None and size != str(count):
        named = _wording.count(count, "device")
        source = answers.told["size"].source
        answers.notes.append(f"{source} is left out: DEVICES names {named}.")
    if rule == "BSP" and count == 1 and chosen.get("sync_type", "cdd") != "avg":
        answers.notes.append("with one device there is nothing to exchange: BSP_SYNC_TYPE is avg.")
        chosen["sync_type"] = "avg"
    settings = dict(map(_options.parse_setting, answers.get("set") or []))
    return Request.of(
        rule,
        devices,
        answers.get("modelfile"),
        answers.get("modelclass"),
        settings,
        chosen,
        **hosts,
        agent=answers.get("agent"),
        mpirun_args=answers.get("mpirun_args") or "",
        lost_after=answers.get("lost_after"),
    )


def _truth(text):
    """Return whether a value of BIND binds: in Theano-MPI any text does, but an empty one."""
    return text.strip().lower() not in ("", "0", "no", "off", "false")


if __name__ == "__main__":
    sys.exit(main())
