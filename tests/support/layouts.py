"""Layouts of ranks for test suites: number, master's rank, devices, transport and host.

A suite lists its layouts as ``LAYOUTS``, or runs on `USUAL`; its fixture ``ranks`` is a session on
each of them in turn. With SYNKHRONOS_TEST_DEVICES=opencl0:0,opencl0:0 (and
SYNKHRONOS_TEST_MASTER=1, SYNKHRONOS_TEST_TRANSPORT=stand-in) all suites run on one layout, which
these name; the transport "nccl" is NCCL, "stand-in" what stands in for it, and "mpi" is that of
several machines, on this one alone. A process can fork for devices only once, so all suites of such
a run share one session, and the tests that fork for themselves are left out.
"""

import contextlib
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Tuple

import pytest

import synkhronos as synk
from support.host_library import MODE, NAME
from support.leaks import nothing_left
from synkhronos import session as _session
from synkhronos.comm.mpi.link import CarrierLink


@dataclass(frozen=True)
class Layout:
    """The ranks that a suite runs on.

    `devices` names one device for each rank; without them ranks are CPU ranks. A `transport`
    other than shared memory is installed before the fork. The `host` library, and its `mode` for
    functions that name none, are those of the whole run.
    """

    ranks: int
    master: int = 0
    devices: Tuple[str, ...] = ()
    transport: str = "shared"
    machines: int = 1
    host: str = NAME
    mode: str = MODE

    def __str__(self):
        parts = [f"{self.ranks}ranks-master{self.master}", *self.devices]
        if self.machines > 1:
            parts = [f"{self.machines}machines", *parts]
        if self.transport != "shared":
            parts.append(self.transport)
        if self.host != "theano":
            parts += [self.host, self.mode]
        return "-".join(parts)

    @property
    def is_on_devices(self):
        """Whether values of shared variables are on devices."""
        return any(device != "cpu" for device in self.devices)

    @property
    def is_mixed(self):
        """Whether the ranks' devices are of several kinds."""
        return len({device.rstrip("0123456789:") for device in self.devices}) > 1

    def fork(self, **kwargs):
        """Fork the ranks of this layout; return their number."""
        if self.transport == "stand-in":
            from support import stand_in

            stand_in.install()
        elif self.transport == "nccl":
            from support import one_gpu

            one_gpu.install()
        elif self.transport == "mpi":
            pytest.importorskip("mpi4py")
            _session._Current.link = CarrierLink()
            _session._Current.link.begin()
        if self.devices:
            return synk.fork(devices=list(self.devices), master_rank=self.master, **kwargs)
        return synk.fork(self.ranks // self.machines, master_rank=self.master, **kwargs)


def from_environment():
    """Return the layout of all suites of this run, or None if each suite has its own."""
    machines = os.environ.get("SYNKHRONOS_TEST_MACHINES")  # such as 2x1: 2 machines, a rank on each
    if machines:
        n_machines, n_ranks = map(int, machines.split("x"))
        return Layout(n_machines * n_ranks, machines=n_machines)
    named = os.environ.get("SYNKHRONOS_TEST_DEVICES")
    if not named:
        return None
    devices = tuple(named.split(","))
    master = int(os.environ.get("SYNKHRONOS_TEST_MASTER", "0"))
    transport = os.environ.get("SYNKHRONOS_TEST_TRANSPORT", "shared")
    return Layout(len(devices), master, devices, transport)


ONLY = from_environment()
ON_DEVICES = ONLY is not None and ONLY.is_on_devices
ON_THEANO_DEVICES = ON_DEVICES and NAME == "theano"
IS_MIXED = ONLY is not None and ONLY.is_mixed
ON_CUDA = ONLY is not None and any(device.startswith("cuda") for device in ONLY.devices)

USUAL = [Layout(2), Layout(3, master=1), Layout(1)]
# What each transport has to do: collectives, and all-reduces in graphs.
CONFORMANCE = [*USUAL, Layout(4), Layout(2, transport="mpi")]


@contextlib.contextmanager
def forked(layout, **kwargs):
    """Fork; at the end close, and check that nothing is left."""
    if ONLY is not None:
        if _session._Current.session is None:
            ONLY.fork()
        assert layout == ONLY
        yield running(layout)
        return
    with nothing_left():
        assert layout.fork(**kwargs) == layout.ranks
        try:
            yield running(layout)
        finally:
            if _session._Current.session is not None:
                synk.close()
            if layout.transport == "mpi":
                link, _session._Current.link = _session._Current.link, None
                link.end()
                link.close()


def running(layout):
    """Return what the fixture `ranks` gives to tests."""
    current = _session._Current.session
    assert (layout.ranks, layout.master) == (current.n_ranks, current.master_rank)
    return SimpleNamespace(n=layout.ranks, master=layout.master, layout=layout, session=current)
