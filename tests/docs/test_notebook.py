"""The notebook runs as it is stored, and calls in a kernel can be interrupted."""

import json
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
        raises = any(out["output_type"] == "error" for out in executed[key]["outputs"])
        assert raises == ("raises-exception" in cell["metadata"].get("tags", ())), key
    assert shown(executed["train-again"]) == shown(stored["train"])
    assert "losses agree: True, replicas equal: True" in shown(stored["train"])[0]


def test_every_collective_is_in_it(stored):
    text = "".join("".join(cell["source"]) for cell in stored.values())
    missing = [verb for verb in collectives.__all__ if f"synk.{verb}(" not in text]
    assert missing == []


def test_what_is_stored_is_complete(stored):
    counts = [cell["execution_count"] for cell in stored.values()]
    assert counts == list(range(1, len(counts) + 1))


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
