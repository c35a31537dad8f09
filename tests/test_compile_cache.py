"""Theano finds in its cache what any process has compiled."""

COMPILE = """
import numpy as np
import theano
import theano.tensor as T
from theano.gof import cmodule

import synkhronos._theano

compiled = []
compile_str = cmodule.GCC_compiler.compile_str
cmodule.GCC_compiler.compile_str = lambda *args: compiled.append(1) or compile_str(*args)
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
