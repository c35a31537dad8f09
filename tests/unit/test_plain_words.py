"""Docstrings and comments of the package and the demos are in plain words."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import synkhronos

ROOT = Path(synkhronos.__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("synkhronos", "demos")
    for path in (ROOT / folder).rglob("*.py")
)

NOT_VERBS = {"have", "what", "which", "how", "who", "whose", "where", "when", "whoever"}
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
RULE = re.compile(r"#\s*[-=#*~_]{3}|.*[-=#*~_]{3}$")


def problems(source):
    """Return (line, what is wrong with it) for each fault of a module's docstrings and comments."""
    found = [*docstring_problems(ast.parse(source)), *comment_problems(source)]
    return sorted(found)


def docstring_problems(tree):
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line = node.body[0].lineno
        first = re.match(r"\W*(\w*)", text)[1].lower()
        if first in NOT_VERBS or (first == "whether" and not is_property(node)):
            yield line, f"a docstring begins with {first!r}"
        person = PERSONS.search(text)
        if person:
            yield line, f"a docstring has {person[0]!r}"


def is_property(node):
    """Return whether a definition is that of a property, cached or not."""
    names = [ast.dump(each) for each in getattr(node, "decorator_list", [])]
    return any("property" in name for name in names)


def comment_problems(source):
    lines = ["", *source.splitlines(), ""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        person = PERSONS.search(token.string)
        if person:
            yield line, f"a comment has {person[0]!r}"
        is_alone = lines[line].strip() == token.string and not token.string.startswith("#!")
        between_blanks = not lines[line - 1].strip() and not lines[line + 1].strip()
        if is_alone and (between_blanks or RULE.match(token.string)):
            yield line, "a comment is a banner"


def test_words_are_plain():
    found = {name: problems((ROOT / name).read_text(encoding="utf-8")) for name in FILES}
    assert {name: each for name, each in found.items() if each} == {}


def test_all_modules_are_looked_at():
    assert {"synkhronos/__init__.py", "synkhronos/inputs.py", "demos/train_digits.py"} <= {*FILES}


@pytest.mark.parametrize(
    "source, expected",
    [
        ('"""What ranks share."""\n', (1, "a docstring begins with 'what'")),
        ('def f():\n    """Have ranks wait."""\n', (2, "a docstring begins with 'have'")),
        ('def f():\n    r"""Whether it waits."""\n', (2, "a docstring begins with 'whether'")),
        ('class A:\n    """Which ranks wait."""\n', (2, "a docstring begins with 'which'")),
        (
            'class A:\n    @wait\n    async def f(self):\n        """How it waits."""\n',
            (4, "a docstring begins with 'how'"),
        ),
        ('def f():\n    """Wake whoever waits."""\n', (2, "a docstring has 'whoever'")),
        ('def f():\n    """Wait.\n\n    Nobody waits.\n    """\n', (2, "a docstring has 'Nobody'")),
        ("x = 1  # rank that knows who waits\n", (1, "a comment has 'who'")),
        ("x = 1\n\n# The gate.\n\ny = 2\n", (3, "a comment is a banner")),
        ("# The gate.\n\ny = 2\n", (1, "a comment is a banner")),
        ("x = 1\n# --------\ny = 2\n", (2, "a comment is a banner")),
        ("x = 1\n# ---- The gate\ny = 2\n", (2, "a comment is a banner")),
        ("class A:\n    x = 1\n\n    # The gate ======\n    y = 2\n", (4, "a comment is a banner")),
    ],
)
def test_faults_are_found(source, expected):
    assert problems(source) == [expected]


@pytest.mark.parametrize(
    "source",
    [
        '"""Cells of the barriers."""\n',
        'class A:\n    @property\n    def f(self):\n        """Whether it waits."""\n',
        'class A:\n    @functools.cached_property\n    def f(self):\n        """Whether."""\n',
        'def f():\n    """Return the rank whose part is missing."""\n',
        "#!/usr/bin/env python\n\nx = 1\n",
        "x = 1\n\n# Two ranks, so that one waits.\ny = 2\n",
        "x = 1\n#    ... and so are the others...\ny = 2\n",
        "x = 1\n\n# Written after the flag is set. The reader\n# looks at both.\n\ny = 2\n",
        'x = """\n\n# who waits\n\n"""\n',
    ],
)
def test_plain_words_are_left_alone(source):
    assert problems(source) == []
