"""Devices that push, pull, wait and dawdle at random, against sums that NumPy has computed."""

import random
import threading
import time

import numpy as np
import pytest
from support.parameter_server import SECONDS, local, on_threads

SIZES = [1, 30, 5000, 90_000]
OPS = ["sum", "max", "mean", "gather"]


def part_of(seed, device, key, number, size):
    return np.random.RandomState([seed, device, key, number]).rand(size).astype(np.float32)


def result_of(seed, devices, key, number, size, op):
    parts = [part_of(seed, d, key, number, size) for d in devices]
    if op == "gather":
        return np.stack(parts)
    total = parts[0]
    for part in parts[1:]:
        total = np.maximum(total, part) if op == "max" else total + part
    return total / np.float32(len(parts)) if op == "mean" else total


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 40))]
)
def test_random_devices(seed):
    chosen = random.Random(seed)
    devices = chosen.sample(range(9), chosen.choice([1, 2, 3, 4]))
    n_rounds, n_keys = 8, 6
    sizes = [chosen.choice(SIZES) for _ in range(n_keys)]
    ops = [chosen.choice(OPS) for _ in range(n_keys)]
    parameters = {
        "bigarray_bound": chosen.choice([1, 10_000, 10**9]),
        "reduce_thread": chosen.choice([0, 2, 8]),
        "push_thread": chosen.choice(["one", "ndev"]),
        "pull_thread": chosen.choice(["one", "ndev"]),
        **{f"push_op[{key}]": op for key, op in enumerate(ops)},
    }
    store = local([(size,) for size in sizes], devices, **parameters)
    lock, callbacks = threading.Lock(), []

    def called(key):
        with lock:
            callbacks.append(key)

    def train(device):
        own = random.Random(100 * seed + device)
        for number in range(n_rounds):
            order = own.sample(range(n_keys), n_keys)
            outs = {}
            for key in order:
                part = part_of(seed, device, key, number, sizes[key])
                if ops[key] == "gather":
                    outs[key] = np.zeros((len(devices), sizes[key]), np.float32)
                else:
                    outs[key] = part if own.random() < 0.5 else np.zeros_like(part)
                wants_callback = own.random() < 0.3
                if own.random() < 0.1:
                    time.sleep(own.random() / 500)
                pushed = store.push(part, key, device, own.randrange(-5, 5))
                call = (lambda key=key: called(key)) if wants_callback else None
                store.pull_req(outs[key], key, device, own.randrange(-5, 5), call)
                if own.random() < 0.05 and device == devices[-1]:
                    assert pushed.exception(SECONDS) is None
            for key in own.sample(range(n_keys), n_keys):
                store.pull_wait(key, device, SECONDS)
                expected = result_of(seed, devices, key, number, sizes[key], ops[key])
                np.testing.assert_array_equal(outs[key], expected)

    with store:
        on_threads(devices, train)
    assert callbacks
