"""One worker of the benchmark ``overlap``, which starts it by ``synkhronos launch``.

In each turn all workers take some steps in each way, one way after the other:

    overlap       `make_train_step` with the store: pushes in the graph, waits one call later
    everything    compute all gradients, push all, wait for all, apply the rule
    compute       the same, without the store
    communicate   push all, wait for all, without a computation

The ways "overlap" and "everything" train the same parameters with the same keys and bytes.
"""

import json
import sys
import threading
import time

import numpy as np

from synkhronos import _host
from synkhronos import parameter_server as ps
from synkhronos._host import library
from synkhronos.extensions import train, update_rules
from synkhronos.tools.bench import networks, programs

WAYS = ["overlap", "everything", "compute", "communicate"]
RATE = 0.01
_PARTS = 10  # of which one is sent, to know how long all take
_FEW = 512  # rows, to know how long a row takes
_COPIED = 1 << 20  # bytes that the thread beside a function copies at a time
_clock = time.monotonic


class Worker:
    """The network of a worker, and the ways in which it takes a step.

    Without a number of rows it takes as many as are computed while the parameters are sent.
    """

    def __init__(self, store, units, batch):
        network = networks.Mlp(units)
        self.store, self.network, self.params = store, network, network.params
        inputs, share = [network.x, network.y], np.float32(1 / store.num_workers)
        self.gradients = library.function(inputs, library.grad(network.loss * share, self.params))
        self.batch = batch or self.balanced()
        self.data = network.rows(self.batch)
        total = self.batch * store.num_workers
        rule, given = update_rules.sgd, {"store": store, "batch_rows": total}
        self.step = train.make_train_step(inputs, network.loss, self.params, rule, RATE, **given)
        pulled = [param.type() for param in self.params]
        updates = update_rules.sgd(pulled, self.params, RATE)
        self.apply = library.function(pulled, updates=updates)
        self.arrays = [np.zeros_like(_host.peek(param)) for param in self.params]

    @property
    def nbytes(self):
        """The bytes of all parameters."""
        return sum(array.nbytes for array in self.arrays)

    def balanced(self):
        """Return how many rows are computed while the parameters are sent; equal on all workers."""
        store, [device] = self.store, self.store.devices
        nbytes = sum(_host.peek(param).nbytes for param in self.params)
        part = np.zeros(nbytes // 4 // _PARTS + 1, "float32")
        found = np.zeros(1)
        store.init_key(part.shape, "part", device)
        store.init_key((1,), "rows", device, dtype="float64")
        data = self.network.rows(_FEW)
        for _ in range(2):  # the first time is not for memory that is new
            store.barrier()
            begin = _clock()
            store.push(part, "part", device)
            store.pull_req(part, "part", device).wait()
            # One array goes there and then back; of many, some go back while others go there.
            seconds = _PARTS * (_clock() - begin) / 2
            store.barrier()
            begin = _clock()
            self.gradients(*data)
            found[0] = _FEW * seconds / (_clock() - begin)
        store.push(found, "rows", device)
        store.pull_req(found, "rows", device).wait()
        return max(1, int(found[0] / store.num_workers))

    def overlap(self, steps):
        """Take steps that overlap, and finish them."""
        for _ in range(steps):
            self.step(*self.data)
        self.step.finish()

    def everything(self, steps):
        """Take steps that push everything and wait for everything."""
        for _ in range(steps):
            arrays = self.gradients(*self.data)
            self.exchange(arrays)
            self.apply(*arrays)

    def compute(self, steps):
        """Take steps without the other workers."""
        for _ in range(steps):
            self.apply(*self.gradients(*self.data))

    def communicate(self, steps):
        """Push and pull as a step does, without a computation."""
        for _ in range(steps):
            self.exchange(self.arrays)

    def exchange(self, arrays):
        """Push all arrays, without priorities; then wait for all sums, which replace them."""
        device = self.store.devices[0]
        for array, key in zip(arrays, self.step.keys):
            self.store.push(array, key, device)
        for array, key in zip(arrays, self.step.keys):
            self.store.pull_req(array, key, device)
        for key in self.step.keys:
            self.store.pull_wait(key, device)

    def seconds(self, way, steps):
        """Return the seconds of a step of one way; all workers begin together."""
        self.store.barrier()
        begin = _clock()
        getattr(self, way)(steps)
        return (_clock() - begin) / steps

    def beside(self):
        """Return the share of its work that a thread does beside the function of the gradients."""
        source, target = np.ones(_COPIED, "u1"), np.empty(_COPIED, "u1")
        done, is_over = [0], threading.Event()

        def copy():
            while not is_over.is_set():
                np.copyto(target, source)
                done[0] += 1

        thread = threading.Thread(target=copy)
        thread.start()
        rates = []
        for work in (lambda: time.sleep(0.5), lambda: self.gradients(*self.data)):
            before, begin = done[0], _clock()
            work()
            rates.append((done[0] - before) / (_clock() - begin))
        is_over.set()
        thread.join()
        return rates[1] / rates[0]


def main():
    """Measure, and let the first worker print the figures as a line of JSON."""
    options = json.loads(sys.argv[1])
    with ps.create("dist_sync", devices=[0]) as store:
        worker = Worker(store, options["units"], options["batch"])
        for way in WAYS:
            worker.seconds(way, 1)
        found = {way: [] for way in WAYS}
        for turn in range(options["turns"]):
            for way in WAYS[turn % 2 :] + WAYS[: turn % 2]:
                found[way].append(worker.seconds(way, options["steps"]))
        store.barrier()
        beside = worker.beside() if store.rank == 0 else None
        store.barrier()
        recorded = None
        if options["timeline"]:
            worker.step(*worker.data)
            with store.profile() as recorded:  # what the first step pushes comes in the second
                worker.step(*worker.data)
                worker.step(*worker.data)
            worker.step.finish()
        if store.rank == 0:
            if recorded is not None:
                (recorded.save if options["timeline"].endswith(".json") else recorded.plot)(
                    options["timeline"]
                )
            programs.answer(
                {
                    "seconds": found,
                    "nbytes": worker.nbytes,
                    "keys": len(worker.params),
                    "batch": worker.batch,
                    "beside": beside,
                    "summary": recorded.summary() if recorded is not None else None,
                }
            )


if __name__ == "__main__":
    main()
