"""The processes of MPI in ``synkhronos bench machines``, one for each rank of Synkhronos.

The first one reads what to do, and tells the others. Between their turns these sleep between two
looks, and not in MPI, which would keep a core busy. MPI checks no sender, so nothing is pickled.
"""

import json
import socket
import sys
import time

import numpy as np

from synkhronos.comm.mpi import folders
from synkhronos.comm.mpi.secret import open_no_ports
from synkhronos.tools.bench.programs import answer

_TAG = 1
_LOOK_SECONDS = 0.002
_PIECE = 1 << 15  # bytes: MPI asks the receiver before it sends larger messages
_MESSAGE_BYTES = 256  # about those of a call, to each machine and back

_clock = time.perf_counter


def main(kind=None):
    """Do what the benchmark asks for, until it says that this is all."""
    import mpi4py

    open_no_ports()
    mpi4py.rc.threads = False  # MPI is faster without locks
    with folders.of_segment():
        from mpi4py import MPI

    comm, status = MPI.COMM_WORLD, MPI.Status()
    process = (kind or Process)(MPI)
    lines = iter(sys.stdin) if comm.rank == 0 else None
    while True:
        if comm.rank == 0:
            line = next(lines, '{"do": "stop"}').encode()
            for other in range(1, comm.size):
                comm.Send([line, MPI.BYTE], other, _TAG)
        else:
            while not comm.Iprobe(0, _TAG, status):
                time.sleep(_LOOK_SECONDS)
            line = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv([line, MPI.BYTE], 0, _TAG)
        message = json.loads(line)
        name = message.pop("do")
        if name == "stop":
            return
        result = getattr(process, name)(**message)
        if comm.rank == 0:
            answer(result)


class Process:
    """One process: a method for each thing that it is asked for; the first one's result counts."""

    def __init__(self, mpi):
        self._mpi, self._comm = mpi, mpi.COMM_WORLD
        self._array = np.zeros(0, "float32")

    def hello(self):
        """Return the version of MPI, and the hosts of all processes."""
        hosts = self.gathered([socket.gethostname().encode()], "S256")
        version = self._mpi.Get_library_version().split(",")[0].strip()
        return {"version": version, "hosts": [host.decode() for [host] in hosts.tolist()]}

    def check(self, nbytes):
        """Return whether a reduction is right in all processes."""
        comm = self._comm
        array = np.arange(nbytes // 4, dtype="float32") % 7 + comm.rank
        expected = comm.size * (array - comm.rank) + comm.size * (comm.size - 1) // 2
        comm.Allreduce(self._mpi.IN_PLACE, [array, self._mpi.FLOAT])
        return self.all_right(np.array_equal(array, expected))

    def all_reduce(self, nbytes, count):
        """Return the seconds of the slowest process in each of some sums, made in place."""
        if self._array.nbytes != nbytes:
            self._array = np.full(nbytes // 4, 0, "float32")  # full() writes all pages
        buffer = [self._array, self._mpi.FLOAT]
        return self.slowest(lambda: self._comm.Allreduce(self._mpi.IN_PLACE, buffer), count)

    def call(self, count):
        """Return the same of what a call sends: a message to all, and a sum of their numbers."""
        comm = self._comm
        message, number, total = bytearray(_MESSAGE_BYTES), np.zeros(1), np.zeros(1)

        def run():
            comm.Bcast([message, self._mpi.BYTE])
            comm.Reduce(number, total)

        return self.slowest(run, count)

    def slowest(self, run, count):
        """Return the seconds of the slowest process in each of some repetitions."""
        comm, seconds = self._comm, []
        for _ in range(count):
            comm.Barrier()
            begin = _clock()
            run()
            seconds.append(_clock() - begin)
        every = self.gathered(seconds, float)
        return np.max(every, axis=0).tolist() if comm.rank == 0 else None

    def all_right(self, is_right):
        """Return whether the results of all processes are right."""
        return bool(self.gathered([is_right], bool).all())

    def gathered(self, values, dtype):
        """Return an array with the values of all processes, in the first one."""
        own = np.array(values, dtype)
        every = np.zeros((self._comm.size, len(own)), dtype)
        self._comm.Gather([own.view(np.uint8), self._mpi.BYTE], [every, self._mpi.BYTE])
        return every

    def network(self, other, nbytes, count):
        """Return the latency in seconds, and bytes per second in each of both directions at once.

        They are those between the first process and another one.
        """
        comm = self._comm
        if comm.rank not in (0, other):
            return None
        peer = other if comm.rank == 0 else 0
        small, large = np.zeros(1, np.uint8), np.zeros(nbytes, np.uint8)
        received = np.zeros(nbytes, np.uint8)
        trips, exchanges = [], []
        for _ in range(20 * count):
            begin = _clock()
            if comm.rank == 0:
                comm.Send(small, peer)
                comm.Recv(small, peer)
            else:
                comm.Recv(small, peer)
                comm.Send(small, peer)
            trips.append(_clock() - begin)
        pieces = range(0, nbytes, _PIECE)
        for _ in range(1 + count):
            begin = _clock()
            under_way = [comm.Irecv(received[at : at + _PIECE], peer) for at in pieces]
            under_way += [comm.Isend(large[at : at + _PIECE], peer) for at in pieces]
            self._mpi.Request.Waitall(under_way)
            exchanges.append(_clock() - begin)
        latency = float(np.median(trips[count:])) / 2
        return {"latency": latency, "bandwidth": nbytes / float(np.median(exchanges[1:]))}
