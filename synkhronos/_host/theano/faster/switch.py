"""Switch the changes of this folder on, in a process or in a function.

    compile_cache                          processes find what others have compiled        always
    graph_checks                           the optimizer checks graphs in less time        always
    compile_ahead, compiled_header         compilers that run at the same time             (1)
    elementwise, sums, pooling,            rewrites of functions that run C code on CPUs   (2)
    convolutions

(1) ``SYNKHRONOS_COMPILERS`` is the number of compilers at once; with 0 Theano compiles by itself.
(2) They have the tag `CPU`, which ``THEANO_FLAGS=optimizer_excluding=synkhronos_cpu`` and
``mode.excluding("synkhronos_cpu")`` turn off; each has a name too, such as ``synkhronos_pooling``.
"""

import os

import theano
from theano import gof
from theano.compile.mode import optdb

from synkhronos._host.theano.faster import compile_ahead, compile_cache, graph_checks
from synkhronos._host.theano.faster.convolutions import copy_row_by_row
from synkhronos._host.theano.faster.elementwise import Vectorize, simplify_power
from synkhronos._host.theano.faster.pooling import pool_contiguously
from synkhronos._host.theano.faster.sums import interleave

VARIABLE = "SYNKHRONOS_COMPILERS"
CPU = "synkhronos_cpu"


def install() -> None:
    """Change how Theano compiles in this process."""
    compile_cache.fix_cache_keys()
    graph_checks.install()
    number = number_of_compilers()
    if number != 0:
        compile_ahead.install(number)


def number_of_compilers():
    """Return the number of compilers that may run at once; None if the environment has none."""
    text = os.environ.get(VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(
            f"the environment variable {VARIABLE} is the number of C++ compilers that run at once, "
            f"or 0 to compile as Theano does: a whole number, but it is {text!r}"
        )
    return int(text) if text else None


def for_cpus(mode):
    """Return a mode with the rewrites for CPUs, if it compiles C code; else the mode itself."""
    optimizer, linker = mode.provided_optimizer, mode.linker
    # Modes such as DebugMode, which have other linkers, are to watch Theano's own operations.
    compiles = (
        bool(theano.config.cxx)
        and isinstance(linker, (gof.vm.VM_Linker, gof.OpWiseCLinker, gof.CLinker))
        and getattr(linker, "c_thunks", None) is not False
    )
    if compiles and isinstance(optimizer, gof.Query) and "fast_run" in optimizer.include:
        return mode.including(CPU)
    return mode


# These come after Theano's simplifications, and before it fuses elementwise expressions.
for _name, _rewrite in {
    "squares": simplify_power,
    "sums": interleave,
    "pooling": pool_contiguously,
    "convolutions": copy_row_by_row,
}.items():
    optdb.register(
        f"synkhronos_{_name}", gof.opt.in2out(_rewrite, name=f"synkhronos_{_name}"), 48.8, CPU
    )
# This comes after all other rewrites, which don't know its operations. Its tags are those of
# functions that reduce over the ranks, and of all functions of ranks on CPUs.
optdb.register("synkhronos_vectorize", Vectorize(), 202, "synkhronos", CPU)
