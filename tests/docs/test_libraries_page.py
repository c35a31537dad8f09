"""The examples of docs/libraries.rst compute on ranks what they compute serially."""

import collections
import collections.abc
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.layouts import ON_DEVICES

PAGE = Path(__file__).parents[2] / "docs" / "libraries.rst"
EXAMPLES = re.findall(r"code-block:: python\n\n((?: {4}.*\n|\n)+)", PAGE.read_text("utf-8"))
# The library of each example, in the order of the page, and the results that it leaves.
RESULTS = {"downhill": "w v", "lasagne": "params correct", "pymc": "total"}


@pytest.mark.skipif(ON_DEVICES, reason="forks with options of its own")
@pytest.mark.filterwarnings("ignore::UserWarning:lasagne")  # names that Theano 1.0 deprecates
@pytest.mark.parametrize("library", RESULTS)
@pytest.mark.usefixtures("compiled_if_thorough")
@pytest.mark.slow("trains twice")
def test_examples_compute_what_they_compute_serially(no_session, monkeypatch, library):
    pytest.importorskip(library)
    # As the import support does where it was installed since it knows downhill.
    monkeypatch.setattr(collections, "Callable", collections.abc.Callable, raising=False)
    [example] = [textwrap.dedent(each) for each in EXAMPLES if f"import {library}" in each]
    serial = example.replace("with synk.parallel(2):", "if True:")
    assert serial != example
    results = []
    for code in (example, serial):
        names = {}
        exec(code, names)
        found = [names[name] for name in RESULTS[library].split()]
        flat = [each for value in found for each in (value if isinstance(value, list) else [value])]
        results.append([each.get_value() if hasattr(each, "get_value") else each for each in flat])
    for parallel, alone in zip(*results):
        np.testing.assert_allclose(parallel, alone, rtol=1e-7, atol=1e-10)
