"""The five lessons run with any number of ranks, check themselves, and close their sessions."""

import importlib.util
from pathlib import Path

import pytest
from support import gallery
from support.running import python

DEMOS = Path(__file__).parents[2] / "demos"

PASSED = {
    "demo_1": ["Basic math", "Sliced math"],
    "demo_2": [
        "Making",
        "Writing",
        "Changing the length",
        "Replacing",
        "Growing",
        "Casting",
        "Releasing",
    ],
    "demo_3": [
        "Scatter-gather",
        "Local update",
        "Broadcast update",
        "Sliced output",
        "Sliced update",
    ],
    "demo_4": ["Batch", "Minibatch", "Sliced batch"],
    "demo_5": ["Batch_s", "Sliced batch_s", "Shuffled pass"],
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, DEMOS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", PASSED)
def test_a_lesson_passes_its_own_tests(no_session, capsys, name, n):
    found = load(name).main(["--ranks", str(n)])
    assert found["ranks"] == n
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line for line in lines if line.endswith("passed.")] == [
        f"{test} test passed." for test in PASSED[name]
    ]
    assert gallery.unsaid(name, out) == []


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.sample(1)
def test_a_lesson_is_a_script_for_any_floatx_and_folder(tmp_path, name):
    variables = {"THEANO_FLAGS": "floatX=float32,mode=FAST_COMPILE"}
    child = python(DEMOS / f"{name}.py", cwd=tmp_path, SYNKHRONOS_DEVICES="cpu,cpu", **variables)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("Ranks: 2\n")
    assert child.stdout.count("passed.") == len(PASSED[name])


@pytest.mark.slow("starts an interpreter")
def test_the_lessons_need_nothing_but_synkhronos():
    names = [str(DEMOS / f"{name}.py") for name in PASSED]
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(['tqdm', 'matplotlib', 'sklearn', 'lasagne', 'keras']))\n"
        f"for name in {names}: runpy.run_path(name)"
    )
    child = python("-c", code)
    assert (child.returncode, child.stderr) == (0, "")
