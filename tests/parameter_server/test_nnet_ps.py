"""The guide's network of two layers trains as serial training with whole batches does."""

import re
from pathlib import Path

import pytest
from support import gallery
from support.launching import FOR_ROOT
from support.running import python

DEMO = Path(__file__).parents[2] / "demos" / "parameter_server" / "nnet_ps.py"
SMALL = ["--epochs", "3", "--hidden", "16", "--check"]


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_PARAMETER_SERVER", raising=False)
    return gallery.module_of("parameter_server/nnet_ps", monkeypatch)


def errors(output):
    return [float(text) for text in re.findall(r"^round \d+: test-err=(\d\.\d{6})$", output, re.M)]


@pytest.mark.parametrize("ways", [[], ["--graph"]], ids=["by hand", "graph"])
@pytest.mark.parametrize("devices", [["0"], ["0", "1"], ["3", "1", "0", "7"]])
@pytest.mark.usefixtures("quickly_compiled")
def test_threads_train_as_one_device_with_whole_batches(demo, capsys, devices, ways):
    found = demo.main([*devices, *SMALL, *ways])
    assert found["devices"] == len(devices) and found["equal"]
    assert found["difference"] < 1e-5
    out, err = capsys.readouterr()
    assert out.startswith(
        "finish loading 1438x64 matrix from digits, shuffle=1\nfinish loading 359x"
    )
    assert len(errors(out)) == 3
    assert demo.largest_difference(found["values"], demo.first_weights(16, 0)) > 0.05
    assert err == ""


@pytest.mark.slow("trains")
def test_twenty_rounds_reach_nine_of_ten_digits(demo, capsys):
    """The guide has 20 rounds; repeated runs print the same errors."""
    found = [demo.main(["0", "1", "--check"]) for _ in range(2)]
    out = capsys.readouterr().out
    first, second = errors(out)[:20], errors(out)[20:]
    assert first == second and len(first) == 20
    assert first[-1] < 0.12
    assert max(each["difference"] for each in found) < 1e-5


def test_without_devices_it_says_how_to_use_it(demo, capsys):
    assert demo.main([]) is None
    assert "the device list can be arbitrary, such as 0 1" in capsys.readouterr().out


def test_the_command_line_of_the_guide(demo, capsys):
    assert demo.parse(["cpu", "0", "1"]).devices == demo.parse(["0", "1"]).devices == [0, 1]
    wrong = {"write cpu in place of gpu": ["gpu", "0"], "different numbers": ["cpu", "0", "0"]}
    for said, argv in wrong.items():
        with pytest.raises(SystemExit) as ended:
            demo.parse(argv)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_rows_that_can_not_be_split_evenly_are_refused(demo):
    with pytest.raises(SystemExit, match="100 rows can't be split evenly over 3 devices"):
        demo.main(["0", "1", "2"])


def test_a_replica_that_fails_ends_the_others(demo, monkeypatch):
    def fail(self, pixels):
        if self.devid == 1:
            raise ArithmeticError("overflow")
        return forward(self, pixels)

    forward = demo.Network.forward
    monkeypatch.setattr(demo.Network, "forward", fail)
    with pytest.raises((ArithmeticError, demo.ps.StoreClosed)):
        demo.main(["0", "1", *SMALL])


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(
    ("workers", "devices", "ways"),
    [
        ("1", ["0"], []),
        ("2", ["0", "1"], []),
        ("4", ["0"], []),
        ("2", ["0"], ["--graph"]),
        ("2", ["0", "1"], ["--graph"]),
    ],
    ids=str,
)
def test_processes_train_as_one_device_with_whole_batches(workers, devices, ways):
    line = ["-m", "synkhronos", "launch", "--servers", "1", "--workers", workers, DEMO]
    variables = {**FOR_ROOT, "THEANO_FLAGS": "cxx=,device=cpu,mode=FAST_COMPILE"}
    done = python(*line, *devices, *SMALL, *ways, **variables)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(errors(re.sub(r"^.*?(?=round)", "", done.stdout, flags=re.M))) == 3
    differences = re.findall(r"differ by at most (\S+) from .*; replicas are equal", done.stdout)
    assert len(differences) == int(workers)
    assert max(map(float, differences)) < 1e-5
