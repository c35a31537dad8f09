"""What makes Theano find in its compile cache all that it has compiled before.

Theano 1.0.5 compiles some modules again in every process, half a second to a second each. With them
in the cache a function is compiled, and sent to a worker, about ten times faster.
"""

import contextlib
import functools
import hashlib
import os
import time
from pathlib import Path

from theano.gof import cc, compilelock, op

QUIET_SECONDS = 30.0  # of waiting for another process that compiles, before Theano says so
LOOK_SECONDS = 0.02  # between two looks whether it has ended


def find_every_module_again() -> None:
    """Mend the two keys of Theano's cache that no other process has, and its lock."""
    _let_empty_props_say_nothing()
    _hash_external_code_the_same_everywhere()
    _look_often_whether_the_lock_is_free()


def _let_empty_props_say_nothing():
    # The __props__ of each op are a part of its module's version, and an empty part is taken to
    # mean that the op does not say its version: Shape, Alloc, Dot22 and others.
    original = cc.CLinker.cmodule_key_

    @functools.wraps(original)
    def cmodule_key_(self, fgraph, *args, **kwargs):
        key = original(self, fgraph, *args, **kwargs)
        if key is None or key[0]:
            return key
        version = []
        for node in self.schedule(fgraph):
            version.append(node.op.c_code_cache_version_apply(node))
            version.extend(v.type.c_code_cache_version() for v in node.inputs + node.outputs)
            if getattr(node.op, "__props__", ()):
                version.append(node.op.__props__)
        return (tuple(version), key[1]) if version and all(version) else key

    cc.CLinker.cmodule_key_ = cmodule_key_


def _hash_external_code_the_same_everywhere():
    # The version of an op whose C code is in a file, such as DimShuffle, is Python's hash of that
    # code, and each process has its own seed for the hash of strings.
    @functools.wraps(op.COp.c_code_cache_version)
    def c_code_cache_version(self):
        version = (hashlib.sha256("\0".join(self.func_codes).encode()).hexdigest(),)
        if hasattr(self, "params_type"):
            version += (self.params_type.c_code_cache_version(),)
        return version

    op.COp.c_code_cache_version = c_code_cache_version


def _look_often_whether_the_lock_is_free():
    # Theano looks every few seconds, and each time prints who it waits for. Ranks that compile at
    # the same time wait for one another often, and mostly for less than a second.
    original = compilelock.lock

    @functools.wraps(original)
    def lock(tmp_dir, *args, **kwargs):
        end = time.monotonic() + QUIET_SECONDS
        while _is_held(tmp_dir) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return original(tmp_dir, *args, **kwargs)

    compilelock.lock = lock


def _is_held(tmp_dir):
    """Return whether a process that runs on this machine holds the lock."""
    with contextlib.suppress(OSError, ValueError):
        owner = int((Path(tmp_dir) / "lock").read_text().split("_")[0])
        os.kill(owner, 0)
        return owner != os.getpid()
    return False
