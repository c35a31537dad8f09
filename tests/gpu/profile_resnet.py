#!/usr/bin/env python3
"""Say where the seconds go until ResNet-50's first steps are done; each line when it is known.

    profile_resnet.py --devices cuda0                 once; after --limit it says where it was
    profile_resnet.py --devices cuda0 --times 2       again, with what the first has compiled
    profile_resnet.py --devices cpu --depth 26 --width 4 --size 32 --classes 10 --batch 8

"kernels and memory" is what making the thunks takes besides g++: NVRTC, and modules of the driver.
"""

import argparse
import collections
import contextlib
import faulthandler
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def say(what, seconds=None, more=""):
    """Print a line: seconds since the start, what was done, and how long it took."""
    took = "" if seconds is None else f"{seconds:8.2f} s"
    print(f"{time.monotonic() - BEGAN:7.1f}  {took:10}  {what:44}{more}", flush=True)


@contextlib.contextmanager
def timed(what, more=lambda: ""):
    """Say how long a block takes."""
    begin = time.monotonic()
    yield
    say(what, time.monotonic() - begin, more())


def wrap(owner, name, around):
    """Replace a function by ``around(function, *arguments)``."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(function, *args, **kwargs))


class Watch:
    """Times of Theano's phases, as it goes through them."""

    def __init__(self, least):
        from theano.compile.function_module import FunctionMaker
        from theano.gof import cmodule, opt, vm
        from theano.gof.op import Op

        self.least, self.compiler, self.modules = least, 0.0, 0
        self.told = time.monotonic()
        self.of_ops = collections.defaultdict(lambda: [0, 0.0])
        self._is_inside = False
        wrap(opt.SeqOptimizer, "apply", self._passes)
        wrap(FunctionMaker, "__init__", self._optimizer)
        wrap(cmodule.GCC_compiler, "compile_str", self._compile)
        wrap(vm.VM_Linker, "make_all", self._link)
        for kind in (Op, *subclasses(Op)):
            if "make_thunk" in vars(kind):
                wrap(kind, "make_thunk", self._thunk)

    def _passes(self, apply, optimizer, fgraph):
        if self._is_inside or len(fgraph.apply_nodes) < 100:
            return apply(optimizer, fgraph)
        self._is_inside = True
        wrapped = [each for each in optimizer if not hasattr(each, "is_watched")]
        for each in wrapped:
            each.is_watched = True
            wrap(each, "optimize", self._pass_of(each))
        try:
            return apply(optimizer, fgraph)
        finally:
            self._is_inside = False

    def _pass_of(self, optimizer):
        name = getattr(optimizer, "name", None) or type(optimizer).__name__

        def one(optimize, fgraph, *more):
            begin, before = time.monotonic(), len(fgraph.apply_nodes)
            result = optimize(fgraph, *more)
            seconds = time.monotonic() - begin
            if seconds >= self.least and before >= 100:
                say(f"    {name}", seconds, f"{before} -> {len(fgraph.apply_nodes)} operations")
            return result

        return one

    def _optimizer(self, init, maker, *args, **kwargs):
        begin = time.monotonic()
        if begin - self.told > 1:
            say("gradient and proof, or what came before the optimizer", begin - self.told)
        init(maker, *args, **kwargs)
        self.told = time.monotonic()
        nodes = maker.fgraph.apply_nodes
        if len(nodes) >= 100:
            count = collections.Counter(type(node.op).__name__ for node in nodes)
            most = ", ".join(f"{number} {name}" for name, number in count.most_common(12))
            say("optimizer", time.monotonic() - begin, f"{len(nodes)} operations: {most}")

    def _compile(self, compile_str, *args, **kwargs):
        begin = time.monotonic()
        try:
            return compile_str(*args, **kwargs)
        finally:
            self.compiler += time.monotonic() - begin
            self.modules += 1

    def _thunk(self, make_thunk, op, *args, **kwargs):
        begin = time.monotonic()
        try:
            return make_thunk(op, *args, **kwargs)
        finally:
            entry = self.of_ops[type(op).__name__]
            entry[0] += 1
            entry[1] += time.monotonic() - begin

    def _link(self, make_all, linker, *args, **kwargs):
        begin, before = time.monotonic(), (self.modules, self.compiler)
        self.of_ops.clear()
        result = make_all(linker, *args, **kwargs)
        self.told = time.monotonic()
        seconds, compiler = time.monotonic() - begin, self.compiler - before[1]
        if seconds >= self.least:
            say("thunks", seconds)
            say("    g++, waited for", compiler, f"{self.modules - before[0]} modules")
            say("    kernels and memory", seconds - compiler, f"{kernels()} kernels in the cache")
            slow = sorted(self.of_ops.items(), key=lambda pair: -pair[1][1])[:8]
            for name, (number, took) in slow:
                say(f"    {name}", took, f"{number} times, g++ among it")
        return result


def subclasses(kind):
    """Yield all classes that derive from a class."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def kernels():
    """Return how many kernels are in libgpuarray's cache."""
    import theano

    folder = getattr(theano.config.gpuarray, "cache_path", "")
    return sum(len(files) for _, _, files in os.walk(folder)) if folder else 0


def profile(arguments):
    """Train some steps, and say how long each phase takes."""
    with timed("import"):
        import numpy as np
        from benchmarks import resnet

        import synkhronos as synk
        from demos.resnet import models
        from synkhronos._host import library
        from synkhronos.extensions import train, update_rules
        from synkhronos.tools.bench import training
    watch = Watch(arguments.least)
    library.config.floatX = "float32"
    with timed("fork, and open the devices"):
        synk.fork(devices=arguments.devices)
    shape = {name: getattr(arguments, name) for name in ("depth", "width", "size", "classes")}
    if arguments.plain:
        models.has_cudnn = lambda: False
    with timed("graph"):
        network = resnet._network(shape)
    say(f"{sum(p.get_value(borrow=True).size for p in network.params):,} numbers in parameters")
    watch.told = time.monotonic()
    with timed("make_train_step, all of it"):
        step = train.make_train_step(
            [network.x, network.y], network.loss, network.params, update_rules.momentum,
            training.RATE, averages=network.averages, per_rank="normalization",
        )  # fmt: skip
    rows = [synk.data(array) for array in network.rows(2 * arguments.batch)]
    random = np.random.RandomState(3)

    def run():
        return float(step(*rows, batch=random.randint(0, 2 * arguments.batch, arguments.batch)))

    for name in ("first step, with cuDNN's choices", "second step", "third step"):
        losses = []
        with timed(name, lambda losses=losses: f"loss {losses[0]:.4f}"):
            losses.append(run())
    say(f"{kernels()} kernels in the cache, {watch.modules} modules compiled")
    seconds = []
    while len(seconds) < 3 or (sum(seconds) < arguments.seconds and len(seconds) < 100):
        begin = time.monotonic()
        run()
        seconds.append(time.monotonic() - begin)
    median = statistics.median(seconds)
    say("a step", median, f"{1e3 * median:.2f} ms, {arguments.batch / median:.1f} images/s")
    synk.close()


def main(argv=None):
    """Read the command line, and profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=lambda text: text.split(","), default=["cuda0"])
    add("--limit", type=float, default=150, help="seconds of a run, at most")
    add("--least", type=float, default=0.3, help="seconds of a pass that is told of")
    add("--times", type=int, default=1, help="runs, one after the other")
    for name, value in {"depth": 50, "width": 64, "size": 224, "classes": 1000}.items():
        add(f"--{name}", type=int, default=value)
    add("--batch", type=int, default=64)
    add("--seconds", type=float, default=3, help="of the steps that are timed")
    add("--plain", action="store_true", help="normalize by sums, not by cuDNN's operation")
    arguments = parser.parse_args(argv)
    if arguments.times > 1:
        given = [*(sys.argv[1:] if argv is None else argv), "--times", "1"]
        return max(
            subprocess.run([sys.executable, __file__, *given], check=False).returncode
            for _ in range(arguments.times)
        )
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    profile(arguments)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
