"""ResNet-50 of ``demos/resnet`` on ranks beside PyTorch's, in images per second.

Both have the same shapes, begin with the same weights, pick the same random minibatches and train
by gradient descent with momentum; the first losses of one rank are compared. PyTorch has one
process, on the first device, and on CUDA no TF32. "Ready" is the time until the first steps are
done: Theano compiles.
"""

import functools
import json
import sys
import types
from pathlib import Path

import numpy as np

from benchmarks import groups
from benchmarks import training as beside_torch
from synkhronos._machine import devices
from synkhronos._wording import count
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, networks, options, programs, training

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where demos are
# Relative, of the losses of the first steps, which are not timed. An update amplifies roundings:
# 53 normalizations follow one another.
_TOLERANCES = np.array([1e-3, 3e-2])
_SHAPE = {"depth": 50, "width": 64, "size": 224, "classes": 1000}


def add_arguments(parser):
    """Add the options of this benchmark."""
    what = "one for each rank, such as cuda0,cuda1 (default: cpu)"
    options.add(parser, "--devices", options.devices_of_ranks, None, what)
    options.add(parser, "--depth", options.count, _SHAPE["depth"], "layers, as of the demo")
    options.add(parser, "--width", options.count, _SHAPE["width"], "channels of the first stage")
    options.add(parser, "--size", options.count, _SHAPE["size"], "pixels, both ways")
    options.add(parser, "--classes", options.count, _SHAPE["classes"], "classes")
    options.add(parser, "--batch", options.count, 64, "rows of a minibatch, on all ranks")
    options.add(parser, "--seconds", options.positive, 10.0, "time for each system")
    groups.add_python(parser)


def measure(args, report):
    """Measure both, and show a line for each."""
    from demos.resnet.models import DEPTHS

    if args.depth not in DEPTHS:
        raise frame.Refused(f"--depth {args.depth} is none of {', '.join(map(str, DEPTHS))}")
    n_convolutions, n_blocks = DEPTHS[args.depth]
    names = args.devices or ["cpu"]
    job = training.TrainingTask("-".join(map(str, ["demo", n_convolutions, *n_blocks])), args.batch)
    shape = {name: getattr(args, name) for name in _SHAPE}
    serve = "from benchmarks import resnet; resnet.serve()"
    line = programs.interpreter(serve, json.dumps([names, job, shape]))
    ours = f"{count(len(names), 'rank')}, {names[0]}"
    found = report.results["systems"] = {}
    report.results.update(devices=names, batch=args.batch, **shape)
    running = {ours: programs.Program(ours, line, groups.environment())}
    with groups.telling("PyTorch", report):
        python = groups.find("torch", args.peer_python)
        given = python, job, 1, devices.usable_cores(), names[0], _network(shape)
        running[f"PyTorch, {names[0]}"] = beside_torch.trainers(*given)
    table = frame.Table("", "ms/step", "images/s", "ready", first=24)
    title = "ResNet-{depth} of {width} channels, {classes} classes, {size} x {size} pixels"
    report.show(f"{title.format(**shape)}; minibatches of {args.batch}, float32\n{table.head}")
    for label, program in running.items():
        # Not in turns: a GPU's memory may not be enough for both.
        with program as system:
            began = turns.clock()
            losses = system.ask("losses", count=len(_TOLERANCES))
            ready = turns.clock() - began
            steps = turns.Turns(args.seconds, most=1000)
            steps.add(label, lambda n, system=system: system.ask("times", count=n))
            seconds = steps.take_all(label)[label]["median"]
        found[label] = {"seconds": seconds, "images": args.batch / seconds, "ready": ready}
        found[label]["losses"] = losses
        cells = f"{1e3 * seconds:.1f}", f"{args.batch / seconds:.1f}", f"{ready:.0f} s"
        report.show(table.line(f"  {label}", *cells))
    # At the end, when the times are known. Each of several ranks normalizes with its own rows.
    one, *others = (np.array(each["losses"]) for each in found.values())
    for other in others if len(names) == 1 else ():
        if not np.all(np.abs(other / one - 1) < _TOLERANCES):
            raise frame.Failed(f"PyTorch does not train as one rank: {other}, not {one}")


def serve():
    """Be the ranks: train as the argument says, whenever the benchmark asks for steps."""
    names, job, shape = json.loads(sys.argv[1])
    job = training.TrainingTask(*job)
    networks.NETWORKS[job.name] = functools.partial(_network, shape)
    with training.stepping("one", names, job) as step:
        programs.serve(training.Trainer(step, job))


def _network(shape):
    """Return the demo's network, as one of `networks`."""
    from demos.resnet import common
    from synkhronos._host import library

    library.config.floatX = "float32"
    graph = common.Graph(types.SimpleNamespace(**shape, seed=1), shape["classes"])

    def rows(number):
        random = np.random.RandomState(2)
        x = random.standard_normal((number, 3, shape["size"], shape["size"])).astype("float32")
        return x, random.randint(0, shape["classes"], number).astype("int32")

    graph.averages, graph.rows = graph.statistics, rows
    return graph
