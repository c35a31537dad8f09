"""What makes Theano find in its compile cache all that it has compiled before.

Theano 1.0.5 compiles some modules again in every process, half a second to a second each. With them
in the cache a function is compiled, and sent to a worker, about ten times faster. And of processes
that start while others compile, some delete modules that others go on to use.
"""

import contextlib
import functools
import hashlib
import os
import pickle

from theano.gof import cc, cmodule, op


def find_every_module_again() -> None:
    """Mend the keys of Theano's cache that no other process has, or finds half written."""
    _let_empty_props_say_nothing()
    _hash_external_code_the_same_everywhere()
    cmodule.KeyData.save_pkl = _save_pkl
    cmodule.KeyData.add_key = _add_key
    cmodule.ModuleCache.check_key = _check_key


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


def _save_pkl(self):
    # In one step: a process that starts reads it without the lock, and deletes the module of a file
    # that ends too early.
    written = f"{self.key_pkl}.new"  # by one process at a time, which holds the lock
    try:
        with open(written, "wb") as file:
            pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
        os.replace(written, self.key_pkl)
    except FileNotFoundError:
        pass  # somebody has cleared the cache; what this process has loaded it can use
    except pickle.PicklingError:
        for name in (written, self.key_pkl):
            with contextlib.suppress(FileNotFoundError):
                os.remove(name)
        raise


def _add_key(self, key, save_pkl=True):
    # It may be there already: where the last attempt to add it ended in an exception.
    self.keys.add(key)
    if save_pkl:
        self.save_pkl()


def _check_key(self, key, key_pkl, original=cmodule.ModuleCache.check_key):
    if os.path.exists(key_pkl):  # else, as above
        original(self, key, key_pkl)
