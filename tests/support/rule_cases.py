"""Models in what the users of Theano-MPI reported, with figures that can be computed by hand.

The cost of a row x is ``(w - x)**2 / 2``, so a step of SGD moves w towards the mean of the rows.
"""

import collections
import dataclasses
import os
import random
import time
from pathlib import Path

import numpy as np
import theano
import theano.tensor as T
from theanompi.lib.opt import pre_model_iter_fn

RANK = int(os.environ.get("SYNKHRONOS_RANK", "0"))


class Data:
    """Batches of each rank: ``rows[rank]`` is a list of lists of numbers."""

    def __init__(self, config):
        rows = config.get("rows", [[[1.0, 3.0]], [[5.0, 7.0]], [[9.0, 11.0]]])
        self.batches = [np.array(each, "float32") for each in rows[RANK % len(rows)]]
        self.n_batch_train, self.n_batch_val = len(self.batches), 1


class Mean:
    """One weight, which follows the mean of the rows, trained by theanompi.lib.opt."""

    def __init__(self, config):
        self.how, self.rate, self.data = config.get("how"), config.get("lr", 1.0), Data(config)
        self.verbose, self.size = config["verbose"], config["size"]
        self.epoch, self.n_epochs, self.n_subb = 0, config.get("n_epochs", 1), 1
        self.mu, self.eta, self.use_momentum, self.use_nesterov_momentum = 0.0, 0.0, False, False
        self.x, self.y, self.subb_ind = T.vector("x"), T.vector("y"), T.iscalar("subb")
        self.shared_x = self.shared_x_slice = theano.shared(np.zeros(1, "float32"), "rows")
        self.shared_y = self.shared_y_slice = theano.shared(np.zeros(1, "float32"), "labels")
        self.shared_lr = theano.shared(np.float32(self.rate))
        self.rates = []
        self.make()

    def make(self):
        self.params = [theano.shared(np.float32(0), "w")]
        self.weight_types = ["W"]
        self.cost = self.error = T.sqr(self.params[0] - self.x).mean() / 2

    def compile_iter_fns(self, sync_type="cdd"):
        pre_model_iter_fn(self, self.size)

    def compile_val(self):
        return lambda: (0.0, 0.0, 0.0)

    def batch(self, count):
        return self.data.batches[count]

    def train_iter(self, count, recorder):
        self.rates.append(float(self.shared_lr.get_value()))
        rows = self.batch(count)
        self.shared_x.set_value(rows)
        self.shared_y.set_value(rows)
        recorder.train_error(count, *self.train_iter_fn(0))

    def val_iter(self, count, recorder):
        recorder.val_error(count, 0.0, 0.0, 0.0)

    def reset_iter(self, mode):
        pass

    def adjust_hyperp(self, epoch):
        pass

    def cleanup(self):
        # In the order of their making, whatever the list says.
        made = sorted(self.params, key=lambda each: int(each.auto_name.partition("_")[2]))
        values = np.concatenate([np.ravel(each.get_value()) for each in made])
        np.savez(f"result_{RANK}.npz", values=values, rates=self.rates, **self.more())

    def more(self):
        return {}


class Collects(Mean):
    """Four weights of one shape, collected in a set, or listed."""

    def make(self):
        weights = [
            theano.shared(np.float32(0), f"w{i}" if self.how == "named" else None) for i in range(4)
        ]
        self.cost = sum(T.sqr(w - i * self.x).mean() / 2 for i, w in enumerate(weights, 1))
        self.error = self.cost
        self.params = weights
        if self.how == "as a set" and RANK:  # which has an order of its own in each process
            self.params = weights[RANK:] + weights[:RANK]
        if self.how == "sorted":  # made in an order of its own, and listed by names
            for i, each in enumerate(weights):
                each.name = "dacb"[i] if RANK == 0 else "bcad"[i]
            self.params = sorted(weights, key=lambda each: each.name)
            self.cost = sum(T.sqr(w - i * self.x).mean() / 2 for i, w in enumerate(self.params, 1))
        self.weight_types = ["W"] * 4


class Sequences(Mean):
    """Three labels for each row, of shape (time, batch)."""

    def make(self):
        Mean.make(self)
        self.y = T.matrix("y")
        self.shared_y_slice = theano.shared(np.zeros((1, 1), "float32"), "labels")
        self.cost = self.cost + 0 * self.y.sum()

    def train_iter(self, count, recorder):
        rows = self.batch(count)
        self.shared_x.set_value(rows)
        self.shared_y_slice.set_value(np.tile(rows, (3, 1)))
        recorder.train_error(count, *self.train_iter_fn(0))


class Trains(Mean):
    """A function of its own, given the rows as inputs, as shared variables, or by their numbers."""

    step_rows = None

    def compile_iter_fns(self, sync_type="avg"):
        w, rate = self.params[0], self.shared_lr
        updates = [(w, w - rate * theano.grad(self.cost, w))]
        outputs, how = [self.cost, self.error], self.how
        if how == "inputs":
            self.train_iter_fn = theano.function([self.x], outputs, updates=updates)
        elif how == "shared":
            function = theano.function([], outputs, updates=updates, givens={self.x: self.shared_x})
            self.train_iter_fn = lambda: function()
        else:
            rows = theano.shared(np.concatenate(self.data.batches))
            begin, end = T.iscalars("begin", "end")
            self.train_fn = theano.function(
                [begin, end], outputs, updates=updates, givens={self.x: rows[begin:end]}
            )

    def train_iter(self, count, recorder):
        rows, how = self.batch(count), self.how
        if how == "inputs":
            recorder.train_error(count, *self.train_iter_fn(rows))
        elif how == "shared":
            self.shared_x.set_value(rows)
            recorder.train_error(count, *self.train_iter_fn())
        else:
            if how == "numbers and step_rows":
                self.step_rows = len(rows)
            recorder.train_error(count, *self.train_fn(0, len(rows)))


class Adjusts(Mean):
    """Its learning rate is set anew after each epoch."""

    def adjust_hyperp(self, epoch):
        how = self.how
        if how == "constant":
            self.shared_lr.set_value(np.float32(self.rate))
        elif how == "polynomial":
            left = 1 - (epoch + 1) / self.n_epochs
            self.shared_lr.set_value(np.float32(self.rate * left))
        elif how == "decay":
            self.shared_lr.set_value(np.float32(self.shared_lr.get_value() / 2))


class Counts(Mean):
    """A number of steps is among its parameters."""

    def make(self):
        Mean.make(self)
        self.params.append(theano.shared(np.int64(1), "n_steps"))


class Normalizes(Mean):
    """A running mean of the rows, beside the weight."""

    def make(self):
        Mean.make(self)
        self.running_mean = theano.shared(np.float32(0), "running_mean")
        mean = self.running_mean + 0 * self.x.mean()
        mean.default_update = self.x.mean()
        self.running_mean.default_update = self.x.mean()
        self.cost = self.cost + 0 * self.running_mean
        self.seen = []

    def train_iter(self, count, recorder):
        Mean.train_iter(self, count, recorder)
        Path(f"trained_{RANK}").touch()
        while len(list(Path().glob("trained_*"))) < (self.how or 1):  # wait until all take part
            time.sleep(0.01)

    def val_iter(self, count, recorder):
        self.seen.append(float(self.running_mean.get_value()))
        recorder.val_error(count, 0.0, 0.0, 0.0)

    def more(self):
        return {"running_mean": self.running_mean.get_value(), "seen": self.seen}


class Epochs(Mean):
    """Ranks differ in a number."""

    def __init__(self, config):
        Mean.__init__(self, config)
        setattr(self, self.how, 1 + RANK)


class Reads(Mean):
    """Its data are a stream, which can be read once."""

    def __init__(self, config):
        Mean.__init__(self, config)
        how = self.how
        if how == "generator":
            self.data.stream = (each for each in self.data.batches * self.n_epochs)
        elif how == "random":
            self.data.draws = random.Random(3)
        elif how == "nested":
            self.data.reader = Reader(self.data.batches)
        elif how in ("a frozen object", "an object with slots"):
            self.data.reader = (Frozen if "frozen" in how else Slots)(self.data.batches)
        elif how in ("late", "many objects"):
            self.data.reader = Reader(self.data.batches) if "many" in how else None
            self.samples = [Reader([]) for _ in range(1500)]
        elif how == "mapped":
            self.data.at = np.memmap(f"at_{RANK}.bin", "int64", "w+", shape=1)
        elif how in ("deque", "int keys"):
            self.data.at = collections.deque([0, 1, 2]) if how == "deque" else {0: 0}
        elif how == "file":
            lines = [" ".join(map(str, each)) for each in self.data.batches * self.n_epochs]
            with open(f"rows_{RANK}.txt", "w") as file:
                file.write("\n".join(lines))
            self.data.file = open(f"rows_{RANK}.txt")  # noqa: SIM115

    def batch(self, count):
        data, how = self.data, self.how
        if how == "generator":
            return next(data.stream)
        if how == "slow":
            while not Path("end").exists():
                time.sleep(0.01)
            return data.batches[count]
        if how == "random":
            return data.batches[data.draws.randrange(len(data.batches))]
        if how == "nested" or ("object" in how and "many" not in how):
            return data.reader.read()
        if how in ("late", "many objects"):
            data.reader = data.reader or Reader(data.batches)
            return data.reader.read()
        if how == "mapped":
            data.at[0] += 1
            return data.batches[data.at[0] - 1]
        if how == "deque":
            data.at.rotate(-1)
            return data.batches[data.at[-1]]
        if how == "int keys":
            data.at[0] += 1
            return data.batches[(data.at[0] - 1) % len(data.batches)]
        return np.array(data.file.readline().split(), "float32")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Counts in an attribute that can't be assigned."""

    batches: list
    at: int = 0

    def read(self):
        object.__setattr__(self, "at", self.at + 1)
        return self.batches[(self.at - 1) % len(self.batches)]


class Slots:
    """Has no dict."""

    __slots__ = ("at", "batches")

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def read(self):
        self.at += 1
        return self.batches[(self.at - 1) % len(self.batches)]


class Reader:
    """Reads batches in a circle, or in a random order."""

    def __init__(self, batches):
        self.batches, self.at, self.draws = batches, 0, np.random.RandomState(5)

    def read(self):
        self.at += 1
        self.draws.rand()
        return self.batches[(self.at - 1) % len(self.batches)]
