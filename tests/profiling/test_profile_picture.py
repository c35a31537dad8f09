"""The picture of a profile."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.profiles import STRANGE, of, total

import synkhronos as synk
from synkhronos._wording import one_line
from synkhronos.profiling.timeline import NAMES

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module", autouse=True)
def fonts():
    """Have Matplotlib open its font now, which it keeps open, and not in a test."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "text")
    figure.savefig(io.BytesIO())


def test_the_picture_has_a_row_for_each_rank(ranks, tmp_path):
    f = total()
    with synk.profile() as recorded:
        for _ in range(10):
            f(np.ones((8, 3)))
    file = tmp_path / "picture.png"
    figure = recorded.plot(file, last=4)
    assert file.read_bytes().startswith(b"\x89PNG")
    [axes] = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split(" (")[0] for label in labels] == [f"rank {r}" for r in range(ranks.n)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(NAMES)
    calls = of(recorded, "total")
    widths = sorted(patch.get_width() for patch in axes.patches)
    longest = 1e3 * calls["seconds"].reshape(10, ranks.n)[-4:, ranks.master].max()
    np.testing.assert_allclose(widths[-1], longest, rtol=1e-6)
    heights = {round(patch.get_y() + patch.get_height() / 2) for patch in axes.patches}
    assert heights == set(range(ranks.n))
    for wrong, error in ((0, ValueError), ("all", TypeError)):
        with pytest.raises(error, match="last"):
            recorded.plot(last=wrong)


@pytest.mark.parametrize("name", STRANGE, ids=range(len(STRANGE)))
def test_strange_names_break_no_picture(ranks, tmp_path, name):
    f = total(name)
    with synk.profile() as recorded:
        f(np.ones((8, 3)))
    figure = recorded.plot(tmp_path / "picture.svg", last=1)
    assert one_line(name) in [text.get_text() for text in figure.axes[0].texts]


def test_a_wrong_file_is_refused_before_anything_is_drawn(ranks, tmp_path, monkeypatch):
    with synk.profile() as recorded:
        total()(np.ones((8, 3)))
    monkeypatch.setattr(recorded, "_read", None)  # what is drawn
    for file in (3, b"a.png", io.BytesIO()):
        with pytest.raises(TypeError, match="file must be a path, got "):
            recorded.plot(file)
    for file in ("", "picture", tmp_path / "picture.xyz"):
        with pytest.raises(ValueError, match=r"file must end in one of .*\.png.*, got '.*'\."):
            recorded.plot(file)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        recorded.plot(tmp_path / "missing" / "picture.png")
    recorded.plot(str(tmp_path / "PICTURE.PNG"))
    assert [file.name for file in tmp_path.iterdir()] == ["PICTURE.PNG"]


def test_without_matplotlib_it_says_what_to_install(ranks, monkeypatch):
    with synk.profile() as recorded:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs Matplotlib: pip install matplotlib\."):
        recorded.plot()


def test_a_profile_without_calls_can_be_drawn(ranks):
    with synk.profile() as recorded:
        pass
    [axes] = recorded.plot().axes
    assert len(axes.get_yticks()) == ranks.n and not axes.patches


@pytest.mark.slow("imports Matplotlib in an interpreter of its own")
def test_the_example_of_the_documentation_prints_and_draws(tmp_path):
    example = Path(__file__).parents[2] / "docs" / "examples" / "profiled.py"
    file = tmp_path / "profile.png"
    done = subprocess.run(
        [sys.executable, str(example), str(file)],
        env={**os.environ, "THEANO_FLAGS": "mode=FAST_COMPILE"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert {"step", "validate", "broadcast()", "rank"} <= {*names}
    assert file.read_bytes().startswith(b"\x89PNG")
