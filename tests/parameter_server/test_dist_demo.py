"""The demo of servers and workers, with the numbers of mshadow-ps's guide."""

import re
from pathlib import Path

import pytest
from support import gallery, nodes

DEMO = Path(__file__).parents[2] / "demos" / "parameter_server" / "dist_async_sum.py"


def test_dist_async_sum(tmp_path):
    """Each worker sees 3, 6 or 9 on both devices, and the last one 9."""
    run = nodes.run(tmp_path, DEMO.read_text(), 1, 2, servers=1, workers=3)
    found = {}
    pattern = r"node (\d), dev (\d): (before|after) sync\n.*: (.*)\n.*: (.*)\n"
    for rank, device, when, first, second in re.findall(pattern, run.output):
        assert first == "0 0 0"
        found[int(rank), int(device), when] = [int(each) for each in second.split()]
    assert len(found) == 12
    last = set()
    for rank in range(3):
        for device in (1, 2):
            assert found[rank, device, "before"] == [device] * 3
        after = found[rank, 1, "after"]
        assert found[rank, 2, "after"] == after and after in ([3] * 3, [6] * 3, [9] * 3)
        last |= {*after}
    assert max(last) == 9


@pytest.mark.parametrize(
    ("devices", "said"),
    [(["1", "2"], "synkhronos launch --servers 1 --workers 3 dist_async_sum.py 1 2"),
     (["1", "1"], "devices must be different numbers from 0 on, got [1, 1]")],
)  # fmt: skip
def test_what_the_demo_refuses(monkeypatch, capsys, devices, said):
    monkeypatch.delenv("SYNKHRONOS_PARAMETER_SERVER", raising=False)
    demo = gallery.module_of("parameter_server/dist_async_sum", monkeypatch)
    with pytest.raises(SystemExit) as ended:
        demo.main(devices)
    assert ended.value.code == 2 and said in capsys.readouterr().err
