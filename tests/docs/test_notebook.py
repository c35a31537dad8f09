"""The notebook runs as it is stored, and calls in a kernel can be interrupted."""

import json
import re
import socket
from pathlib import Path

import pytest
from support.jupyter import in_kernel, needs_jupyter

from synkhronos import collectives

NOTEBOOK = Path(__file__).parents[2] / "demos" / "collectives.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The cells after a run from top to bottom, in which the one that trains runs twice."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    [at] = [number for number, cell in enumerate(notebook["cells"]) if cell["id"] == "train"]
    notebook["cells"].insert(at + 1, {**notebook["cells"][at], "id": "train-again"})
    (folder / "notebook.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    in_kernel(folder, "execute", "notebook.ipynb", "executed.ipynb")
    return code_cells(folder / "executed.ipynb")


@pytest.fixture(scope="module")
def stored():
    return code_cells(NOTEBOOK)


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell for cell in cells if cell["cell_type"] == "code"}


def shown(cell):
    """Return what a cell shows, for pictures their kind and size."""
    result = []
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            text = output["evalue"].replace(f" on {socket.gethostname()} ", " on localhost ")
            result.append(f"{output['ename']}: {text}")
        elif output["output_type"] == "stream":
            result += ["".join(output["text"])] if output["name"] == "stdout" else []
        else:
            result += ["".join(output["data"]["text/plain"]), *sorted(output["data"])]
    return result


@needs_jupyter
@pytest.mark.slow("a kernel compiles all that the notebook computes")
def test_it_shows_what_is_stored(executed, stored):
    for key, cell in stored.items():
        assert shown(executed[key]) == shown(cell), key


@needs_jupyter
@pytest.mark.slow("a kernel compiles all that the notebook computes")
def test_its_errors_are_those_on_purpose(executed):
    errors = {}
    for key, cell in executed.items():
        names = [out["ename"] for out in cell["outputs"] if out["output_type"] == "error"]
        assert bool(names) == ("raises-exception" in cell["metadata"].get("tags", ())), key
        if names:
            errors[key] = names
    assert errors == {
        "unequal": ["ValueError"],
        "argument": ["TypeError"],
        "worker-error": ["WorkerError"],
        "after-close": ["SessionError"],
    }


@needs_jupyter
@pytest.mark.slow("a kernel compiles all that the notebook computes")
def test_some_of_its_results(executed):
    results = {key: "".join(shown(cell)[:1]) for key, cell in executed.items()}
    assert results["fork-3"] == "3"
    assert results["lengths"] == "[2, 2, 3]"
    assert results["all-reduce"].startswith("<Figure")
    assert results["worker-error"].startswith("WorkerError: Rank 2 of 3 on localhost raised Index")
    assert results["worker-fine"] == "array([ 0., 10., 40.])"
    assert results["train"] == "'losses agree: True, replicas equal: True'"
    assert results["train-again"] == results["train"]


def test_every_collective_is_in_it(stored):
    text = "".join("".join(cell["source"]) for cell in stored.values())
    missing = [verb for verb in collectives.__all__ if f"synk.{verb}(" not in text]
    assert missing == []


def test_what_is_stored_is_complete_and_names_no_machine(stored):
    counts = [cell["execution_count"] for cell in stored.values()]
    assert counts == list(range(1, len(counts) + 1))
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 400_000
    text = re.sub(r'"image/png": ".*?"', "", text)
    assert not re.findall(r"/home|/root|/tmp|/work|ipykernel_\d|site-packages", text)


@needs_jupyter
@pytest.mark.slow("starts a kernel")
def test_calls_in_a_kernel_are_interrupted_and_the_session_lives_on(tmp_path):
    found = json.loads(in_kernel(tmp_path, "interrupt"))
    begin, *others = found["said"]
    assert begin == [None, []]
    assert len(others) == 9
    for interrupted, known, new in zip(others[0::3], others[1::3], others[2::3]):
        # IPython may go on about it: an interrupted frame of Python 3.11 need not have a line.
        assert (interrupted[0], interrupted[1][0]) == ("KeyboardInterrupt", "begun\n")
        assert known == [None, ["array([1., 2., 3.])"]]
        assert new == [None, ["array(6.)"]]
    assert (found["workers"], found["same"]) == (1, True)
    assert found["alive"] == 0  # a killed kernel leaves no worker
