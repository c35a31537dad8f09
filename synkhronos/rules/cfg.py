"""Theano-MPI's configuration files: assignments as bash writes them, parsed and never executed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from synkhronos import _wording
from synkhronos.rules.options import TABLE, nearest

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
_REFUSED = {
    "$": "an expansion",
    "`": "a command",
    "&": "a command",
    "|": "a command",
    "<": "a redirection",
    ">": "a redirection",
    "(": "a command",
    ")": "a command",
}


@dataclass(frozen=True)
class Entry:
    """A value of a file, and the number of its line."""

    value: str | list[str]
    line: int


def read(path: str) -> dict[str, Entry]:
    """Return the assignments of a file by their keys; the last one of a key counts.

    Raises
    ------
    OSError
        If the file can't be read.
    ValueError
        For anything but assignments of known keys, with the number of the line.
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
    for key, entry in _Parser(text, name).assignments():
        if key in _RUNS:
            raise ValueError(
                f"{name}, line {entry.line}: {key} is refused in a file, because it starts "
                f"programs: write tmlauncher {_RUNS[key]} in the command."
            )
        if key not in KEYS:
            raise ValueError(
                f"{name}, line {entry.line}: there is no key {key}.{nearest(key, KEYS)} The keys "
                f"are {', '.join(KEYS)}."
            )
        if isinstance(entry.value, list) and key not in _LISTS:
            raise ValueError(f"{name}, line {entry.line}: {key} takes one value, not a list.")
        found[key] = entry
    return found


class _Parser:
    """Reads a text from its begin to its end."""

    def __init__(self, text, name):
        self._text = text.replace("\r\n", "\n")
        self._name, self._at, self._line = name, 0, 1

    @property
    def _next(self):
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _take(self):
        letter = self._next
        self._at += 1
        self._line += letter == "\n"
        return letter

    def _error(self, what, line=None):
        return ValueError(f"{self._name}, line {line or self._line}: {what}")

    def _skip(self, blanks):
        """Skip blanks, comments, and newlines behind a backslash."""
        while True:
            if self._next and self._next in blanks:
                self._take()
            elif self._next == "#":
                while self._next not in ("", "\n"):
                    self._take()
            elif self._text.startswith("\\\n", self._at):
                self._take(), self._take()
            else:
                return

    def assignments(self):
        """Yield (key, entry) for each assignment."""
        while True:
            self._skip(_ENDS)
            if not self._next:
                return
            line = self._line
            match = _NAME.match(self._text, self._at)
            if match is None or self._text[match.end() : match.end() + 1] != "=":
                raise self._error(self._complaint(match), line)
            self._at = match.end() + 1
            value = self._list() if self._next == "(" else self._word()
            if self._next and self._next not in _ENDS:
                raise self._error(f"{self._next!r} after the value of {match[0]}.", line)
            yield match[0], Entry(value, line)

    def _complaint(self, match):
        end = self._text.find("\n", self._at)
        text = self._text[self._at : len(self._text) if end < 0 else end].strip()
        shown = _wording.shown(text)
        if match and re.match(r"\s+=", self._text[match.end() :]):
            return f"{shown} has a space before =; write {match[0]}=VALUE without spaces."
        before = self._text[: self._at].rpartition("\n")[2]
        if re.search(r"=[ \t]+$", before):
            return f"{before + text!r} has a space after =; write it without spaces."
        if match and self._text.startswith("+=", match.end()):
            return f"{shown} adds to a value; write the whole value."
        return (
            f"{shown} is not an assignment such as RULE=BSP. The file is read and not executed, so "
            "it can't hold commands."
        )

    def _list(self):
        line = self._line
        self._take()
        values = []
        while True:
            self._skip(" \t\n")
            if not self._next:
                raise self._error("the list that begins here has no closing parenthesis.", line)
            if self._next == ")":
                self._take()
                return values
            values.append(self._word())

    def _word(self):
        """Return a word without its quotes."""
        parts = []
        while self._next and self._next not in _ENDS + ")":
            letter = self._take()
            if letter == "'":
                parts.append(self._quoted("'"))
            elif letter == '"':
                parts.append(self._quoted('"'))
            elif letter == "\\":
                escaped = self._take()
                parts.append("" if escaped == "\n" else escaped)
            elif letter in _REFUSED:
                raise self._error(self._refusal(letter))
            else:
                parts.append(letter)
        return "".join(parts)

    def _quoted(self, quote):
        line, parts = self._line, []
        while self._next != quote:
            letter = self._take()
            if not letter:
                raise self._error(f"the text that begins with {quote} here has no end.", line)
            if quote == '"' and letter in "$`":
                raise self._error(self._refusal(letter))
            if quote == '"' and letter == "\\" and self._next and self._next in '\\"$`\n':
                letter = self._take().replace("\n", "")
            parts.append(letter)
        self._take()
        return "".join(parts)

    def _refusal(self, letter):
        rest = self._text[self._at : self._at + 1]
        what = "a command" if letter == "$" and rest == "(" else _REFUSED[letter]
        return (
            f"{letter!r} begins {what}, and the file is read and not executed: write the value "
            "itself, or put it between single quotes if the character is meant."
        )
