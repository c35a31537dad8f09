"""A multilayer perceptron as a model file in Theano-MPI's contract, for the benchmark ``rules``.

As a program it trains the same model by `make_train_step`, on ranks of a session, and answers with
the rows for each second.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from synkhronos._host import library
from synkhronos._host import tensor as T
from synkhronos.rules.compatible.models.classifier import Classifier
from synkhronos.rules.compatible.models.data import MNIST_data
from synkhronos.tools import turns
from synkhronos.tools.bench import programs

FIRST = 5  # steps that are not counted
_SECONDS = 300  # for the others to compile


class Perceptron(Classifier):
    """Dense layers with rectifiers on images of 28 x 28 pixels.

    Each rank writes the times at which its steps ended, and their rows, into a file of the folder
    ``timeline``. All begin at once: asynchronous ones would leave the work to the first of them.
    """

    batch_size = 256
    learning_rate = 0.01
    eta = 0.0
    units = (512, 512)
    timeline = ""
    workers = 1

    def make_data(self):
        """Return MNIST, or what SYNKHRONOS_DATA names in its place."""
        self._steps: list[tuple[float, int]] = []
        return MNIST_data(self.verbose)

    def network(self, images):
        """Return the probabilities of the classes."""
        random, self.params = np.random.RandomState(self.seed), []
        x, n_in = images.flatten(2), 784
        sizes = [*self.units, self.data.n_class]
        for number, n_out in enumerate(sizes):
            weights = random.normal(scale=(2 / n_in) ** 0.5, size=(n_in, n_out))
            for values, name in ((weights, "W"), (np.zeros(n_out), "b")):
                value = values.astype(self.shared_lr.dtype)
                self.params.append(library.shared(value, f"{name}{number}"))
            x, n_in = T.dot(x, self.params[-2]) + self.params[-1], n_out
            x = T.nnet.relu(x) if number + 1 < len(sizes) else T.nnet.softmax(x)
        return x, x

    def train_iter(self, count, recorder):
        """Train with the next batch, and note the time."""
        if self.timeline and not self._steps:
            self._meet()
        super().train_iter(count, recorder)
        self._steps.append((time.time(), len(self.shared_y.get_value(borrow=True))))

    def _meet(self):
        folder, end = Path(self.timeline), time.time() + _SECONDS
        (folder / f"{os.getpid()}.ready").touch()
        while len(list(folder.glob("*.ready"))) < self.workers and time.time() < end:
            time.sleep(0.005)

    def cleanup(self):
        """Write the times of the steps."""
        super().cleanup()
        if self.timeline and self._steps:
            path = Path(self.timeline, f"{os.getpid()}.json")
            path.write_text(json.dumps(self._steps))


def main(ranks, steps, batch, units):
    """Train on ranks of a session; return the rows for each second of the median step."""
    import synkhronos as synk
    from synkhronos.extensions import train, update_rules

    os.environ["SYNKHRONOS_DATA"] = "made"
    os.environ["SYNKHRONOS_MADE_BATCHES"] = "8"
    synk.fork(devices=["cpu"] * ranks)
    model = Perceptron({"verbose": True, "batch_size": batch * ranks, "units": units})
    step = train.make_train_step(
        [model.x, model.y],
        model.cost,
        model.params,
        update_rules.momentum,
        learning_rate=model.learning_rate,
        momentum=model.mu,
        outputs=[model.cost, model.error],
    )
    synk.distribute()
    batches = [model.data.batch("train", number) for number in range(8)]
    times = [
        turns.seconds_of(step, *batches[number % len(batches)]) for number in range(FIRST + steps)
    ]
    synk.close()
    return batch * ranks / statistics.median(times[FIRST:])


if __name__ == "__main__":
    programs.answer(main(**json.loads(sys.argv[1])))
