"""Scripts of docs/examples print what their pages show."""

import re
from pathlib import Path

import pytest
from support.running import python

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = r"\d+\.\d+"


def printed(script, *arguments):
    path = DOCS / "examples" / script
    child = python(path, *arguments, SYNKHRONOS_DEVICES="cpu,cpu")
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.slow("compiles a scan in two processes, and trains twice")
def test_a_recurrent_network_trains_on_ranks_as_serially():
    texts = [printed("recurrent.py"), (DOCS / "examples" / "recurrent.txt").read_text("utf-8")]
    words, shown_words = (re.sub(NUMBER, "", text) for text in texts)
    assert words == shown_words
    losses, shown_losses = ([float(each) for each in re.findall(NUMBER, text)] for text in texts)
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], abs=2e-6)
    assert losses == pytest.approx(shown_losses, abs=1e-4)


def test_the_script_of_the_cluster_goes_on_where_it_was(tmp_path):
    page = (DOCS / "cluster_tutorial.rst").read_text(encoding="utf-8")
    for epochs in ("20", "30"):
        ranks, *lines = printed("cluster.py", tmp_path / "run.npz", epochs).splitlines()
        assert ranks == "2 ranks, start 1"
        assert len(lines) == 2
        assert [line for line in lines if f"    {line}\n" not in page] == []
