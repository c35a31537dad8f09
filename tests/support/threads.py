"""Calls in threads beside a test."""

import concurrent.futures
import threading


def in_thread(do, *args):
    """Begin a call in a thread of its own; return the Future of its result."""
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(do(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
