"""Theano finds in its cache what any process has compiled, and waits for those that compile."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof import cc, cmodule, compilelock

from synkhronos._host.theano import pickling  # it mends the cache
from synkhronos._host.theano.faster import compile_cache

COMPILE = """
import numpy as np
import theano
import theano.tensor as T
from theano.gof import cmodule

import synkhronos._host.theano.compiling

compiled = []
compile_str = cmodule.GCC_compiler.compile_str
cmodule.GCC_compiler.compile_str = lambda *a, **k: compiled.append(1) or compile_str(*a, **k)
x, w = T.fmatrix("x"), theano.shared(np.ones((5, 3), "float32"))
# DimShuffle has its C code in a file; Dot22, Alloc and Shape have no parameters.
loss = T.nnet.softmax(T.dot(x, w) + T.alloc(np.float32(2), x.shape[0], 3)).T.sum()
function = theano.function([x], [loss, T.grad(loss, w)], mode="FAST_RUN")
assert any("DimShuffle" in str(node) for node in function.maker.fgraph.toposort())
print(len(compiled))
"""


@pytest.mark.slow("compiles the same functions in two processes")
def test_another_process_compiles_nothing_again(script):
    for seed in "1", "2":  # of the hash of strings, which differs between processes
        done = script(COMPILE, env={"PYTHONHASHSEED": seed})
    assert done.stdout.strip() == "0"


@pytest.fixture
def keys():
    """The keys of a module that is in the cache, and in use."""
    x = T.fvector("x")
    theano.function([x], x + 1, mode=theano.Mode(linker="c", optimizer=None))
    known = cc.get_module_cache().module_hash_to_key_data.values()
    return next(each for each in known if all(key[0] for key in each.keys))


def test_keys_can_be_read_while_they_are_written(keys, monkeypatch):
    """A process that starts deletes modules whose keys it can't read, and takes no lock."""
    keys.save_pkl()  # another process may have added keys of its own
    original, read = pickle.dump, []

    def dump(*args):
        with open(keys.key_pkl, "rb") as file:
            read.append(pickle.load(file))
        original(*args)

    monkeypatch.setattr(pickle, "dump", dump)
    keys.save_pkl()
    assert [each.keys for each in read] == [keys.keys]
    with open(keys.key_pkl, "rb") as file:
        assert pickle.load(file).keys == keys.keys
    left = [name for name in os.listdir(os.path.dirname(keys.key_pkl)) if "key.pkl." in name]
    assert left == []


def test_a_cache_that_is_cleared_while_it_is_used(keys, tmp_path):
    gone = cmodule.KeyData({*keys.keys}, "hash", str(tmp_path / "gone" / "key.pkl"), keys.entry)
    for key in keys.keys:
        gone.add_key(key)
        cc.get_module_cache().check_key(key, gone.key_pkl)
    assert gone.keys == keys.keys


def test_an_empty_folder_that_another_process_deletes_first(tmp_path, monkeypatch):
    gone = tmp_path / "tmp_empty"
    gone.mkdir()
    lock = compilelock.lock

    def lock_late(*args, **kwargs):
        gone.rmdir()
        lock(*args, **kwargs)

    monkeypatch.setattr(compilelock, "lock", lock_late)
    cmodule.ModuleCache(str(tmp_path))  # a process that starts cleans up
    assert not gone.exists()
    assert compilelock.get_lock.n_lock == 0


def test_an_error_while_the_lock_is_held_releases_it():
    with pytest.raises(KeyError), compilelock.lock_ctx():
        assert compilelock.get_lock.n_lock == 1
        raise KeyError
    assert compilelock.get_lock.n_lock == 0
    assert not os.path.exists(compilelock.get_lock.lock_dir)


def test_a_lock_that_is_soon_free_is_waited_for_in_silence(tmp_path, caplog):
    folder = tmp_path / "lock_dir"
    folder.mkdir()
    (folder / "lock").write_text(f"{os.getppid()}_123_{compilelock.hostname}")
    threading.Timer(0.3, shutil.rmtree, [folder]).start()
    compilelock.lock(str(folder))
    assert (folder / "lock").read_text().startswith(f"{os.getpid()}_")
    assert not caplog.records
    compilelock.Unlocker(str(folder)).unlock()


def test_the_lock_of_a_process_that_is_gone_is_taken(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = tmp_path / "lock_dir"
    folder.mkdir()
    (folder / "lock").write_text(f"{gone.pid}_123_{compilelock.hostname}")
    monkeypatch.setattr(
        compilelock.get_lock, "unlocker", compilelock.Unlocker(str(folder)), raising=False
    )
    compilelock.lock(str(folder))
    assert (folder / "lock").read_text().startswith(f"{os.getpid()}_")
    compilelock.get_lock.unlocker.unlock()
    assert not folder.exists()


def test_a_process_that_ends_leaves_the_lock_that_another_has_just_made(tmp_path):
    folder = tmp_path / "lock_dir"
    folder.mkdir()  # its owner is about to write its name into a file there
    compilelock.Unlocker(str(folder)).unlock()
    assert folder.exists()


TAKE_TURNS = """
import os, sys, time
from theano.gof import compilelock

folder, inside = sys.argv[1:]
for _ in range(20):
    compilelock.get_lock(lock_dir=folder)
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails where two have the lock
    time.sleep(0.001)
    os.remove(inside)
    compilelock.release_lock()
compilelock.get_lock(lock_dir=folder)
print("done", flush=True)
os.close(1)
os._exit(0)  # as if killed: the others find the lock of a process that is gone
"""


@pytest.mark.slow("four processes take the lock of the cache twenty times each")
def test_one_process_at_a_time_has_the_lock(tmp_path):
    arguments = [sys.executable, "-c", TAKE_TURNS, tmp_path / "lock_dir", tmp_path / "inside"]
    processes = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    end = time.monotonic() + 200
    while [each for each in processes if each.poll() is None]:  # reap all: a zombie has the lock
        assert time.monotonic() < end
        time.sleep(0.02)
    ended = [process.communicate() for process in processes]
    assert [out for out, _ in ended] == ["done\n"] * 4, ended
    assert not any("wrong" in err or "Refreshing" in err for _, err in ended), ended


@pytest.fixture
def keys_asked(monkeypatch):
    """Record the nodes for which a key of the cache is computed."""
    asked, original = [], cc.CLinker.cmodule_key_

    def cmodule_key_(self, fgraph, *args, **kwargs):
        asked.append(fgraph)
        return original(self, fgraph, *args, **kwargs)

    monkeypatch.setattr(cc.CLinker, "cmodule_key_", cmodule_key_)
    return asked


def test_a_function_that_is_sent_takes_the_modules_that_it_has(keys_asked, monkeypatch):
    x, w = T.fvector("x"), theano.shared(np.ones(3, "float32"), "w")
    mode = theano.Mode(linker="cvm", optimizer=None)
    function = theano.function([x], (x + 1).sum(), updates=[(w, w + x)], mode=mode)
    function.name = "f"

    def sent():
        del keys_asked[:]
        variables = {}
        functions, _ = pickling.load(pickling.dump({"f": (function, None)}, {}, {0: w}), variables)
        made = functions["f"][0]
        assert made(np.arange(3, dtype="float32")) == 6
        assert variables[0].get_value().tolist() == [1, 2, 3]
        files = [thunk.thunk.module.__file__ for thunk in made.fn.thunks]
        assert files == [thunk.thunk.module.__file__ for thunk in function.fn.thunks]
        return len(keys_asked)

    assert sent() == 0
    monkeypatch.setattr(socket, "gethostname", lambda: "another" + os.urandom(4).hex())
    assert sent() > 0  # files of another machine are not taken


def test_a_process_that_has_taken_modules_can_read_all_keys(monkeypatch):
    """Theano does so before it compiles, and when it ends; its cache asserted that they are new."""
    monkeypatch.setattr(cmodule, "_module_cache", None)
    x = T.fvector("x")
    function = theano.function([x], x + 2, mode=theano.Mode(linker="cvm", optimizer=None))
    given = compile_cache.modules_of(function)
    monkeypatch.setattr(cmodule, "_module_cache", None)  # as in a worker
    with compile_cache.given_modules(given):
        function.maker.create([None] * len(function.input_storage), trustme=True)
    cmodule._module_cache._on_atexit()
    made = function.maker.create([None] * len(function.input_storage), trustme=True)
    assert made(np.ones(2, "float32")).tolist() == [3, 3]
    assert [thunk.thunk.module for thunk in made.fn.thunks] == [
        thunk.thunk.module for thunk in function.fn.thunks
    ]


def test_modules_that_are_gone_are_looked_for(keys_asked):
    x = T.fvector("x")
    function = theano.function([x], x + 1, mode=theano.Mode(linker="cvm", optimizer=None))
    machine, flags, pairs = compile_cache.modules_of(function)
    gone = [(node, file + "-gone") for node, file in pairs]
    del keys_asked[:]
    with compile_cache.given_modules((machine, flags, gone)):
        made = function.maker.create([None] * len(function.input_storage), trustme=True)
    assert len(keys_asked) == len(pairs) > 0
    assert made(np.ones(2, "float32")).tolist() == [2, 2]
    with compile_cache.given_modules((machine, flags, pairs)):
        pass
    del keys_asked[:]
    function.maker.create([None] * len(function.input_storage), trustme=True)
    assert len(keys_asked) == len(pairs)
