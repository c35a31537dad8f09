"""A small model in the contract of Theano-MPI: a perceptron on made-up rows, for runs of rules.

Every process saves its parameters in result_<rank>.npz, with what it was called for, when it ends.
"""

import os
import sys
import time

import numpy as np
import theano
import theano.tensor as T
from theanompi.lib.opt import pre_model_iter_fn

RANK = int(os.environ.get("SYNKHRONOS_RANK", "0"))
N_IN, N_CLASSES, SEED = 6, 3, 23


def rows(n_rows):
    """Return inputs and classes."""
    draw = np.random.RandomState(SEED)
    x = draw.normal(size=(n_rows, N_IN))
    return x.astype("float32"), x.dot(draw.normal(size=(N_IN, N_CLASSES))).argmax(1).astype("int32")


def first_parameters():
    """Return the parameters with which all ranks begin."""
    draw = np.random.RandomState(SEED + 1)
    shapes = (N_IN, 5), (5,), (5, N_CLASSES), (N_CLASSES,)
    return [0.3 * draw.normal(size=shape).astype("float32") for shape in shapes]


def order_of_epoch(epoch, n_rows):
    """Return the order of rows in an epoch, the same on all ranks."""
    return np.random.RandomState(epoch).permutation(n_rows)


def expressions(x, y, params):
    """Return the cost and the error."""
    w, b, v, c = params
    p = T.nnet.softmax(T.dot(T.tanh(T.dot(x, w) + b), v) + c)
    return -T.log(p[T.arange(y.shape[0]), y]).mean(), T.neq(p.argmax(1), y).mean()


class Data:
    """Batches of rows; a rank has each size-th batch, and the last batch may be smaller."""

    def __init__(self, config):
        n_rows, self.batch = config.get("n_rows", 96), config.get("batch_size", 8)
        self.x, self.y = rows(n_rows)
        self.rank, self.size = config["rank"], config["size"]
        self.order = np.arange(n_rows)
        starts = range(0, n_rows, self.batch)
        self.n_batch_train = len(starts[self.rank :: self.size])
        self.n_batch_val = config.get("n_batch_val", 2)

    def shuffle(self, epoch):
        self.order = order_of_epoch(epoch, len(self.x))

    def get(self, number):
        begin = (number * self.size + self.rank) * self.batch
        chosen = self.order[begin : begin + self.batch]
        return self.x[chosen], self.y[chosen]


class Model:
    """The perceptron, trained by theanompi.lib.opt."""

    def __init__(self, config):
        self.pause, self.fails = config.get("pause", 0.0), config.get("fails")
        self.verbose, self.rank, self.size = config["verbose"], config["rank"], config["size"]
        self.name, self.epoch, self.n_epochs, self.n_subb = "perceptron", 0, 2, 1
        self.batch_size = self.file_batch_size = config.get("batch_size", 8)
        self.mu, self.eta = config.get("mu", 0.9), config.get("eta", 1e-3)
        self.use_momentum, self.use_nesterov_momentum = bool(self.mu), False
        self.data = Data(config)
        self.x, self.y, self.lr = T.matrix("x"), T.ivector("y"), T.scalar("lr")
        self.params = [theano.shared(each) for each in first_parameters()]
        self.weight_types = ["W", "b", "W", "b"]
        self.cost, self.error = expressions(self.x, self.y, self.params)
        self.grads = T.grad(self.cost, self.params)
        self.shared_lr = theano.shared(np.float32(config.get("lr", 0.1)))
        self.shared_x = theano.shared(np.zeros((1, N_IN), "float32"))
        self.shared_y = theano.shared(np.zeros(1, "int32"))
        self.subb_ind = T.iscalar("subb")
        begin = self.subb_ind * self.batch_size
        self.shared_x_slice = self.shared_x[begin : begin + self.batch_size]
        self.shared_y_slice = self.shared_y[begin : begin + self.batch_size]
        self.compiled_train_fn_list = []
        self.current, self.calls = 0, []

    def compile_train(self, *functions):
        for each in functions:
            self.compiled_train_fn_list.append(theano.function(**each))

    def compile_val(self):
        givens = {self.x: self.shared_x_slice, self.y: self.shared_y_slice}
        outputs = [self.cost, self.error, self.error]
        self.val_fn = theano.function([self.subb_ind], outputs, givens=givens)

    def compile_iter_fns(self, *args, **kwargs):
        pre_model_iter_fn(self, self.size)

    def train_iter(self, count, recorder):
        if self.current == 0:
            self.data.shuffle(self.epoch)
        recorder.start()
        x, y = self.data.get(self.current)
        self.shared_x.set_value(x)
        self.shared_y.set_value(y)
        recorder.end("wait")
        recorder.start()
        cost, error = self.train_iter_fn(0)
        recorder.end("calc")
        recorder.train_error(count, cost, error)
        self.current += 1
        self.calls.append("train")

    def val_iter(self, count, recorder):
        self.shared_x.set_value(self.data.x[: self.batch_size])
        self.shared_y.set_value(self.data.y[: self.batch_size])
        recorder.val_error(count, *self.val_iter_fn(0))
        self.calls.append("val")

    def reset_iter(self, mode):
        self.current = 0
        self.calls.append(f"reset {mode}")

    def adjust_hyperp(self, epoch):
        sys.stdout.write(f"adjusts rank {RANK} {epoch}\n")
        self.calls.append(f"adjust {epoch}")

    def cleanup(self):
        values = {f"p{n}": each.get_value() for n, each in enumerate(self.params)}
        np.savez(
            f"result_{RANK}.npz", calls=self.calls, lr=float(self.shared_lr.get_value()), **values
        )


class Sleeps(Model):
    """Its last process comes late."""

    def __init__(self, config):
        seconds = config.get("seconds", 0.0)
        if int(os.environ["SYNKHRONOS_SIZE"]) - 1 == RANK:
            time.sleep(seconds)
        Model.__init__(self, config)

    def train_iter(self, count, recorder):
        time.sleep(self.pause)
        Model.train_iter(self, count, recorder)


class Fails(Model):
    """One process raises, while it trains or before."""

    def __init__(self, config):
        Model.__init__(self, config)
        if config.get("early") and self.fails == RANK:
            time.sleep(config["early"])
            raise ValueError("this model is bad")

    def train_iter(self, count, recorder):
        if self.fails == RANK and len(self.calls) > 5:
            raise ValueError("this batch is bad")
        time.sleep(self.pause)
        Model.train_iter(self, count, recorder)


class Stops(Model):
    """One process asks to stop; another validates again from a batch that it says."""

    n_val = 0

    def val_iter(self, count, recorder):
        Model.val_iter(self, count, recorder)
        self.n_val += 1
        if RANK == 1 and self.epoch == 1:
            return "stop"
        return None

    def print_info(self, recorder):  # an old one: without verbose
        self.calls.append("info")


class Descends(Model):
    """Plain Theano updates of its own, and no theanompi.lib.opt."""

    def compile_iter_fns(self, sync_type="avg"):
        self.sync_type_told = sync_type
        rate = self.shared_lr
        updates = [(p, p - rate * g) for p, g in zip(self.params, self.grads)]
        givens = {self.x: self.shared_x, self.y: self.shared_y}
        self.train_fn = theano.function([], [self.cost, self.error], updates=updates, givens=givens)
        self.train_iter_fn = lambda subb: self.train_fn()
        self.compile_val()
        self.val_iter_fn = self.val_fn
