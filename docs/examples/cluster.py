"""Train on the ranks of all machines, and go on after one is lost: cluster.py FILE.npz [EPOCHS]."""

import sys

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from synkhronos.extensions import train, update_rules

path, epochs = sys.argv[1], int((sys.argv[2:] or [20])[0])

print(f"{synk.fork()} ranks, start {synk.restart_count() + 1}")

x_rows = np.random.RandomState(0).normal(size=(1000, 3))
y_rows = np.tanh(x_rows.dot([1, 2, 3]))

x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(3), "w")
loss = T.sqr(T.tanh(T.dot(x, w)) - y).mean()
step = train.make_train_step([x, y], loss, [w], update_rules.adam, learning_rate=0.05)
x_data, y_data = step.build_inputs(x_rows, y_rows)

with synk.resume(path, [step], every=1.0) as state:
    print(f"begins with step {state.step}")
    for _ in state.epochs(epochs):
        for batch in state.batches(rows=1000, size=100, seed=1):
            value = float(step(x_data, y_data, batch=batch))
            state.tick()
print(f"step {state.step}: loss {value:.6f}, w = {w.get_value().round(3)}")
