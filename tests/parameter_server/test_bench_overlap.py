"""``synkhronos bench parameter_server --overlap``."""

import json
import os
import subprocess
import sys

import pytest

from synkhronos.__main__ import main
from synkhronos.tools.bench import overlap

AS_ROOT = {
    name: "1"
    for mpi in ("OMPI", "PRTE")
    for name in (f"{mpi}_ALLOW_RUN_AS_ROOT", f"{mpi}_ALLOW_RUN_AS_ROOT_CONFIRM")
}
FIGURES = {
    "seconds": {
        "overlap": [1.0, 1.5, 2.0],
        "everything": [2.0, 3.0, 3.0],
        "compute": [1.0, 1.0, 1.0],
        "communicate": [2.0, 2.0, 2.5],
    },
    "nbytes": 40_000_000,
    "keys": 8,
    "batch": 64,
    "beside": 0.02,
    "summary": None,
}


class Arguments:
    servers, workers, timeline = 1, 2, None


def test_the_table_has_the_ratio_of_turns_and_the_balance_of_computing_and_sending():
    text = overlap.text(Arguments, FIGURES)
    assert text.startswith("1 server, 2 workers; 40.0 MB of parameters in 8 keys; 64 rows for each")
    rows = {line[:44].strip(): line[44:].split() for line in text.splitlines()}
    assert rows["push at once, with priorities; wait late"] == ["1500.0", "1000.0", "2000.0"]
    assert "overlap is 2.00 times as fast as everything at once (1.50 to 2.00 of 3 turns)" in text
    assert "computing takes 0.50 of the time of sending" in text
    assert "does 2 % of the copying" in text


def test_a_picture_that_can_not_be_written_is_refused_first(capsys):
    line = ["bench", "parameter_server", "--overlap", "--timeline", "no/such/folder.png"]
    assert main(line) == 2
    assert "can't write no/such/folder.png" in capsys.readouterr().err


def test_a_job_that_fails_is_told(capsys, monkeypatch):
    monkeypatch.setattr(overlap, "_WORKER", overlap._WORKER.with_name("no_such_file.py"))
    assert main(["bench", "parameter_server", "--overlap"]) != 0
    assert "the workers have told no figures" in capsys.readouterr().err


@pytest.mark.slow("starts a job of mpirun")
@pytest.mark.parametrize("batch", ["8", None])
def test_a_small_network_is_measured(tmp_path, batch):
    line = [sys.executable, "-m", "synkhronos", "bench", "parameter_server", "--overlap"]
    line += ["--units", "16,12", "--steps", "2", "--turns", "2"]
    line += [] if batch is None else ["--batch", batch]
    line += ["--json", str(tmp_path / "figures.json"), "--timeline", str(tmp_path / "steps.json")]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **AS_ROOT, "THEANO_FLAGS": "cxx=,device=cpu,mode=FAST_COMPILE"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["batch"] == 8 if batch else figures["batch"] >= 1
    rows = f"{figures['batch']} rows for each worker"
    assert f"1 server, 2 workers; 0.1 MB of parameters in 6 keys; {rows}" in done.stdout
    assert {way: len(times) for way, times in figures["seconds"].items()} == dict.fromkeys(
        overlap.WAYS, 2
    )
    assert min(min(times) for times in figures["seconds"].values()) > 0
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    rows = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {"device 0", "sending", "receiving", "key w0", "key b2"} <= rows
    pushed = [each["args"]["key"] for each in events if each.get("cat") == "push"]
    assert pushed[0] in ("w2", "b2") and pushed.index("w0") > pushed.index("w1")
