"""Stores in tests: devices as threads, and queues that a test holds up."""

import contextlib
import threading

import numpy as np

from support.threads import in_thread
from support.waiting import LONG
from synkhronos import parameter_server as ps

SECONDS = LONG  # of waits that should be short


class Held(ps.Updater):
    """An updater whose updates wait until the test lets them go, and that notes their order."""

    def __init__(self):
        self.order, self.is_there, self.may_go = [], threading.Event(), threading.Event()

    def update(self, key, gradient):
        self.is_there.set()
        assert self.may_go.wait(SECONDS)
        self.weights[key] += gradient
        self.order.append(key)

    def go_soon(self):
        threading.Timer(0.2, self.may_go.set).start()


def local(shapes, devices=(0,), updater=None, dtype=np.float32, **parameters):
    """Return a store of one process, with keys 0, 1, ... of these shapes for all devices."""
    store = ps.create("local", **parameters)
    if updater is not None:
        store.set_updater(updater)
    store.init(list(devices))
    for key, shape in enumerate(shapes):
        for device in devices:
            store.init_key(shape, key, device, dtype=dtype)
    return store


def on_threads(devices, function):
    """Call ``function(device)`` in a thread for each device; return the results by device."""
    futures = {device: in_thread(function, device) for device in devices}
    return {device: future.result(SECONDS) for device, future in futures.items()}


def pull(store, array, key, device):
    """Return an array into which a device has pulled."""
    store.pull_req(array, key, device)
    store.pull_wait(key, device, SECONDS)
    return array


@contextlib.contextmanager
def blocked(store, key, device):
    """Hold up the pulls of a device by a callback, until the end of the block."""
    is_there, may_go = threading.Event(), threading.Event()

    def callback():
        is_there.set()
        assert may_go.wait(SECONDS)

    array = np.zeros((1,), np.float32)
    store.init_key((1,), key, device)
    store.push(array, key, device)
    store.pull_req(array, key, device, callback=callback)
    assert is_there.wait(SECONDS)
    try:
        yield
    finally:
        may_go.set()
        store.pull_wait(key, device, SECONDS)
