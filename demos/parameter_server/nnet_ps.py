"""Train mshadow-ps's network of two layers on digits, with a parameter server.

Each device has a replica of the network and takes its part of each batch of 100 rows. A gradient is
pushed as soon as it is computed, from the last layer to the first; the first layer, which is needed
soonest in the next batch, has the highest priority. The sum of all devices comes back into the
gradient, and a callback updates the weight. The next batch waits for each weight just before it is
used.

    python demos/parameter_server/nnet_ps.py 0 1    # or, as in the guide: nnet_ps.py cpu 0 1
    synkhronos launch --servers 1 --workers 2 demos/parameter_server/nnet_ps.py

The first line trains with two threads of one process, the second with two processes and a server,
on one machine or several. With --graph Theano computes the gradients, and pushes and waits inside
of its functions. With --check the result is compared with that of one device and whole batches.

The network is that of the guide of mshadow-ps (nnet_ps.cu), which trains it on MNIST.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from sklearn.datasets import load_digits

from synkhronos import parameter_server as ps

BATCH = 100
RATE, DECAY = 0.8, 1e-5
KEYS = {"Wi2h": 0, "hbias": 1, "Wh2o": 2, "obias": 3}


def load(is_for_test, seed):
    """Return pixels and labels: every fifth digit to test with, the others, shuffled, to train."""
    digits = load_digits()
    pixels, labels = (digits.data / 16).astype("float32"), digits.target.astype("int32")
    chosen = np.flatnonzero((np.arange(len(labels)) % 5 == 4) == is_for_test)
    if not is_for_test:
        chosen = np.random.RandomState(seed).permutation(chosen)
    return pixels[chosen], labels[chosen]


def first_weights(hidden, seed):
    """Return the weights that all replicas begin with, by name."""
    random = np.random.RandomState(seed)
    return {
        "Wi2h": random.normal(scale=0.01, size=(64, hidden)).astype("float32"),
        "hbias": np.zeros(hidden, "float32"),
        "Wh2o": random.normal(scale=0.01, size=(hidden, 10)).astype("float32"),
        "obias": np.zeros(10, "float32"),
    }


class Network:
    """The network in NumPy; without a store it trains alone, with whole batches."""

    def __init__(self, store, devid, weights):
        self.store, self.devid = store, devid
        self.weights = weights
        self.gradients = {name: np.empty_like(weight) for name, weight in weights.items()}
        if store is not None:
            for name, weight in weights.items():
                store.init_key(weight.shape, KEYS[name], devid)

    def step(self, pixels, labels):
        """Learn from a part of a batch."""
        hidden, output = self.forward(pixels)
        output[np.arange(len(labels)), labels] -= 1
        output /= BATCH  # so that the sum over all devices is the mean over the batch
        # Both read a weight that the callback changes once its gradient is pushed.
        below = output @ self.weights["Wh2o"].T * hidden * (1 - hidden)
        output.sum(axis=0, out=self.gradients["obias"])
        self.synchronize("obias")
        np.dot(hidden.T, output, out=self.gradients["Wh2o"])
        self.synchronize("Wh2o")
        below.sum(axis=0, out=self.gradients["hbias"])
        self.synchronize("hbias")
        np.dot(pixels.T, below, out=self.gradients["Wi2h"])
        self.synchronize("Wi2h")

    def forward(self, pixels):
        """Return the hidden layer and the probabilities of the labels."""
        hidden = pixels @ self.weight("Wi2h") + self.weight("hbias")
        hidden = 1 / (1 + np.exp(-hidden))
        output = hidden @ self.weight("Wh2o") + self.weight("obias")
        output = np.exp(output - output.max(axis=1, keepdims=True))
        return hidden, output / output.sum(axis=1, keepdims=True)

    def weight(self, name):
        """Return a weight, when it has learned from the last batch."""
        if self.store is not None:
            self.store.pull_wait(KEYS[name], self.devid)
        return self.weights[name]

    def synchronize(self, name):
        """Push a gradient, and let the sum of all devices change the weight."""
        if self.store is None:
            self.update(name)
            return
        key, gradient = KEYS[name], self.gradients[name]
        self.store.push(gradient, key, self.devid, priority=-key)
        self.store.pull_req(
            gradient, key, self.devid, priority=-key, callback=lambda: self.update(name)
        )

    def update(self, name):
        """Take a step of gradient descent; biases don't decay."""
        weight, gradient = self.weights[name], self.gradients[name]
        decay = DECAY * weight if weight.ndim > 1 else 0
        weight -= np.float32(RATE) * (gradient + np.float32(decay))

    def predict(self, pixels):
        """Return the most probable labels."""
        return self.forward(pixels)[1].argmax(axis=1)

    def values(self):
        """Return the weights, when they have learned from the last batch."""
        return {name: self.weight(name) for name in self.weights}


class GraphNetwork:
    """The network in Theano, with pushes and waits inside of the function of a step."""

    def __init__(self, store, devid, weights):
        import theano
        import theano.tensor as T

        from synkhronos.extensions.train import make_train_step

        pixels, labels = T.fmatrix("pixels"), T.ivector("labels")
        self.params = [theano.shared(weight, name) for name, weight in weights.items()]
        w_hidden, b_hidden, w_out, b_out = self.params
        hidden = T.nnet.sigmoid(T.dot(pixels, w_hidden) + b_hidden)
        output = T.nnet.softmax(T.dot(hidden, w_out) + b_out)
        loss = T.nnet.categorical_crossentropy(output, labels).mean()
        self._predict = theano.function([pixels], output.argmax(axis=1))
        self._finish = None
        if store is None:
            updates = gradient_descent(T.grad(loss, self.params), self.params)
            self.step = theano.function([pixels, labels], loss, updates=updates)
        else:
            self.step = make_train_step(
                [pixels, labels], loss, self.params, gradient_descent, store=store, devid=devid
            )
            self._finish = self.step.finish

    def predict(self, pixels):
        """Return the most probable labels."""
        if self._finish is not None:
            self._finish()  # or the function would read weights that are one step behind
        return self._predict(pixels)

    def values(self):
        """Return the weights, when they have learned from the last batch."""
        return {param.name: param.get_value() for param in self.params}


def gradient_descent(grads, params):
    """Return the updates of a step of gradient descent; biases don't decay."""
    return [
        (p, p - np.float32(RATE) * (g + np.float32(DECAY) * p if p.ndim > 1 else g))
        for p, g in zip(params, grads)
    ]


def train(network, part, n_parts, data, epochs, report):
    """Train one replica with its part of each batch."""
    (pixels, labels), (test_pixels, test_labels) = data
    size = BATCH // n_parts
    for epoch in range(epochs):
        for start in range(part * size, len(labels) - BATCH + 1 + part * size, BATCH):
            rows = slice(start, start + size)
            network.step(pixels[rows], labels[rows])
        if report:
            error = np.mean(network.predict(test_pixels) != test_labels)
            print(f"round {epoch}: test-err={error:f}", flush=True)
    return network.values()


def train_or_close(store, *arguments):
    """Train one replica; if that fails, close the store, for which other replicas wait."""
    try:
        return train(*arguments)
    except BaseException:
        store.close(drain=False)
        raise


def largest_difference(values, others):
    """Return the largest difference between the weights of two replicas."""
    return max(float(abs(values[name] - others[name]).max()) for name in values)


def parse(argv):
    """Read the command line; return None if it names no device, and no launcher has started it."""
    parser = argparse.ArgumentParser(
        prog="nnet_ps.py",
        usage="nnet_ps.py [cpu] [DEVICE ...] [options]",
        description="Train mshadow-ps's network of two layers on digits, with a parameter server.",
    )
    add = parser.add_argument
    add("devices", type=int, nargs="*", help="devices of this process, one thread each: 0 1")
    add("--epochs", type=int, default=20, metavar="N", help="passes over the digits (20)")
    add("--hidden", type=int, default=100, metavar="N", help="units of the hidden layer (100)")
    add("--seed", type=int, default=0, metavar="N", help="of weights and order (0)")
    add("--graph", action="store_true", help="push and wait inside of Theano's functions")
    add("--check", action="store_true", help="compare with one device and whole batches")
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["gpu"]:
        parser.error("this demo computes on the CPU: write cpu in place of gpu, or leave it out")
    arguments = parser.parse_args(argv[1:] if argv[:1] == ["cpu"] else argv)
    devices = arguments.devices
    if any(device < 0 for device in devices) or len({*devices}) < len(devices):
        parser.error(f"devices must be different numbers from 0 on, got {devices}")
    arguments.kind = "dist_sync" if "SYNKHRONOS_PARAMETER_SERVER" in os.environ else "local"
    if not arguments.devices:
        if arguments.kind == "local":
            parser.print_usage()
            print("\tfor CPU the device list can be arbitrary, such as 0 1")
            return None
        arguments.devices = [0]
    return arguments


def main(argv=None):
    """Run the demo; return its measurements, or None without a device."""
    arguments = parse(argv)
    if arguments is None:
        return None
    kind = GraphNetwork if arguments.graph else Network
    with ps.create(arguments.kind, devices=arguments.devices) as store:
        n_devices = len(arguments.devices)
        n_parts = n_devices * store.num_workers
        if BATCH % n_parts:
            sys.exit(f"nnet_ps.py: {BATCH} rows can't be split evenly over {n_parts} devices")
        data = [load(is_for_test, arguments.seed) for is_for_test in (False, True)]
        is_first = store.rank == 0
        for (pixels, _), shuffle in zip(data if is_first else (), (1, 0)):
            rows, columns = pixels.shape
            print(f"finish loading {rows}x{columns} matrix from digits, shuffle={shuffle}")
        replicas = [
            kind(store, device, first_weights(arguments.hidden, arguments.seed))
            for device in arguments.devices
        ]
        with ThreadPoolExecutor(n_devices) as pool:
            calls = []
            for position, replica in enumerate(replicas):
                part, report = store.rank * n_devices + position, is_first and position == 0
                work = replica, part, n_parts, data, arguments.epochs, report
                calls.append(pool.submit(train_or_close, store, *work))
            results = [call.result() for call in calls]
        equal = all(largest_difference(results[0], other) == 0 for other in results)
        found = {"devices": n_parts, "values": results[0], "equal": equal}
        if arguments.check:
            serial = kind(None, 0, first_weights(arguments.hidden, arguments.seed))
            alone = train(serial, 0, 1, data, arguments.epochs, False)
            found["difference"] = largest_difference(results[0], alone)
            print(
                f"weights differ by at most {found['difference']:.1e} from those of one device and "
                f"whole batches; replicas are {'equal' if equal else 'NOT EQUAL'}",
                flush=True,
            )
    return found


if __name__ == "__main__":
    main()
