"""Signs of life: when they are sent, and when a process that sends none is lost."""

import pytest

from synkhronos._machine import heartbeats
from synkhronos._machine.heartbeats import Heartbeats, lost_seconds


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    return now


def test_a_silent_process_is_lost(clock):
    told = []
    beats = Heartbeats([1, 2], told.append)
    assert not beats.beat() and told == []
    for _ in range(int(lost_seconds())):
        clock[0] += 1.0
        beats.note(1)
        assert beats.beat() and not beats.beat()
    assert told == [1, 2] * int(lost_seconds()) and beats.silent() == []
    clock[0] += 1.0
    assert beats.beat() and beats.silent() == [2]
    beats.drop(2)
    beats.note(2)  # its last message
    assert beats.silent() == []


def test_a_process_that_was_stopped_has_not_listened_and_expects_nothing(clock):
    beats = Heartbeats([1], lambda rank: None)
    clock[0] += lost_seconds() + 1
    beats.beat()
    assert beats.silent() == []


@pytest.mark.parametrize("given", ["soon", "1", "-5", "nan"])
def test_a_limit_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match="SYNKHRONOS_LOST_AFTER must be a number of seconds"):
        heartbeats.limit(given)
    with pytest.raises(ValueError, match=f"--lost-after must be .* or 0 for never, got '{given}'"):
        heartbeats.limit(given, "--lost-after")


@pytest.mark.parametrize("given", ["0", "never", "inf"])
def test_without_a_limit_no_process_is_lost(clock, monkeypatch, given):
    limit = heartbeats.limit(given)
    monkeypatch.setattr(heartbeats, "lost_seconds", lambda: limit)
    beats = Heartbeats([1], lambda rank: None)
    clock[0] += 1e9
    assert beats.beat() and beats.silent() == []


@pytest.mark.parametrize("limit", [2.0, 3.0])
def test_a_short_limit_is_kept_by_a_process_whose_beats_come_a_little_late(
    clock, monkeypatch, limit
):
    monkeypatch.setattr(heartbeats, "lost_seconds", lambda: limit)
    beats = Heartbeats([1], lambda rank: None)
    for _ in range(4):
        clock[0] += 1.05
        beats.beat()
    assert beats.silent() == [1]
