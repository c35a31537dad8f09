"""Stores in tests: devices as threads, and lanes that a test holds up."""

import contextlib
import threading

import numpy as np

from support.waiting import LONG

SECONDS = LONG  # of waits that should be short


def on_threads(devices, function):
    """Call ``function(device)`` in a thread for each device; return the results by device."""
    results, errors = {}, []

    def run(device):
        try:
            results[device] = function(device)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a device hangs"
    if errors:
        raise errors[0]
    return results


def init_keys(store, shapes, dtype=np.float32):
    """Make keys 0, 1, ... for all devices of a store."""
    for key, shape in enumerate(shapes):
        for device in store.devices:
            store.init_key(shape, key, device, dtype=dtype)


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
