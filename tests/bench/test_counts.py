"""What each rank of a session takes, as the benchmark ``counts`` finds it."""

import json

import pytest
from benchmarks import BENCHMARKS

from synkhronos.tools.bench import frame

MANY, FEW = 16, 4


@pytest.mark.slow("16 ranks take turns on the cores")
def test_what_a_rank_takes_grows_only_with_the_memories_of_others(no_session, tmp_path):
    """The descriptors and maps of a worker, its threads, system calls, and shared memory."""
    file = tmp_path / "counts.json"
    line = ["--ranks", f"{FEW},{MANY}", "--calls", "20", "--busy-ok", "--json", str(file)]
    assert frame.main("benchmarks", BENCHMARKS, "counts", line) == 0
    few, many = json.loads(file.read_text())["sessions"]
    more = MANY - FEW

    def grown(when, what):
        return [b - a for a, b in zip(*(each["rest"][when][what] for each in (few, many)))]

    # One to wake each rank; the master has one more, of its end.
    assert grown("after fork()", "descriptors") == [2 * more, more]
    # Of each other rank, the memories of an all_reduce and of one in a function, and both of a
    # variable that is gathered in turns.
    _, of_worker = grown("at the end", "descriptors")
    assert of_worker <= (1 + 5) * more
    _, maps = grown("at the end", "maps")
    assert maps <= 6 * more
    for each in (few, many):
        assert each["rest"]["at the end"]["threads"][1] == 1
        assert all(phase.get("commands", 1) <= 2 for phase in each["phases"].values())
    assert many["segment_bytes"] / MANY == pytest.approx(few["segment_bytes"] / FEW, rel=0.02)
    assert many["gate_bytes"] / MANY < few["gate_bytes"] / FEW
    # Where strace counts them. A rank that sleeps makes some; one that maps the memory of others,
    # eight for each of them.
    made = many["phases"]["scatter and all_gather"].get("system calls", [0, 0])
    assert made[1] < 2 * MANY
