"""Profile some steps of training: python profiled.py [FILE.png]."""

import sys

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from synkhronos.extensions import train, update_rules

random = np.random.RandomState(0)
x, y = T.fmatrix("x"), T.ivector("y")
layer, params = x, []
for n_in, n_out in ((784, 512), (512, 10)):
    params.append(theano.shared(random.normal(0, 0.05, (n_in, n_out)).astype("float32")))
    layer = T.tanh(T.dot(layer, params[-1]))
loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layer), y).mean()

synk.fork(2)
step = train.make_train_step(
    [x, y], loss, params, update_rules.momentum, 0.01, options={"name": "step"}
)
validate = synk.function([x, y], loss, name="validate")
pixels = synk.data(random.normal(size=(4096, 784)).astype("float32"))
labels = synk.data(random.randint(0, 10, 4096).astype("int32"))
synk.distribute()

with synk.profile() as recorded:
    for _ in range(20):
        step(pixels, labels, batch=random.randint(0, 4096, 512))
    validate(pixels, labels)
    synk.broadcast(params)
    step(pixels[:512], labels[:512])  # arrays of the script's own are staged
synk.close()

print(recorded.summary())
if len(sys.argv) > 1:
    recorded.plot(sys.argv[1], last=5)
