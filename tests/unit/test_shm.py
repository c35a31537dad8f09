"""Segments: zero-filled, nameless, given back with the last view, refused when there is no room."""

import errno
import gc
import os

import numpy as np
import pytest
from support.leaks import descriptors, names_in_shared_memory, nothing_left
from support.running import python

from synkhronos._machine import shared_memory
from synkhronos.comm.shared.memory import SharedMemory as Segments


@pytest.fixture(autouse=True)
def clean():
    with nothing_left():
        yield


@pytest.fixture
def segments():
    return Segments()


def reserved(ref):
    """Return how many bytes of memory a segment holds, through its descriptor."""
    return os.fstat(ref.fd).st_blocks * 512


def test_a_segment_is_zero_reserved_shared_by_its_views_and_has_no_name(segments):
    before = names_in_shared_memory()
    segment = segments.create(1 << 20)
    assert names_in_shared_memory() == before
    assert segment.ref.nbytes == 1 << 20 and reserved(segment.ref) >= 1 << 20
    a, b = segment.array("f8", (10, 10)), segment.array("f8", (50,), offset=400)
    assert not a.any() and not b.any()
    a[5, 0] = 7
    assert b[0] == 7


def test_the_last_view_gives_the_memory_back(segments):
    segment = segments.create(1 << 20)
    fd, view = segment.ref.fd, segment.array("u1", (10,))
    held = os.dup(fd)  # tells of the memory after the segment's own descriptor is closed
    try:
        part = view[2:4]
        del segment, view
        gc.collect()
        assert os.fstat(held).st_blocks
        part[...] = 3
        del part
        gc.collect()
        assert os.fstat(held).st_blocks == 0
        assert fd not in descriptors()
    finally:
        os.close(held)


def test_attaching_reaches_the_same_memory_and_maps_once(segments):
    mine = segments.create(80)
    other = Segments()
    theirs = other.attach(mine.ref)
    assert theirs is not mine
    assert other.attach(mine.ref) is theirs
    mine.array("f8", (10,))[3] = 5
    array = other.fetch(mine.reference("f8", (10,)))
    assert array[3] == 5
    array[4] = 6
    assert mine.array("f8", (10,))[4] == 6
    assert segments.attach(mine.ref) is mine  # the owner's own
    other.forget([mine.ref, mine.ref])
    assert other.attach(mine.ref) is not theirs


def test_another_process_reaches_it_by_the_ref_alone(segments):
    segment = segments.create(800)
    segment.array("f8", (100,))[...] = np.arange(100)
    ref = segment.reference("float64", (10, 10))
    code = (
        "from synkhronos._machine.shared_memory import *\n"
        "from synkhronos.comm.shared.memory import SharedMemory\n"
        f"ref = ArrayRef(SegmentRef(*{tuple(ref.segment)}), {ref.dtype!r}, {ref.shape!r})\n"
        "a = SharedMemory().fetch(ref); print(a.sum()); a[0, 0] = -1"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "4950.0", done.stderr
    assert segment.array("f8", (1,))[0] == -1


def test_a_reused_descriptor_is_another_segment(segments):
    first = segments.create(8)
    ref = first.ref
    del first
    gc.collect()
    second = segments.create(8)
    assert second.ref != ref


def test_on_release_decides_when(segments):
    released = []
    lazy = Segments(lambda ref, give_back: released.append((ref, give_back)))
    ref = lazy.create(1 << 16).ref
    gc.collect()
    assert [r for r, _ in released] == [ref]
    assert reserved(ref)
    released[0][1]()
    assert ref.fd not in descriptors()


def test_a_forked_child_does_not_take_the_memory_of_its_parent(segments):
    segment = segments.create(800)
    view = segment.array("f8", (100,))
    view[...] = 1
    pid = os.fork()
    if pid == 0:
        del segment, view
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert reserved(segment.ref)
    assert view.sum() == 100


@pytest.mark.faults
def test_other_failures_pass_and_leave_no_descriptor(segments, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        segments.create(1000)


def test_without_unnamed_files_posix_ipc_makes_a_segment(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", str(tmp_path / "missing"))
    fd = shared_memory._open_unnamed()
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/synkhronos-")
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("synkhronos-")]
        os.posix_fallocate(fd, 0, 4096)
        assert os.fstat(fd).st_size == 4096
    finally:
        os.close(fd)


def test_memory_that_is_left_goes_with_the_last_map(segments):
    """At the end of a session on several machines, the carrier may still be sending it."""
    other = Segments()
    first, second = segments.create(1000), segments.create(1000)
    views = [other.attach(each.ref).array("u1", (1000,)) for each in (first, second)]
    del first
    assert [other.attach(ref).is_freed for ref in other._attached] == [True, False]
    other.forget_freed()
    segments.leave()
    fd, own = second.ref.fd, second.array("u1", (1000,))
    own[...] = 5
    del own, second
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    np.testing.assert_array_equal(views[1], 5)
    other.forget_all()
    assert not other._attached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_the_begin_of_a_finalizer_loses_no_memory(segments, monkeypatch):
    """Python drops what its handler raises; `clean` sees what is left open."""

    class Interrupted:
        def __enter__(self):
            raise TimeoutError

        def __exit__(self, *error):
            raise AssertionError("not reached")

    segment = segments.create(1000)
    monkeypatch.setattr(shared_memory, "interrupts_held", Interrupted)
    del segment
    gc.collect()
