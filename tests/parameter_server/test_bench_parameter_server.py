"""``synkhronos bench parameter_server``: every figure, wrong sums, MXNet beside it."""

import argparse
import importlib.util
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
from support.leaks import nothing_left

from synkhronos.parameter_server import Store
from synkhronos.tools.bench import BENCHMARKS, kvstore, options, parameter_server, peers

QUICK = ("--sizes", "1K,8K", "--keys", "3", "--seconds", "0.001")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(options, "busy_cores", lambda: 1.5)  # it takes half a second

    def run(*arguments):
        parser = argparse.ArgumentParser()
        parameter_server.add_arguments(parser)
        with nothing_left():
            return parameter_server.main(parser.parse_args([*QUICK, *arguments]))

    return run


def test_it_is_a_benchmark():
    assert BENCHMARKS["parameter_server"] == parameter_server.__name__


@pytest.mark.parametrize("devices", ["1", "2", "3"])
def test_every_figure_is_printed(bench, tmp_path, capsys, devices):
    path = tmp_path / "figures.json"
    given = ("--devices", devices, "--no-peers", "--json", str(path))
    assert bench(*given) == 0, capsys.readouterr().err
    figures = json.loads(path.read_text())
    rows = [(1024, 1), (8192, 1), (1024, 3)]
    names = ["one caller", "device threads"]
    cells = figures["cells"]
    assert [(c["bytes"], c["keys"], c["system"]) for c in cells] == [
        (*row, name) for row in rows for name in names
    ]
    for cell in cells:
        assert 0 < cell["p10_us"] <= cell["us"] <= cell["p90_us"]
        assert cell["rounds"] >= parameter_server.TURNS
    assert list(figures["issue"]) == ["1024", "8192"]
    calls = {"last push", "last pull_req"} | ({"push", "pull_req"} if devices != "1" else set())
    assert all(set(each) == calls for each in figures["issue"].values())
    out, err = capsys.readouterr()
    assert figures["busy_cores"] == 1.5 and "others keep 1.5 cores busy" in err
    title, head, *lines = out.splitlines()
    assert title.startswith(f"{devices} device") and head.split() == " ".join(names).split()
    assert lines[0].split()[:2] == ["1,024", "bytes"]
    assert lines[2].split()[:3] == ["3", "keys,", "each"]
    assert lines[3].startswith("device threads begin ") and len(figures["apart_us"]) == 3
    assert lines[4].startswith("issue, 1,024 bytes: ")


def test_recorded_figures_are_named_as_such(bench, capsys):
    assert bench() == 0
    out, err = capsys.readouterr()
    _, head, first, second, keys, *_ = out.splitlines()
    assert head.endswith("mshadow-ps*   MXNet local*  MXNet device*")
    assert first.split()[-3:] == ["74", "100", "100"]
    assert second.split()[-3:] == ["-", "-", "-"]  # 8 KiB was not recorded
    assert keys.split()[-3:] == ["-", "-", "-"]  # nor were 3 keys
    assert "not of this run" in " ".join(parameter_server.__doc__.split())
    if importlib.util.find_spec("mxnet") is None:
        assert "not compared with MXNet: mxnet is not installed: pip install" in err


def test_a_wrong_sum_is_an_error(bench, capsys, monkeypatch):
    waited = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(Store, "pushpull", lambda store, keys, values: waited)
    assert bench("--no-peers") == 1
    assert "a sum is wrong: 1.0 in place of 3" in capsys.readouterr().err
    monkeypatch.setattr(Store, "pull_wait", lambda store, key, device: None)
    with nothing_left(), pytest.raises(parameter_server.WrongResult):
        parameter_server.measure_issue(2, 1 << 22, 0.001)


def test_threads_do_not_wait_for_one_that_has_failed():
    system = parameter_server._DeviceThreads(2)
    seconds = system.times(1024, 1, 2)
    assert len(seconds) == 2 and min(seconds) > 0

    def fail(array, key, device):
        raise OSError(f"device {device}")

    system._made.push = fail
    with pytest.raises(OSError, match="device"):
        system.times(1024, 1, 2)
    system.forget()


# The calls of MXNet that are timed, with its results; a process imports it as `mxnet`.
STAND_IN = """
import numpy as np

__version__ = "stand-in"
broken = {broken}

class Array:
    def __init__(self, values): self.values = values
    def __setitem__(self, at, value): self.values[at] = value
    def wait_to_read(self): pass
    def asnumpy(self): return self.values

class ndarray:
    zeros = staticmethod(lambda shape, device=None: Array(np.zeros(shape, "float32")))
    waitall = staticmethod(lambda: None)

class kv:
    @staticmethod
    def create(kind):
        assert kind in ("local", "device")
        return Store()

cpu = int

class Store:
    def init(self, keys, values):
        self.keys = keys if isinstance(keys, list) else [keys]
        assert len(self.keys) == (len(values) if isinstance(keys, list) else 1)
    def pushpull(self, keys, values):
        for arrays in values if isinstance(keys, list) else [values]:
            total = sum(array.values for array in arrays) - broken
            for array in arrays: array[:] = total
"""


@pytest.fixture
def mxnet(tmp_path, monkeypatch):
    """Return a function that makes a stand-in for MXNet, and lets interpreters find it."""

    def make(broken=0, text=STAND_IN):
        (tmp_path / "mxnet.py").write_text(textwrap.dedent(text).replace("{broken}", str(broken)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


def test_mxnet_is_timed_in_a_process_of_its_own(bench, mxnet, tmp_path, capsys):
    mxnet()
    path = tmp_path / "figures.json"
    given = ("--peer-python", sys.executable, "--json", str(path))
    assert bench(*given) == 0, capsys.readouterr().err
    figures = json.loads(path.read_text())
    assert figures["mxnet"] == "stand-in" and figures["missing"] == {}
    timed = [(cell["bytes"], cell["keys"]) for cell in figures["cells"]]
    assert timed.count((1024, 3)) == 4
    assert {"MXNet local", "MXNet device"} < {cell["system"] for cell in figures["cells"]}
    assert "mxnet" not in sys.modules


def test_wrong_sums_of_mxnet_are_told(bench, mxnet, capsys):
    mxnet(broken=1)
    assert bench("--peer-python", sys.executable) == 1
    assert "MXNet's KVStore: ValueError: a sum is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said",
    [
        ("raise ImportError('no libopenblas')", "can't be timed: ImportError: no libopenblas"),
        ("import os; os._exit(3)", "can't be timed: it ended"),
    ],
    ids=["import", "exit"],
)
def test_a_mxnet_that_does_not_start_is_left_out(bench, mxnet, capsys, text, said):
    mxnet(text=text)
    assert bench("--peer-python", sys.executable) == 0
    assert f"not compared with MXNet: MXNet's KVStore {said}" in capsys.readouterr().err


def test_a_mxnet_that_ends_is_an_error(mxnet):
    mxnet()
    with nothing_left(), kvstore.KVStore(sys.executable) as process:
        assert len(process.times("local", 1024, 1, 2, 3)) == 3
        process._process.kill()
        process._process.wait()
        with pytest.raises(kvstore.KVStoreError, match="can't be timed: it ended"):
            process.times("local", 1024, 1, 2, 3)


def test_where_mxnet_is_looked_for(tmp_path):
    with pytest.raises(peers.PeerError, match="mxnet is not installed: pip install mxnet"):
        peers.find("mxnet", [str(tmp_path / "python")])


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--devices", "0", "expected a number from 1 on"),
        ("--sizes", "3", "no number of bytes"),
        ("--keys", "-1", "expected a number from 1 on"),
        ("--seconds", "0", "expected a number above 0"),
        ("--peer-python", "/nowhere/python", "there is no program"),
    ],
)
def test_options_are_checked(bench, capsys, option, value, said):
    with pytest.raises(SystemExit):
        bench(option, value)
    assert said in capsys.readouterr().err
