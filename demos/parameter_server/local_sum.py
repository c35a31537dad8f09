"""Sum arrays of several devices by key: the first program of mshadow-ps's guide.

    python demos/parameter_server/local_sum.py 0 1

Each device is a thread with a number. Its array has two rows: the first is 1, the second its
number + 1. Each row is a key. After a push and a pull each device has the sum over all devices.
"""

import argparse
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from synkhronos import parameter_server as ps

USAGE = """Usage: local_sum.py DEVICE [DEVICE ...]
    DEVICE: a number from 0 on; each is one thread of this process
    For example: local_sum.py 0 1
"""

output = threading.Lock()


def show(device, when, data):
    """Print an array of a device; blocks of different devices are not mixed."""
    rows = "\n".join(" ".join(f"{value:g}" for value in row) for row in data)
    with output:
        sys.stdout.write(f"dev{device}: {when} sync, data:\n{rows}\n{'=' * 20}\n")
        sys.stdout.flush()


def run_device(store, device):
    """Push both rows of a device, pull their sums, and return them."""
    data = np.ones((2, 3), np.float32)
    data[1] = device + data[0]
    show(device, "before", data)

    # Every device names each key and its shape.
    store.init_key(data[0].shape, 0, device)
    store.init_key(data[1].shape, 1, device)

    # These calls return at once: the sum is computed when the last device has pushed.
    store.push(data[0], 0, device)
    store.pull_req(data[0], 0, device)
    # The device could compute here.
    store.push(data[1], 1, device)
    store.pull_req(data[1], 1, device)
    # ... and here.

    # These return when the sum of all devices is in the row.
    store.pull_wait(0, device)
    store.pull_wait(1, device)
    show(device, "after", data)
    return data


def main(argv=None):
    """Run a thread for each device; return their arrays."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("devices", metavar="DEVICE", type=int, nargs="*")
    devices = parser.parse_args(argv).devices
    if not devices:
        sys.stdout.write(USAGE)
        return []
    if min(devices) < 0 or len({*devices}) < len(devices):
        parser.error(f"devices must be different numbers from 0 on, got {devices}")
    # The store is closed before the threads are joined: if one fails, the waits of others end.
    with ThreadPoolExecutor(len(devices)) as pool, ps.create("local", devices=devices) as store:
        runs = [pool.submit(run_device, store, device) for device in devices]
        for each in as_completed(runs):
            each.result()
    return [each.result() for each in runs]


if __name__ == "__main__":
    main()
