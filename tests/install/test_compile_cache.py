"""Theano finds in its cache what any process has compiled, and waits for those that compile."""

import os
import pickle
import shutil
import subprocess
import threading

import pytest
import theano
import theano.tensor as T
from theano.gof import cc, cmodule, compilelock

import synkhronos._host.theano.host  # noqa: F401  mends the cache

COMPILE = """
import numpy as np
import theano
import theano.tensor as T
from theano.gof import cmodule

import synkhronos._host.theano.host

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


def test_a_lock_that_is_soon_free_is_waited_for_in_silence(tmp_path, caplog):
    folder = tmp_path / "lock_dir"
    folder.mkdir()
    (folder / "lock").write_text(f"{os.getppid()}_123_{compilelock.hostname}")
    threading.Timer(0.3, shutil.rmtree, [folder]).start()
    compilelock.lock(str(folder))
    assert (folder / "lock").read_text().startswith(f"{os.getpid()}_")
    assert not caplog.records


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
