"""Add numbers up on a server: dist_async_sum of mshadow-ps.

One server and three workers, each with the devices 1 and 2, which are threads here:

    synkhronos launch --servers 1 --workers 3 demos/parameter_server/dist_async_sum.py 1 2

Each worker adds 1 + 2 to the second row, when it comes. So both its devices print 3, 6 or 9, and
the worker that comes last prints 9.
"""

import argparse
import os
import sys
import threading

import numpy as np

from synkhronos import parameter_server as ps


class Adds(ps.Updater):
    """Begins with zeros, and adds each sum of a worker's devices."""

    def update(self, key, gradient):
        self.weights[key] += gradient


def show(store, device, when, data):
    """Print the rows in one piece: other threads and workers print too."""
    lines = [f"node {store.rank}, dev {device}: {when}"]
    lines += [f"node {store.rank}, dev {device}: {' '.join(f'{x:g}' for x in row)}" for row in data]
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def run_device(store, device, results):
    """Be one device of a worker."""
    data = np.zeros((2, 3), np.float32)
    for key, row in enumerate(data):
        store.init_key(row.shape, key, device)
        store.pull_req(row, key, device)
        store.pull_wait(key, device)
    # A worker that starts late has pulled what others have added to the second row.
    data[1] = device + data[0]
    show(store, device, "before sync", data)
    for key, row in enumerate(data):
        store.push(row, key, device)
        store.pull_req(row, key, device)
        store.pull_wait(key, device)
    show(store, device, "after sync", data)
    results[device] = data


def main(argv=None):
    """Run the demo on this worker; return the rows of each device."""
    parser = argparse.ArgumentParser(description="Add numbers up on a server.")
    parser.add_argument("devices", type=int, nargs="+", help="numbers of devices, such as 1 2")
    devices = parser.parse_args(argv).devices
    if min(devices) < 0 or len({*devices}) < len(devices):
        parser.error(f"devices must be different numbers from 0 on, got {devices}")
    if "SYNKHRONOS_PARAMETER_SERVER" not in os.environ:
        parser.error(
            "a launcher must start it: synkhronos launch --servers 1 --workers 3 "
            + " ".join(["dist_async_sum.py", *map(str, devices)])
        )
    results = {}
    with ps.create("dist_async") as store:
        store.set_updater(Adds())
        store.init(devices)
        threads = [
            threading.Thread(target=run_device, args=(store, device, results)) for device in devices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(results) < len(devices):
        raise SystemExit("a device has failed")
    return results


if __name__ == "__main__":
    main()
