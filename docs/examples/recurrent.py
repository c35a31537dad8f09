"""Train a recurrent network to continue a text, on ranks and with serial Theano."""

import codecs
import contextlib
import io

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from synkhronos.extensions import train, update_rules

with contextlib.redirect_stdout(io.StringIO()):
    import this  # the Zen of Python, which it prints

EPOCHS, BATCH, LENGTH, UNITS = 15, 100, 20, 64

text = codecs.decode(this.s, "rot13").replace("\n", " ")
letters = sorted(set(text))
numbers = np.array([letters.index(letter) for letter in text], "int32")
# Row i has the letters i to i + LENGTH: all but its last are read, and all but its first guessed.
rows = numbers[np.arange(len(text) - LENGTH)[:, None] + np.arange(LENGTH + 1)]


def network():
    """Return parameters, the input (rows, time), the loss, and the scores of the next letter."""
    random = np.random.RandomState(1)

    def weight(name, *shape):
        return theano.shared(random.normal(0, 0.3, shape), name)

    code, bias = weight("code", len(letters), 3 * UNITS), weight("bias", 3 * UNITS)
    gates, candidate = weight("gates", UNITS, 2 * UNITS), weight("candidate", UNITS, UNITS)
    scores_of = weight("scores_of", UNITS, len(letters))

    def step(letter, state):  # a gated recurrent unit, for all rows
        opened = T.nnet.sigmoid(letter[:, : 2 * UNITS] + T.dot(state, gates))
        reset, kept = opened[:, :UNITS], opened[:, UNITS:]
        new = T.tanh(letter[:, 2 * UNITS :] + T.dot(reset * state, candidate))
        return kept * state + (1 - kept) * new

    x = T.imatrix("x")
    first = T.zeros((x.shape[0], UNITS))  # x.shape[0]: a rank has some of the rows
    by_time = x.dimshuffle(1, 0)  # scan steps along the first axis
    states, _ = theano.scan(step, sequences=code[by_time[:-1]] + bias, outputs_info=first)
    scores = T.dot(states, scores_of)  # (time, rows, letters)
    right = (scores * T.eye(len(letters))[by_time[1:]]).sum(axis=2)
    loss = (T.log(T.exp(scores).sum(axis=2)) - right).mean()
    return [code, bias, gates, candidate, scores_of], x, loss, scores[-1]


def fit(function):
    """Train with `function`, which is Synkhronos's or Theano's; print losses and a text."""
    params, x, loss, scores = network()
    updates = train.parallel_updates(loss, params, update_rules.adam, 0.01, max_norm=1.0)
    step = function([x], loss, updates=updates)
    random = np.random.RandomState(2)
    for epoch in range(1, EPOCHS + 1):
        batches = np.array_split(random.permutation(rows), len(rows) // BATCH)
        losses = [float(step(batch)) for batch in batches]
        print(f"epoch {epoch:2}   loss {np.mean(losses):.6f}")
    guess = theano.function([x], scores[0].argmax())  # one row, in this process
    said = list(numbers[:LENGTH])
    while len(said) < 4 * LENGTH:
        said.append(int(guess([[*said[-LENGTH:], 0]])))
    print("".join(letters[number] for number in said).strip())


print(synk.fork(2), "ranks")
fit(synk.function)
synk.close()
print("serial")
fit(theano.function)
