"""Train a small convolutional network on handwritten digits, with Theano."""

import numpy as np
import theano
import theano.tensor as T
from sklearn.datasets import load_digits
from theano.tensor.signal.pool import pool_2d

import synkhronos as synk

synk.fork()
EPOCHS, BATCH, RATE = 5, 100, 0.2

digits = load_digits()
images = (digits.images[:, None] / 16).astype(theano.config.floatX)
labels = digits.target.astype("int32")
n_train = 1437

# The network: 16 filters of 3 x 3 pixels, the largest of each 2 x 2, and a softmax of ten classes.
random = np.random.RandomState(1)
filters = theano.shared(random.normal(0, 0.3, (16, 1, 3, 3)).astype(images.dtype), "filters")
weights = theano.shared(random.normal(0, 0.1, (16 * 9, 10)).astype(images.dtype), "weights")
bias = theano.shared(np.zeros(10, images.dtype), "bias")
params = [filters, weights, bias]

x, y = T.tensor4("x"), T.ivector("y")
hidden = T.nnet.relu(T.nnet.conv2d(x, filters))
pooled = pool_2d(hidden, (2, 2), ignore_border=True).flatten(2)
output = T.nnet.softmax(T.dot(pooled, weights) + bias)
loss = T.nnet.categorical_crossentropy(output, y).mean()
accuracy = T.eq(output.argmax(axis=1), y).mean()

# Gradient descent with momentum.
updates = []
grads = [synk.ops.all_reduce(grad) for grad in T.grad(loss, params)]
for param, grad in zip(params, grads):
    velocity = theano.shared(np.zeros_like(param.get_value()))
    step = 0.9 * velocity - RATE * grad
    updates += [(velocity, step), (param, param + step)]

train = synk.function([x, y], loss, updates=updates)
test = synk.function([x, y], accuracy)

for epoch in range(1, EPOCHS + 1):
    order = random.permutation(n_train)
    total = 0.0
    for start in range(0, n_train, BATCH):
        rows = order[start : start + BATCH]
        total += len(rows) * float(train(images[rows], labels[rows]))
    score = float(test(images[n_train:], labels[n_train:]))
    print(f"epoch {epoch}   loss {total / n_train:.6f}   test accuracy {score:.6f}")
