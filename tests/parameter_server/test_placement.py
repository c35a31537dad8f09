"""The parts of keys on servers, and the order of transfers: pure functions and their queue."""

import zlib

import numpy as np
import pytest

from synkhronos.parameter_server.remote import placement, queues


@pytest.mark.parametrize("n_servers", [1, 2, 3, 7])
def test_parts_cover_a_key_once_and_evenly(n_servers):
    for size in (0, 1, 999, 1000, 1001, 12345):
        found = placement.parts("w", size, n_servers)
        assert [part.begin for part in found] == [0, *[part.end for part in found[:-1]]]
        assert found[-1].end == size
        assert len({part.server for part in found}) == len(found)
        if size >= placement.WHOLE:
            sizes = [part.end - part.begin for part in found]
            assert len(found) == n_servers and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("n_servers", [1, 2, 5])
def test_small_keys_lie_whole_on_the_server_of_mshadow_ps(n_servers):
    for key in (0, 1, 17, 123456):
        assert placement.parts(key, 999, n_servers) == [(key * 991 % n_servers, 0, 999)]
    server = zlib.crc32(b"hidden/W") * 991 % n_servers
    assert placement.parts("hidden/W", 10, n_servers) == [(server, 0, 10)]


def test_the_part_of_a_server_is_among_the_parts():
    for size in (10, 5000):
        parts = placement.parts(5, size, 3)
        found = [placement.part_of(server, 5, size, 3) for server in range(3)]
        assert [part for part in found if part] == sorted(parts)


def taken(queue):
    found = []
    while queue:
        transfer, begin, chunk = queue.take()
        found.append((transfer.number, begin, len(chunk)))
    return found


def small(number, priority=0, stream=None):
    return queues.Transfer(number, 1, 0, np.zeros(1), priority, stream=stream)


def test_equals_are_served_in_the_order_in_which_they_came():
    """In mshadow-ps equal priorities came as 1, 3, 5, 2, 4."""
    queue = queues.Queue()
    for number in range(1, 6):
        queue.add(small(number))
    assert [number for number, _, _ in taken(queue)] == [1, 2, 3, 4, 5]


def test_a_late_transfer_of_high_priority_overtakes_between_chunks():
    """In mshadow-ps the priority of a pull was stored and never used."""
    count = queues.CHUNK_BYTES // 4
    queue = queues.Queue()
    queue.add(queues.Transfer(0, 1, 100, np.zeros(2 * count + 5, np.float32), -3))
    first = queue.take()[1:]
    assert first[0] == 100 and len(first[1]) == count
    queue.add(small(1, priority=-1))
    queue.add(small(2, priority=-2))
    assert taken(queue) == [(1, 0, 1), (2, 0, 1), (0, 100 + count, count), (0, 100 + 2 * count, 5)]


def test_a_later_push_of_a_key_hurries_the_earlier_one_and_does_not_overtake_it():
    queue = queues.Queue()
    queue.add(small(1))
    queue.add(small(2, stream="a"))
    queue.add(small(3, priority=5, stream="a"))
    queue.add(small(4, priority=4))
    assert [number for number, _, _ in taken(queue)] == [2, 3, 4, 1]
    assert not queue._streams


def test_a_transfer_without_elements_is_one_chunk():
    queue = queues.Queue()
    queue.add(queues.Transfer(0, 1, 0, np.zeros(0)))
    assert taken(queue) == [(0, 0, 0)]
