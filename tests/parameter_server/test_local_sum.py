"""The guide's first program, with the numbers of mshadow-ps."""

import re
from pathlib import Path

import pytest
from support import gallery
from support.running import python

DEMO = Path(__file__).parents[2] / "demos" / "parameter_server" / "local_sum.py"


@pytest.fixture
def demo(monkeypatch):
    return gallery.module_of("parameter_server/local_sum", monkeypatch)


def blocks(out):
    """Return (device, when) -> rows of the blocks that were printed."""
    found = {}
    pattern = r"dev(\d+): (before|after) sync, data:\n((?:[\d ]+\n){2})={20}\n"
    for device, when, rows in re.findall(pattern, out):
        found[int(device), when] = [row.split() for row in rows.splitlines()]
    assert re.sub(pattern, "", out) == "", "blocks are mixed"
    return found


@pytest.mark.parametrize(
    "devices, total",
    [([0], 1), ([0, 1], 3), ([1, 2], 5), ([0, 1, 2], 6), ([7, 3], 12), ([0, 1, 2, 3, 4, 5], 21)],
    ids=str,
)
def test_each_device_gets_the_sum(demo, capsys, devices, total):
    arrays = demo.main([str(device) for device in devices])
    expected = [[len(devices)] * 3, [total] * 3]
    assert [array.tolist() for array in arrays] == [expected] * len(devices)
    printed = blocks(capsys.readouterr().out)
    assert set(printed) == {(d, when) for d in devices for when in ("before", "after")}
    for device in devices:
        assert printed[device, "before"] == [["1"] * 3, [str(device + 1)] * 3]
        assert printed[device, "after"] == [[str(n)] * 3 for n in (len(devices), total)]


def test_hundred_runs_are_right(demo, capsys):
    for _ in range(100):
        assert [each.tolist() for each in demo.main(["0", "1"])] == [[[2] * 3, [3] * 3]] * 2
        assert len(blocks(capsys.readouterr().out)) == 4


def test_without_devices_it_says_how_it_is_used(demo, capsys):
    assert demo.main([]) == []
    assert capsys.readouterr().out.splitlines()[0] == "Usage: local_sum.py DEVICE [DEVICE ...]"


@pytest.mark.parametrize("devices", [["3", "3"], ["-1"], ["0", "-2"]])
def test_a_device_twice_is_refused_at_once(demo, capsys, devices):
    """Mshadow-ps waited for ever for the second device of a number."""
    with pytest.raises(SystemExit) as ended:
        demo.main(devices)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "devices must be different numbers from 0 on, got [" + ", ".join(devices) in said


def test_a_device_that_fails_ends_the_others(demo, monkeypatch):
    def fail(store, device, run=demo.run_device):
        if device == 1:
            raise OSError("the device is on fire")
        return run(store, device)

    monkeypatch.setattr(demo, "run_device", fail)
    with pytest.raises(OSError, match="on fire"):
        demo.main(["0", "1"])


@pytest.mark.slow("starts a process")
def test_as_a_script():
    done = python(DEMO, "0", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(blocks(done.stdout)) == 4
    assert gallery.unsaid("parameter_server/local_sum", done.stdout) == []
