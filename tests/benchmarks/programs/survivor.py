"""A training that goes on after faults: ``survivor.py FOLDER``, with RANKS, STEPS, EVERY, PAUSE."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from synkhronos.extensions import train, update_rules

ROWS, COLUMNS, SIZE = 4096, 32, 256
folder = Path(sys.argv[1])
steps, every, pause = (float(os.environ[name]) for name in ("STEPS", "EVERY", "PAUSE"))

theano.config.mode = "FAST_COMPILE"
n = synk.fork(int(os.environ["RANKS"]))
random = np.random.RandomState(1)
data = random.randn(ROWS, COLUMNS)
inputs = synk.data(data), synk.data(np.tanh(data.sum(1, keepdims=True)))
weights = [theano.shared(random.randn(*shape) / 6) for shape in ((COLUMNS, 64), (64, 1))]
x, y = T.dmatrix(), T.dmatrix()
loss = ((T.dot(T.tanh(T.dot(x, weights[0])), weights[1]) - y) ** 2).mean()
step = train.make_train_step([x, y], loss, weights, update_rules.adam)


def tell(*words):
    """Write a line for the benchmark."""
    with open(folder / "ticks.txt", "a") as file:
        print(synk.restart_count(), *words, file=file)


with synk.resume(folder / "run.npz", [step], every=every) as state:
    tell("begun", state.step, time.monotonic())
    ranks = state.get("ranks", [])  # [step, number of ranks], where the number has changed
    if not ranks or ranks[-1][1] != n:
        ranks = [*ranks, [state.step, n]]
    batches = (batch for _ in state.epochs(10**6) for batch in state.batches(ROWS, SIZE, seed=1))
    while state.step < steps:
        step(*inputs, batch=next(batches))
        state["ranks"] = ranks
        state.tick()
        tell("tick", state.step, time.monotonic())
        time.sleep(pause)
np.savez(folder / "end.npz", *[weight.get_value() for weight in weights])
(folder / "ranks.txt").write_text(repr(ranks))
synk.close()
