"""Cores, their threads and NUMA nodes, as files of the kernel tell them."""

import pytest
from support.cores import machine

from synkhronos._machine import cores


def pairs(*firsts, apart):
    return [(first, first + apart) for first in firsts]


ADJACENT, APART = pairs(*range(0, 16, 2), apart=1), pairs(*range(8), apart=8)
TWO_NODES = pairs(0, 1, 2, 3, apart=8) + pairs(4, 5, 6, 7, apart=8)


@pytest.mark.parametrize(
    ("nodes", "siblings", "allowed", "expected", "said"),
    [
        (
            ["0-15"], ADJACENT, range(16),
            {1: [0], 2: [0, 8], 4: [0, 4, 8, 12], 8: [*range(0, 16, 2)],
             10: [*range(0, 16, 2), 1, 9], 16: [*range(0, 16, 2), *range(1, 16, 2)]},
            "8 cores with 2 threads each, 1 NUMA node",
        ),
        (
            ["0-15"], APART, range(16),
            {2: [0, 4], 8: [*range(8)], 16: [*range(16)]},
            "8 cores with 2 threads each, 1 NUMA node",
        ),
        (
            ["0-3"], [(cpu,) for cpu in range(4)], range(4),
            {2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3], 9: [0, 1, 2, 3]},
            "4 cores with 1 thread each, 1 NUMA node",
        ),
        (
            ["0-3,8-11", "4-7,12-15"], TWO_NODES, range(16),
            {2: [0, 4], 4: [0, 2, 4, 6], 8: [*range(8)], 10: [*range(8), 8, 12]},
            "8 cores with 2 threads each, 2 NUMA nodes",
        ),
        (  # nodes whose CPUs have turns of numbers
            ["0,2,4,6", "1,3,5,7"], [(cpu,) for cpu in range(8)], range(8),
            {2: [0, 1], 4: [0, 4, 1, 5]},
            "8 cores with 1 thread each, 2 NUMA nodes",
        ),
        (  # a cpuset: a node is not there, and a core has one thread
            ["0-3,8-11", "4-7,12-15"], TWO_NODES, {1, 2, 9},
            {2: [1, 2], 3: [1, 2, 9]},
            "2 cores with 1 or 2 threads each, 1 NUMA node",
        ),
        (  # a sandbox without these files
            [], [], {0, 1, 5},
            {2: [0, 1], 3: [0, 1, 5]},
            "3 cores with threads that the kernel does not tell, 1 NUMA node",
        ),
    ],
    ids=["adjacent", "apart", "single", "nodes", "turns", "cpuset", "missing"],
)  # fmt: skip
def test_each_core_is_taken_before_second_threads(
    tmp_path, monkeypatch, nodes, siblings, allowed, expected, said
):
    machine(tmp_path, monkeypatch, nodes, siblings, allowed)
    assert {n: cores.spread(n) for n in expected} == expected
    assert cores.described() == said


def test_a_list_of_the_kernel():
    """Theano-MPI could not read a single number, and no range under Python 3."""
    assert cores.parse_range("3\n") == [3]
    assert cores.parse_range("0-1,4,6-7") == [0, 1, 4, 6, 7]
    assert cores.parse_range("") == []
