"""The messages of docs/troubleshooting.rst are those of the package."""

import ast
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import synkhronos
from synkhronos._host import pythons
from synkhronos.comm.reports import worker_died

PACKAGE = Path(synkhronos.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "troubleshooting.rst").read_text(encoding="utf-8")
VARIES = "\0"  # in place of what a message is filled with
FROM_THEANO = ("WARNING (theano",)


def texts_of(source):
    """Return all strings of a module, with VARIES where something is filled in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = [
            part.value if isinstance(getattr(part, "value", None), str) else VARIES
            for part in parts
        ]
        found.append(re.sub("%s|%d|%.0f|{}", VARIES, "".join(text)))
    return found


def messages():
    lines = [line for line in PAGE.splitlines() if line.startswith("``")]
    quoted = [message for line in lines for message in re.findall("``(.+?)``", line)]
    return [message for message in quoted if not message.startswith(FROM_THEANO)]


@functools.lru_cache(maxsize=None)
def texts():
    """Return all strings of the package, and those that are put together of several."""
    found = [
        text
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in texts_of(path.read_text(encoding="utf-8"))
    ]
    found += [str(worker_died(1, SimpleNamespace(pid=4321, exitcode=-each))) for each in (9, 11)]
    with pytest.raises(ImportError) as refused:
        pythons.check((3, 7))
    return [*found, str(refused.value)]


def is_said(message):
    # The dots stand for what is filled in, and for words that the page leaves out.
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip(" .:,(")]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def test_there_are_messages():
    assert len(messages()) > 20


@pytest.mark.parametrize("message", messages())
def test_a_message_is_in_the_source(message):
    assert is_said(message)


def test_other_messages_are_not_found():
    assert not is_said("... needs helpers: call synkhronos.fork() first.")
