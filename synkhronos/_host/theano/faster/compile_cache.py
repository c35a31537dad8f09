"""Changes to Theano's compile cache, so that processes find all modules compiled before.

Theano 1.0.5 compiles some modules again in every process, half a second to a second each. With
these modules in the cache a function is compiled, and sent to a worker, about ten times faster.
In Theano, a process that starts may also delete modules that another one is compiling.
"""

import contextlib
import functools
import hashlib
import os
import pickle

from theano.gof import cc, cmodule, compilelock, op

from synkhronos._machine.processes import this_machine


def fix_cache_keys() -> None:
    """Fix the keys of Theano's cache that differ between processes, and write keys in one step."""
    _take_given_modules()
    cc.CLinker.cmodule_key_ = _cmodule_key_
    op.COp.c_code_cache_version = _c_code_cache_version
    cmodule.KeyData.save_pkl = _save_pkl
    cmodule.KeyData.add_key = _add_key
    cmodule.ModuleCache.check_key = _check_key
    cmodule.ModuleCache.refresh = _refresh
    compilelock.lock_ctx = _lock_ctx


def _cmodule_key_(self, fgraph, *args, original=cc.CLinker.cmodule_key_, **kwargs):
    # The __props__ of each op are a part of its module's version. Theano takes an empty part to
    # mean that the op has no version, so Shape, Alloc, Dot22 and others are never found.
    key = original(self, fgraph, *args, **kwargs)
    if key is None or key[0]:
        return key
    version = []
    for node in self.schedule(fgraph):
        if hasattr(node.op, "c_code_cache_version_apply"):  # a scan has none
            version.append(node.op.c_code_cache_version_apply(node))
        version.extend(v.type.c_code_cache_version() for v in node.inputs + node.outputs)
        if getattr(node.op, "__props__", ()):
            version.append(node.op.__props__)
    return (tuple(version), key[1]) if version and all(version) else key


def _c_code_cache_version(self):
    # The version of an op whose C code is in a file, such as DimShuffle, is Python's hash of that
    # code, which has another seed in each process.
    version = (hashlib.sha256("\0".join(self.func_codes).encode()).hexdigest(),)
    if hasattr(self, "params_type"):
        version += (self.params_type.c_code_cache_version(),)
    return version


def _refresh(self, *args, original=cmodule.ModuleCache.refresh, **kwargs):
    # Processes that start at the same time delete the same empty folders, and the slower one fails.
    try:
        return original(self, *args, **kwargs)
    except FileNotFoundError:
        return original(self, *args, **{**kwargs, "cleanup": False})


@contextlib.contextmanager
def _lock_ctx(lock_dir=None, keep_lock=False, **kwargs):
    # Theano keeps the lock after an error: all other processes would wait, as long as this one runs
    compilelock.get_lock(lock_dir=lock_dir, **kwargs)
    try:
        yield
    finally:
        if not keep_lock and compilelock.get_lock.n_lock:  # 0 where refreshing the lock failed
            compilelock.release_lock()


def _save_pkl(self):
    # The file is replaced in one step: a process that starts reads it without the lock, and deletes
    # the module if the file is incomplete.
    written = f"{self.key_pkl}.new"  # only the process that holds the lock writes it
    try:
        with open(written, "wb") as file:
            pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
        os.replace(written, self.key_pkl)
    except FileNotFoundError:
        pass  # The cache was cleared. Modules that this process has loaded stay usable.
    except pickle.PicklingError:
        for name in (written, self.key_pkl):
            with contextlib.suppress(FileNotFoundError):
                os.remove(name)
        raise


def _add_key(self, key, save_pkl=True):
    # The key may be there already, if the last attempt to add it raised.
    self.keys.add(key)
    if save_pkl:
        self.save_pkl()


def _check_key(self, key, key_pkl, original=cmodule.ModuleCache.check_key):
    if os.path.exists(key_pkl):  # the file is absent if the cache was cleared
        original(self, key, key_pkl)


def modules_of(function):
    """Return this machine, its CPU's flags, and pairs (node, file of its C module)."""
    vm = function.fn
    pairs = []
    for node, thunk in zip(getattr(vm, "nodes", ()), getattr(vm, "thunks", ())):
        module = getattr(getattr(thunk, "thunk", None), "module", None)
        if module is not None:
            pairs.append((node, module.__file__))
    return this_machine(), cmodule.GCC_compiler.march_flags, pairs


@contextlib.contextmanager
def given_modules(given):
    """Take the modules that `modules_of` has listed, while a function is made of the same nodes.

    Otherwise a process reads the keys of all modules in the cache before it looks for the first
    one, which takes seconds if there are thousands, and asks the compiler for this CPU's flags.
    Other modules are looked for, and compiled, as ever.
    """
    machine, march_flags, pairs = given
    if not pairs or machine != this_machine():
        yield
        return
    if cmodule.GCC_compiler.march_flags is None:
        cmodule.GCC_compiler.march_flags = march_flags
    if cmodule._module_cache is None:
        cc.get_module_cache(init_args={"do_refresh": False})
    before = _files.copy()
    try:
        _files.update((id(node), (node, file)) for node, file in pairs)
        yield
    finally:
        _files.clear()
        _files.update(before)


_files = {}  # id of a node -> (node, file of its module), within `given_modules`


def _take_given_modules():
    make_c_thunk, cmodule_key = op.Op.make_c_thunk, cc.CLinker.cmodule_key
    get_module, load = cmodule.ModuleCache._get_module, functools.lru_cache(None)(cmodule.dlimport)
    chosen = []  # the file for the node whose thunk is being made, or None

    @functools.wraps(make_c_thunk)
    def make_thunk_of_given(self, node, *args, **kwargs):
        if id(node) not in _files:
            return make_c_thunk(self, node, *args, **kwargs)
        chosen.append(_files[id(node)][1])
        try:
            return make_c_thunk(self, node, *args, **kwargs)
        finally:
            chosen.pop()

    @functools.wraps(cmodule_key)
    def key_of_given(self):
        cache = cc.get_module_cache()
        if not chosen or not os.path.exists(chosen[-1]):  # it is absent if the cache was cleared
            return cmodule_key(self)
        file = chosen[-1]
        key = ("given",), file  # much quicker than a key of the operation and all its types
        cache.entry_from_key[key] = file
        return key

    @functools.wraps(get_module)
    def get_given(self, name):
        if not chosen or name != chosen[-1] or name in self.module_from_name:
            return get_module(self, name)
        # Not stored in `module_from_name`: `refresh` asserts that it knows the keys of all there.
        return load(name)

    op.Op.make_c_thunk = make_thunk_of_given
    cmodule.ModuleCache._get_module = get_given
    cc.CLinker.cmodule_key = key_of_given
