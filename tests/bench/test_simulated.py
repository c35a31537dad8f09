"""Simulated machines: what is sent is what formulas say, and arrays come right."""

import pytest
from benchmarks.simulated import Cluster, Costs

from synkhronos.comm.mpi.all_reduce import chunk_bytes


@pytest.mark.parametrize("n", [2, 5, 8])
def test_arrays_come_right(n):
    with Cluster(n, most=1 << 20) as cluster:
        for nbytes in (1 << 10, 1 << 16, 1 << 20):
            cluster.do("call", nbytes)
            cluster.arrays[0][...] = 7
            cluster.do("broadcast", nbytes)
            assert all((each == 7).all() for each in cluster.arrays)
            for machine, each in enumerate(cluster.arrays):
                each[...] = machine
            cluster.do("all_reduce", nbytes)
            assert all((each == n * (n - 1) / 2).all() for each in cluster.arrays)


def test_messages_and_bytes_are_those_of_formulas():
    n, nbytes = 16, 8 << 20

    def sent(measured):
        messages, found = zip(*measured[1])
        return sum(messages), max(messages), max(found)

    with Cluster(n, most=nbytes, whole=False) as cluster:
        # A wish, an offer and a plan.
        assert sent(cluster.start)[:2] == (3 * (n - 1), 2 * (n - 1))
        call = sent(cluster.do("call"))
        assert call[:2] == (2 * (n - 1), n - 1)
        # Through a tree: the value's place, a wish, an answer, the array.
        assert sent(cluster.do("broadcast", 1 << 18))[:2] == (6 * (n - 1), 2 * (n - 1) + 2 * 4)
        parts = -(-nbytes // (nbytes // (4 * (n - 2)) // 64 * 64))
        messages, busiest, found = sent(cluster.do("broadcast", nbytes))
        assert messages == (5 + parts) * (n - 1) and busiest == 2 * (n - 1) + 1 + parts
        assert nbytes < found < 1.001 * nbytes
        # With fewer parts of 64 KiB than machines each of them goes to two others.
        few = sent(cluster.do("broadcast", 5 << 16))
        assert few[:2] == ((5 + 5) * (n - 1), 2 * (n - 1) + 2 + 2 * 5)
        small = sent(cluster.do("all_reduce", 1 << 10))
        assert small[:2] == ((n + 2) * (n - 1), 2 * (n - 1))
        chunks = -(-nbytes // chunk_bytes(nbytes, n))
        messages, busiest, found = sent(cluster.do("all_reduce", nbytes))
        assert messages == (n + 2 + 2 * chunks) * (n - 1)
        least = 2 * (n - 1) / n * nbytes
        assert least < found < 1.001 * least
        assert sent(cluster.pass_time(1.0))[:2] == (2 * (n - 1), n - 1)  # to and from the first


def test_no_link_waits_for_another_one_in_an_all_reduce():
    """All sent to the same machine first: its link was the limit, and it took 1.6 times as long."""
    n, nbytes = 16, 8 << 20
    costs = Costs(latency=1e-6, message=1e-7, seal=1e-12)
    with Cluster(n, costs, nbytes, whole=False) as cluster:
        seconds, _ = cluster.do("all_reduce", nbytes)
    assert seconds < 1.3 * 2 * (n - 1) / n * nbytes * costs.byte


@pytest.mark.parametrize("machine", [0, 3])
def test_all_know_of_a_death_within_the_limit(machine):
    with Cluster(8, whole=False) as cluster:
        seconds, _ = cluster.kill(machine)
    assert 6.9 < seconds < 9.1
