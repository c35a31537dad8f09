"""Theano-MPI's configuration files: assignments as bash writes them, parsed and never executed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from synkhronos import _wording
from synkhronos.rules.options import TABLE

# The keys of Theano-MPI, and this package's names for them.
THEIRS = {
    "RULE": "rule",
    "MODELFILE": "modelfile",
    "MODELCLASS": "modelclass",
    "DEVICES": "devices",
    "BSP_SYNC_TYPE": "sync_type",
    "BSP_EXCH_STRATEGY": "exch_strategy",
}
OURS = {name.upper(): name for name in [*TABLE, "set"]}
_RUNS = {"AGENT": "-agent=CMD", "MPIRUN_ARGS": "-mpirun_args=ARGS"}  # they start programs
KEYS = {**OURS, **THEIRS}
_LISTS = {"DEVICES", "SET"}

_NAME = re.compile(r"[A-Za-z_]\w*")
_ENDS = " \t\n;"
# Blanks, comments, and newlines behind a backslash: between assignments, and inside a list.
_BETWEEN = re.compile(r"(?:[ \t\n;]|#[^\n]*|\\\n)*")
_INSIDE = re.compile(r"(?:[ \t\n]|#[^\n]*|\\\n)*")
# Parts of a word: plain characters, an escaped character, text between quotes.
_PLAIN = re.compile(r"""([^'"\\$`&|<>() \t\n;]+)|'([^']*)'""")
_ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\$`]|\\.)*)("?)', re.DOTALL)
_ESCAPE_IN_QUOTES = re.compile(r'\\([\\"$`\n])')
_REFUSED = {
    "$": "an expansion",
    "`": "a command",
    "&": "a command",
    "|": "a command",
    "<": "a redirection",
    ">": "a redirection",
    "(": "a command",
    ")": "a command",
    ";": "a command",  # inside of a list; elsewhere it ends an assignment
}


@dataclass(frozen=True)
class Entry:
    """A value of a file, and the number of its line."""

    value: str | list[str]
    line: int


def read(path: str) -> dict[str, Entry]:
    """Return the assignments of a file by their keys; the last one of a key counts.

    ValueError, for anything but assignments of known keys, names the line.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"the file must be a path, got {_wording.shown(path)}.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8.") from None
    return parse(text, str(path))


def parse(text: str, name: str = "the file") -> dict[str, Entry]:
    r"""Return the assignments of a text by their keys.

    >>> parse('RULE=BSP  # the rule\nDEVICES=("node0:cuda0" node1:cuda0,cuda1)')["DEVICES"]
    Entry(value=['node0:cuda0', 'node1:cuda0,cuda1'], line=2)
    """
    found = {}
    for key, entry in _CfgParser(text, name).assignments():
        if key in _RUNS:
            raise ValueError(
                f"{name}, line {entry.line}: {key} is refused in a file, because it starts "
                f"programs: write tmlauncher {_RUNS[key]} in the command."
            )
        if key not in KEYS:
            raise ValueError(
                f"{name}, line {entry.line}: there is no key {key}."
                f"{_wording.nearest(key, KEYS)} The keys are {', '.join(KEYS)}."
            )
        if isinstance(entry.value, list) and key not in _LISTS:
            raise ValueError(f"{name}, line {entry.line}: {key} takes one value, not a list.")
        found[key] = entry
    return found


class _CfgParser:
    """Parses a text of assignments, from left to right."""

    def __init__(self, text, name):
        self._text, self._name, self._at = text.replace("\r\n", "\n"), name, 0

    @property
    def _next(self):
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _take(self, pattern):
        """Return the match of a pattern here, and go on behind it; None if there is none."""
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _line(self, at):
        return self._text.count("\n", 0, at) + 1

    def _error(self, what, at):
        return ValueError(f"{self._name}, line {self._line(at)}: {what}")

    def assignments(self):
        """Yield (key, entry) for each assignment."""
        while self._take(_BETWEEN) and self._next:
            begin, match = self._at, self._take(_NAME)
            if match is None or self._next != "=":
                raise self._error(self._complaint(begin, match), begin)
            self._at += 1
            value = self._list() if self._next == "(" else self._word()
            if self._next and self._next not in _ENDS:
                raise self._error(f"{self._next!r} after the value of {match[0]}.", begin)
            yield match[0], Entry(value, self._line(begin))

    def _complaint(self, begin, match):
        shown = _wording.shown(self._text[begin:].partition("\n")[0].strip())
        rest = self._text[self._at :]
        if match and re.match(r"\s+=", rest):
            return f"{shown} has a space before =; write {match[0]}=VALUE without spaces."
        before = self._text[:begin].rpartition("\n")[2]
        if re.search(r"=[ \t]+$", before):
            whole = before + self._text[begin:].partition("\n")[0].strip()
            return f"{whole!r} has a space after =; write it without spaces."
        if match and rest.startswith("+="):
            return f"{shown} adds to a value; write the whole value."
        return (
            f"{shown} is not an assignment such as RULE=BSP. The file is read and not executed, so "
            "it can't hold commands."
        )

    def _list(self):
        begin, values = self._at, []
        self._at += 1
        while self._take(_INSIDE) and self._next != ")":
            if not self._next:
                raise self._error("the list that begins here has no closing parenthesis.", begin)
            if self._next == ";":
                raise self._error(self._refusal(), self._at)
            values.append(self._word())
        self._at += 1
        return values

    def _word(self):
        """Return a word without its quotes."""
        parts = []
        while self._next and self._next not in _ENDS + ")":
            if match := self._take(_PLAIN):
                parts.append(match[1] or match[2])
            elif match := self._take(_ESCAPED):
                parts.append(match[1].replace("\n", ""))
            elif self._next in ("'", '"'):
                parts.append(self._quoted())
            else:
                raise self._error(self._refusal(), self._at)
        return "".join(parts)

    def _quoted(self):
        """Return the text between double quotes; raise if a quote has no end."""
        begin, match = self._at, self._take(_QUOTED)
        if match and match[2]:
            return _ESCAPE_IN_QUOTES.sub(lambda each: each[1].replace("\n", ""), match[1])
        if match and self._next in ("$", "`"):
            raise self._error(self._refusal(), self._at)
        quote = self._text[begin]
        raise self._error(f"the text that begins with {quote} here has no end.", begin)

    def _refusal(self):
        letter, is_command = self._next, self._text.startswith("$(", self._at)
        what = "a command" if is_command else _REFUSED[letter]
        return (
            f"{letter!r} begins {what}, and the file is read and not executed: write the value "
            "itself, or put it between single quotes if the character is meant."
        )
