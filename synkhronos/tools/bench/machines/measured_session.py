"""The script that measures Synkhronos in ``synkhronos bench machines``, on the ranks of all.

A step of training has its rows in scattered shared variables, so that nothing but gradients crosses
the network.
"""

import numpy as np

import synkhronos as synk
from synkhronos._host import library
from synkhronos._host import tensor as T
from synkhronos._session.current import Current
from synkhronos.extensions import train, update_rules
from synkhronos.tools import turns
from synkhronos.tools.bench import networks, programs
from synkhronos.tools.bench.machines.traffic import CountTraffic

RATE = 0.001
_NETWORKS = {"mlp": networks.Mlp, "dense": networks.Dense}


def main():
    """Do what the benchmark asks for, until it says that this is all."""
    library.config.floatX = "float32"  # the dtype of constants that Theano adds to the graph
    programs.serve(MeasuredRanks())


class MeasuredRanks:
    """All ranks: a method for each thing that the benchmark asks for."""

    def __init__(self):
        self._vector = library.shared(np.zeros(1, "float32"))
        self._resize = self._call = None
        self._trainings = {}

    def fork(self, overlap, compress, threads_per_rank):
        """Begin a session anew; return the number of its ranks on each machine."""
        options = {"overlap": overlap, "compress": "float16" if compress else None}
        if self._resize is not None:
            self._resize(1)  # because a new session sends the value over the network
        synk.fork(restart=True, threads_per_rank=threads_per_rank, **options)
        ranks = synk.status().ranks
        hosts = [each.host for each in ranks]  # the ranks of a machine follow one another
        return [hosts.count(host) for host in dict.fromkeys(hosts)]

    def check(self, nbytes):
        """Return whether a reduction is right on all ranks."""
        values = np.arange(nbytes // 4, dtype="float32") % 7
        n = len(synk.status().ranks)
        vector = library.shared(values)
        for rank in range(n):
            synk.set_value(rank, vector, values + rank)
        synk.all_reduce(vector, op="sum")
        expected = n * values + n * (n - 1) // 2
        return all(np.array_equal(synk.get_value(rank, vector), expected) for rank in range(n))

    def all_reduce(self, nbytes, count):
        """Return the seconds of each of some sums, from the call to its return."""
        vector = self._vector
        if self._resize is None:
            length = T.lscalar("length")
            zeros = T.alloc(np.float32(0), length)
            self._resize = synk.function([length], updates=[(vector, zeros)])
        if vector.get_value(borrow=True).nbytes != nbytes:
            self._resize(nbytes // 4)
        return _seconds(lambda: synk.all_reduce(vector, op="sum"), count)

    def call(self, count):
        """Return the seconds of calls of a function with a number as its output."""
        if self._call is None:
            numbers = library.shared(np.ones(10, "float32"))
            self._call = synk.function([], (numbers.sum(), "sum"))
        return _seconds(self._call, count)

    def broadcast(self, nbytes, count):
        """Return the seconds of some broadcasts."""
        self.all_reduce(nbytes, 0)
        return _seconds(lambda: synk.broadcast(self._vector), count)

    def traffic(self, what, count, **given):
        """Return the messages that each machine sends in a call, and their bytes."""
        measured, session = getattr(self, what), Current.session
        measured(count=1, **given)
        before = session.ask(CountTraffic())
        measured(count=count, **given)
        after = session.ask(CountTraffic())
        return [[(y - x) / count for x, y in zip(*each)] for each in zip(before, after) if each[0]]

    def losses(self, network, rows, count):
        """Return the losses of the first steps."""
        training = self._training(network, rows)
        training.begin()
        step = training.function("step")
        return [float(step()) for _ in range(count)]

    def step(self, network, rows, part, count):
        """Return the seconds of steps, of their computation, or of their communication."""
        training = self._training(network, rows)
        return _seconds(training.function(part), count)

    def size(self, network):
        """Return what a network is, and the bytes of its gradients."""
        model = self._training(network).network
        return {"title": model.title, "bytes": 4 * int(model.n_numbers)}

    def _training(self, name, rows=None):
        if name not in self._trainings:
            self._trainings[name] = _Training(_NETWORKS[name]())
        training = self._trainings[name]
        if rows is not None:
            training.scatter(rows)
        return training


class _Training:
    """The training of one network."""

    def __init__(self, network):
        self.network = network
        self._first = [param.get_value() for param in network.params]
        # With as many rows as there are ranks at least, until `scatter` gives each its own.
        self._rows = [library.shared(array) for array in network.rows(1)]
        self._number = None
        self._functions = {}

    def scatter(self, number):
        """Give the ranks so many rows, all together."""
        if number != self._number:
            self._number = number
            for variable, values in zip(self._rows, self.network.rows(number)):
                synk.scatter(variable, values)

    def begin(self):
        """Set all parameters to their first values."""
        for param, value in zip(self.network.params, self._first):
            param.set_value(value)
        synk.broadcast(self.network.params)

    def function(self, part):
        """Return the function of a part of a step."""
        if part not in self._functions:
            self._functions[part] = getattr(self, f"_{part}")()
        return self._functions[part]

    def _givens(self):
        return dict(zip((self.network.x, self.network.y), self._rows))

    def _step(self):
        """Return a step of training, as users make it."""
        network, rule = self.network, update_rules.momentum
        options = {"givens": self._givens()}
        return train.make_train_step([], network.loss, network.params, rule, RATE, options=options)

    def _compute(self):
        """Return the same step without a reduction: each rank trains by itself."""
        network = self.network
        updates = update_rules.momentum(network.loss, network.params, RATE)
        return synk.function([], network.loss, updates=updates, givens=self._givens())

    def _communication(self):
        """Return the reduction of arrays of the sizes of all gradients."""
        arrays = [library.shared(np.zeros_like(value)) for value in self._first]
        updates = [(each, synk.ops.all_reduce(T.as_tensor_variable(each))) for each in arrays]
        return synk.function([], updates=updates)


def _seconds(run, count):
    return [turns.seconds_of(run) for _ in range(count)]


if __name__ == "__main__":
    main()
