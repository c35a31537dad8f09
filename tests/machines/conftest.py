"""Hosts for the tests of several machines: see tests/support/hosts.py."""

import functools

import pytest
from support import hosts

missing = functools.lru_cache(maxsize=None)(hosts.missing)


@pytest.fixture(scope="module")
def two_hosts():
    """Yield two hosts, for all tests of a file."""
    if missing():
        pytest.skip(f"no hosts: this machine lacks {missing()}")
    with hosts.up(2) as these:
        yield these


@pytest.fixture(scope="module")
def three_hosts():
    """Yield three hosts, for all tests of a file."""
    if missing():
        pytest.skip(f"no hosts: this machine lacks {missing()}")
    with hosts.up(3) as these:
        yield these
