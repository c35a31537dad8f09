"""A stand-in for ``pygpu.collectives`` where there is no NCCL: it reduces through files.

It checks the arguments for NCCL, so that comm/nccl.py can be tested with real GpuArrays on OpenCL.
It does not test NCCL itself.
"""

import functools
import os
import shutil
import sys
import tempfile
import time
import types

import numpy as np

DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
calls = []  # the names of the collectives that this rank has called


class GpuCommCliqueId:
    def __init__(self, context=None, comm_id=None):
        if comm_id is None:
            folder = tempfile.mkdtemp(prefix="synkhronos-stand-in-").encode()
            self.comm_id = bytearray(folder.ljust(128, b"\0"))
        else:
            assert isinstance(comm_id, bytearray) and len(comm_id) == 128
            self.comm_id = comm_id


class GpuComm:
    def __init__(self, clique_id, count, rank):
        self.folder = bytes(clique_id.comm_id).rstrip(b"\0").decode()
        self.count, self.rank, self.calls = count, rank, 0
        self.exchange(np.zeros(1))

    def __del__(self):
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def exchange(self, array):
        """Return the arrays of all ranks in this call, in rank order."""
        self.calls += 1
        names = [f"{self.folder}/{self.calls}-{rank}.npy" for rank in range(self.count)]
        np.save(f"{names[self.rank]}.part.npy", array)
        os.rename(f"{names[self.rank]}.part.npy", names[self.rank])
        end = time.monotonic() + 30
        while not all(map(os.path.exists, names)):
            assert time.monotonic() < end, "a rank did not come: NCCL would hang"
            time.sleep(0.0005)
        return [np.load(name) for name in names]

    def check(self, *arrays):
        for array in arrays:
            assert array.flags.c_contiguous and str(array.dtype) in DTYPES and array.size

    def all_reduce(self, src, op, dest=None):
        calls.append("all_reduce")
        self.check(src, dest)
        parts = self.exchange(np.asarray(src))
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "NCCL would mix them up"
        assert dest.shape == src.shape and dest.dtype == src.dtype
        dest.write(functools.reduce(UFUNCS[op], parts))

    def broadcast(self, array, root=-1):
        calls.append("broadcast")
        self.check(array)
        parts = self.exchange(np.asarray(array))
        if root != -1:
            assert parts[root].shape == array.shape and parts[root].dtype == array.dtype
            array.write(parts[root])

    def all_gather(self, src, dest=None, nd_up=1):
        calls.append("all_gather")
        self.check(src, dest)
        assert nd_up == 0 and dest.size == self.count * src.size
        dest.write(np.concatenate(self.exchange(np.asarray(src))))


def install():
    """Have sessions on any devices of their own use it, from the next fork on."""
    from synkhronos.comm import transports

    module = types.ModuleType("pygpu.collectives")
    module.GpuComm, module.GpuCommCliqueId = GpuComm, GpuCommCliqueId
    sys.modules["pygpu.collectives"] = module
    transports.kinds_for = kinds_for


def kinds_for(devices):
    """Return the transports of ranks whose devices NCCL would refuse: all have one."""
    base = "single" if len(devices) == 1 else "shared"
    return (base, "nccl") if "cpu" not in devices else (base,)
