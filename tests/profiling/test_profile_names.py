"""Names of functions, Data and variables can be anything: tables and pictures show them."""

import html
import unicodedata

import numpy as np
import pytest
import theano
import theano.tensor as T
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import function
from support.layouts import Layout, forked
from support.profiles import STRANGE, of, total

import synkhronos as synk
from synkhronos._wording import MOST_CHARACTERS, one_line, without_folder


@pytest.fixture(scope="module")
def ranks():
    with forked(Layout(2)) as ranks:
        yield ranks


@given(st.text())
def test_what_is_shown_is_one_short_line_that_can_be_printed(name):
    assert len(one_line(name)) <= MOST_CHARACTERS
    assert not {*map(unicodedata.category, one_line(name))} & {"Cc", "Cs", "Zl", "Zp"}
    if name.isprintable() and len(name) <= MOST_CHARACTERS:
        assert one_line(name) == name


def test_of_a_long_name_the_begin_and_the_end_are_shown():
    assert one_line("a" * MOST_CHARACTERS) == "a" * MOST_CHARACTERS
    name = one_line("begin" + "a" * MOST_CHARACTERS + "end")
    assert name.startswith("begin") and name.endswith("end") and "a...a" in name


@pytest.mark.parametrize(
    "name, short",
    [
        ("/home/me/train.py:12", "train.py:12"),
        ("/home/my scripts/train.py:12", "train.py:12"),
        ("generator/step", "generator/step"),
        ("/step", "/step"),
        ("generator/step:1", "generator/step:1"),
        ("<stdin>:1", "<stdin>:1"),
    ],
)
def test_only_names_of_files_lose_their_folder(name, short):
    assert without_folder(name) == short


def test_names_with_a_slash_are_kept(ranks):
    names = ["generator/step", "discriminator/step"]
    functions = [total(name) for name in names]
    x = T.dmatrix("x")
    functions.append(function([x], (x.sum(), "sum")))
    with synk.profile() as recorded:
        for f in functions:
            f(np.ones((8, 3)))
    lines = recorded.summary().splitlines()
    for name in names:
        assert len(of(recorded, name)) == ranks.n
        assert [line for line in lines if line.startswith(f"{name} ")]
    [line] = [line for line in lines if line.startswith("test_profile_names.py:")]
    assert "/" not in line


@pytest.mark.parametrize("name", STRANGE, ids=range(len(STRANGE)))
def test_strange_names_break_no_table(ranks, name):
    f = total(name)
    f(np.ones((8, 3)))
    with synk.profile() as recorded:
        f(np.ones((8, 3)))
    lines = recorded.summary().splitlines()
    assert len(lines) == 3 + 2 + 3 + ranks.n
    assert lines[4].startswith(f"{one_line(name)} ") and lines[4].split()[-13] == "1"
    shown = recorded._repr_html_()
    assert f"<tr><td>{html.escape(one_line(name))}</td><td>1</td><td>0</td>" in shown
    assert shown.count("<tr>") == 2 + 1 + ranks.n and f"<caption>{lines[2]}</caption>" in shown
    pytest.importorskip("matplotlib")
    [axes] = recorded.plot(last=1).axes
    assert [text.get_text() for text in axes.texts] == [one_line(name)]


@pytest.mark.parametrize("name", [*STRANGE, 3, ("a", 1)], ids=range(len(STRANGE) + 2))
def test_strange_names_break_no_status(ranks, name):
    data = synk.data(np.ones(3), name=name)
    variable = theano.shared(np.ones(3))
    f = function([], (variable.sum(), "max"), name=str(name))
    variable.name = name
    now = synk.status()
    assert str(name) in [each.name for each in now.data]
    assert str(name) in [each.name for each in now.shared_variables]
    assert str(name) in [each.name for each in now.functions]
    titles = repr(now).count("\n\n")
    entries = len(now.ranks) + len(now.data) + len(now.functions) + len(now.shared_variables)
    assert repr(now).count("\n") == 3 * titles + entries
    if one_line(name):
        assert repr(now).count(one_line(name)) >= 3
        assert now._repr_html_().count(html.escape(one_line(name))) >= 3
    del data, f
