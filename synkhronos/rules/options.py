"""The options of the rules: names, kinds, defaults and meanings, for classes, files and commands.

The one table ``TABLE`` is read by the constructors of the rules, by ``synkhronos rule``, by
``tmlauncher`` and its files, and by the API page.
"""

from __future__ import annotations

import ast
import contextlib
import math
import operator
import os
from dataclasses import dataclass
from typing import Any, Collection

from synkhronos import _wording
from synkhronos._machine.files import PlantedLink, followed

# One sentence for each rule. Its ranks run the module that has its name in lower case.
SUMMARIES = {
    "BSP": "all ranks step together: Valiant 1990, arXiv:1605.08325",
    "EASGD": "workers and a center attract one another: arXiv:1412.6651",
    "GOSGD": "workers send their parameters to random others: arXiv:1611.09726",
    "ASGD": "workers send their updates to a server: Downpour SGD, Dean et al. 2012",
}
RULES = tuple(SUMMARIES)
TOGETHER = ("BSP",)  # rules whose ranks step together: none goes on without another
SERVED = ("EASGD", "ASGD")  # rules whose rank 0 is a server
_WORDS_OF_TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_SHOWN = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


@dataclass(frozen=True)
class Option:
    """One option of one or more rules."""

    name: str  # a keyword; in files ``name.upper()``, in commands ``--name-with-dashes``
    rules: tuple[str, ...]  # that have it
    kind: type  # int, float, bool or str
    default: Any
    sentence: str  # says what it does
    least: float = -math.inf  # of a number
    most: float = math.inf
    above: bool = False  # whether `least` itself is refused
    choices: tuple[str, ...] = ()  # all values of a text, if they are few
    others: tuple[Any, ...] = ()  # further values that it takes, such as None
    is_of_launcher: bool = False  # whether the launcher alone needs it, and not the ranks

    @property
    def expected(self) -> str:
        """The values that it takes, in words.

        >>> TABLE["alpha"].expected
        'a number above 0 and at most 1'
        """
        words = " or ".join(map(repr, self.choices)) or _SHOWN[self.kind]
        limits = []
        if self.least > -math.inf:
            limits.append(f"{'above' if self.above else 'from'} {self.least}")
        if self.most < math.inf:
            limits.append(f"at most {self.most}" if self.above else f"to {self.most}")
        elif limits and not self.above:
            limits.append("on")
        words = f"{words} {(' and ' if self.above else ' ').join(limits)}".strip()
        return " or ".join([words, *(repr(other) for other in self.others)])

    def check(self, value: Any, name: str | None = None) -> Any:
        """Return a value as one of this option's kind; raise TypeError or ValueError.

        >>> TABLE["tau"].check(3)
        3
        """
        name = name or self.name
        if any(value is other for other in self.others):
            return value
        given, value = value, self._of_its_kind(value, name)
        fits = not self.choices or value in self.choices
        if self.kind in (int, float):
            fits = self.least < value if self.above else self.least <= value
            fits = fits and value <= self.most and value != math.inf
        elif self.kind is str and not self.choices:
            fits = bool(value.strip()) and "\0" not in value
        if not fits:
            meant = _wording.nearest(value, self.choices) if self.choices else ""
            raise ValueError(f"{name} must be {self.expected}, got {_wording.shown(given)}.{meant}")
        return value

    def _of_its_kind(self, value, name):
        is_bool = _wording.is_bool(value)
        if self.kind is bool and is_bool:
            return bool(value)
        if self.kind is str and isinstance(value, (str, os.PathLike)):
            path = os.fspath(value)
            if isinstance(path, str):
                return path
        if self.kind in (int, float) and not is_bool and not isinstance(value, (str, bytes)):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return operator.index(value) if self.kind is int else float(value)
        raise TypeError(f"{name} must be {self.expected}, got {_wording.shown(value)}.")

    def parse(self, text: str, name: str | None = None) -> Any:
        """Return the value that a text gives, as commands and files do; raise ValueError.

        >>> TABLE["scale_lr"].parse("no"), TABLE["tau"].parse("7"), TABLE["resume"].parse("True")
        (False, 7, True)
        """
        name, word = name or self.name, text.strip()
        for other in self.others:
            if word.lower() == str(other).lower():
                return other
        if self.kind is str:
            return self.check(word, name)
        try:
            if self.kind is bool:
                return _WORDS_OF_TRUTH[word.lower()]
            number = self.kind(word)
        except (KeyError, ValueError):
            raise ValueError(f"{name} must be {self.expected}, got {text!r}.") from None
        return self.check(number, name)


_OTHERS = tuple(rule for rule in RULES if rule not in SERVED)
_BSP, _EASGD, _GOSGD, _ASGD = (("BSP",), ("EASGD",), ("GOSGD",), ("ASGD",))

_ROWS = [
    Option("sync_type", _BSP, str, "cdd", "what ranks exchange: velocities (cdd), parameters "
           "(avg), or pairs of ranks swap parameters (swap)", choices=("cdd", "avg", "swap")),
    Option("exchange_freq", _BSP, int, 1, "avg and swap: exchange after so many batches",
           least=1),
    Option("warm_up_epochs", _BSP, int, 5, "scale the learning rate in so many epochs", least=0),
    Option("scale_lr", _BSP, bool, True, "scale the learning rate by the number of ranks"),
    Option("alpha", _EASGD, float, 0.5, "how far a worker and the center move to one another",
           least=0, most=1, above=True),
    Option("p", _GOSGD, float, 0.1, "the probability that a worker sends its parameters after a "
           "batch", least=0, most=1),
    Option("tau", SERVED, int, 10, "a worker asks the server after so many batches", least=1),
    Option("learning_rate_rule", _ASGD, str, "staleness", "the server divides an update by 1 + the "
           "updates of others since its worker took the weights (staleness), scales each element "
           "of it (adagrad), or adds it as it is (constant)",
           choices=("staleness", "adagrad", "constant")),
    Option("gamma", _ASGD, float, 0.01, "the learning rate of adagrad", least=0, above=True),
    Option("server", SERVED, str, "first", "the first device is the server's (first), or one more "
           "process without a device is the server (extra)", choices=("first", "extra")),
    Option("exch_strategy", RULES, str, "nccl32", "the exchange between ranks: all_reduce by NCCL "
           "or in host memory (ar, asa), in 32 or 16 bits",
           choices=("nccl32", "nccl16", "ar", "asa32", "asa16")),
    Option("print_freq", RULES, int, 40, "print costs after so many batches", least=1),
    Option("snapshot_freq", _OTHERS, int, 5, "write a snapshot after so many epochs; 0: "
           "at the end and at a Ctrl-C only", least=0),
    Option("snapshot_freq", SERVED, int, 2, "write a snapshot after so many epochs; 0: at the end "
           "and at a Ctrl-C only", least=0),
    Option("snapshot_path", RULES, str, "./snapshots/", "the folder of snapshots"),
    Option("inforec_path", RULES, str, "./inforec/", "the folder of the recorder's files"),
    Option("resume", RULES, str, False, "go on from the newest snapshot in the folder (True), or "
           "from a snapshot's file", others=(False, True)),
    Option("patience", RULES, float, 600.0, "fail if other ranks do not come within so many "
           "seconds", least=0, above=True),
    Option("seed", RULES, int, 23455, "the seed of all random numbers", least=0, most=2**32 - 1),
    Option("made_batches", RULES, int, None, "with SYNKHRONOS_DATA=made: make up so many batches",
           least=1, others=(None,)),
    Option("log_path", RULES, str, "./logs/", "the folder of log files: one for each rank, in a "
           "folder for each run", is_of_launcher=True),
    Option("bind", RULES, bool, False, "bind each rank to cores of its own, near its device",
           is_of_launcher=True),
    Option("grace", RULES, float, 30.0, "let ranks have so many seconds to write a snapshot and "
           "end, after a Ctrl-C", least=0, is_of_launcher=True),
]  # fmt: skip

TABLE = {row.name: row for row in _ROWS}
# What is named if the error does not fall.
TUNED = ("learning_rate", "warm_up_epochs", "alpha", "tau", "gamma", "p")


def of_rule(rule: str) -> dict[str, Option]:
    """Return the options of a rule by their names, those of the launcher too.

    >>> of_rule("GOSGD")["p"].default
    0.1
    """
    rule = check_rule(rule)
    return {row.name: row for row in _ROWS if rule in row.rules}


def check_rule(rule: str) -> str:
    """Return the name of a rule; raise TypeError or ValueError if there is no such rule.

    >>> check_rule("BSP")
    'BSP'
    """
    if not isinstance(rule, str):
        raise TypeError(f"the rule must be one of {', '.join(RULES)}, got {_wording.shown(rule)}.")
    if rule not in RULES:
        raise ValueError(
            f"there is no rule {rule!r}: it must be one of {', '.join(RULES)}."
            f"{_wording.nearest(rule, RULES)}"
        )
    return rule


def check(rule: str, /, **given: Any) -> dict[str, Any]:
    """Return all options of a rule, those of the launcher too: as they are given, or defaults.

    Raises ``TypeError`` for a value of a wrong kind and for an option that the rule does not have,
    ``ValueError`` for a value that is refused.

    >>> check("EASGD", alpha=0.25)["alpha"], check("GOSGD")["p"]
    (0.25, 0.1)
    """
    known = of_rule(rule)
    for name in given:
        if name not in known:
            raise TypeError(unknown(rule, name, known))
    defaults = {name: option.default for name, option in known.items()}
    return {**defaults, **{name: known[name].check(value) for name, value in given.items()}}


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and the value of a model's setting such as ``n_epochs=3``.

    A value is a number, a text, None, True or False, or lists and dicts of them, as Python writes
    them; a text needs no quotes.

    >>> parse_setting("data.n_batch_train=10"), parse_setting("lr_step=[20, 40]")
    (('data.n_batch_train', 10), ('lr_step', [20, 40]))
    >>> parse_setting("name=alex")
    ('name', 'alex')
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a setting of the model is NAME=VALUE, such as n_epochs=3, got {text!r}.")
    check_setting(name.strip(), None)
    try:
        found = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = value
    return name.strip(), check_setting(name.strip(), found)


def check_setting(name: str, value: Any) -> Any:
    """Return the value of a model's setting, in kinds that JSON has; raise TypeError or ValueError.

    >>> check_setting("lr_step", (20, 40))
    [20, 40]
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a setting must be a text, got {_wording.shown(name)}.")
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{name!r} is no name of a setting: it must be one of the model's attributes, such as "
            "n_epochs, or of its data's, such as data.n_batch_train."
        )
    return _plain(name, value)


def _plain(name, value):
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"the setting {name} must be finite, got {value!r}.")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, each) for key, each in value.items()}
    raise TypeError(
        f"the setting {name} must be a number, a text, None, True or False, or lists and dicts of "
        f"them, got {_wording.shown(value)}."
    )


def check_folder(name: str, path: str) -> None:
    """Raise PermissionError if the path follows a link that another user may have planted."""
    try:
        followed(path)
    except PlantedLink as error:
        raise PermissionError(
            f"{name}: the link {error.filename!r} belongs to another user, in a folder to which "
            "all users may write: its owner could choose which files this run replaces. Give it a "
            f"folder of your own, {flag(name)} FOLDER."
        ) from None


def flag(name: str) -> str:
    """Return the option of a command for an option's name.

    >>> flag("print_freq")
    '--print-freq'
    """
    return f"--{name.replace('_', '-')}"


def unknown(rule: str, name: str, known: Collection[str]) -> str:
    """Return the sentence about an option that a rule does not have.

    >>> unknown("EASGD", "alhpa", ["alpha", "tau"])
    "EASGD has no option 'alhpa'. Perhaps you meant alpha."
    """
    if name in TABLE and name not in known:
        rules = dict.fromkeys(rule for row in _ROWS if row.name == name for rule in row.rules)
        return f"{rule} has no option {name!r}: it is one of {' and '.join(rules)}."
    meant = _wording.nearest(name, known)
    if meant:
        return f"{rule} has no option {name!r}.{meant}"
    return f"{rule} has no option {name!r}; there are: {', '.join(sorted(known))}."
