"""Theano finds in its cache what any process has compiled, and waits for those that compile."""

import os
import shutil
import subprocess
import threading

from theano.gof import compilelock

COMPILE = """
import numpy as np
import theano
import theano.tensor as T
from theano.gof import cmodule

import synkhronos._theano

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


def test_another_process_compiles_nothing_again(script):
    for seed in "1", "2":  # of the hash of strings, which differs between processes
        done = script(COMPILE, env={"PYTHONHASHSEED": seed})
    assert done.stdout.strip() == "0"


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
