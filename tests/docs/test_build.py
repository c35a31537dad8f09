"""The pages build without a warning and without a network."""

import os
import sys
from pathlib import Path

import pytest
from support.running import run

DOCS = Path(__file__).parents[2] / "docs"
NOWHERE = "http://127.0.0.1:9"  # no server has this port, so each download fails


@pytest.mark.slow("Sphinx reads all pages and sources")
def test_the_pages_build_without_a_network(tmp_path):
    pytest.importorskip("sphinx", reason="needs Sphinx: pip install '.[docs]'")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), NOWHERE)
    line = "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path
    done = run(sys.executable, *line, env={**os.environ, **proxies}, timeout=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    for group in ("Start", "Guide", "Training", "Running", "Reference", "Inside"):
        assert f'<span class="caption-text">{group}</span>' in index
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "_modules/synkhronos/session.html#fork" in api
    assert "https://docs.python.org/3/library/exceptions.html#TypeError" in api
    assert "copybutton.js" in api
    for page, root in ("index", "./"), ("_modules/synkhronos/session", "../../"):
        text = (tmp_path / f"{page}.html").read_text(encoding="utf-8")
        assert '<p class="versions">' in text and f'new URL("{root}", location)' in text
