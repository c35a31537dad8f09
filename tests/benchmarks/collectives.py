"""The time of each collective beside Open MPI and gloo, and of the parameters of a model.

See ``synkhronos bench collectives``. Times of other systems are those of their slowest rank; their
ranks sleep while others compute. Then follow one all_reduce of all parameters of ResNet-50 beside
one of a vector of as many numbers, collectives of many small variables at once, and a scatter of a
Data beside parallel copies.
"""

import contextlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks import groups
from synkhronos.comm.mpi import folders
from synkhronos.launch import CannotLaunch, mpirun
from synkhronos.tools import turns
from synkhronos.tools.bench import collectives, frame, options, programs

_MANY = 1000  # small variables
_SMALL = 1e-3  # gigabytes of the small Data to scatter


def add_arguments(parser):
    """Add the options of this benchmark."""
    collectives.add_arguments(parser)
    options.add(parser, "--gigabytes", options.positive, 1.0, "size of the Data to scatter")
    parser.add_argument(
        "--no-models", action="store_true", help="leave out ResNet-50, many variables and the Data"
    )
    groups.add_python(parser)


def measure(args, report):
    """Measure all, and show the tables."""
    with contextlib.ExitStack() as stack:
        peers = []
        for name, start in (("Open MPI", _open_mpi), ("gloo", _gloo)):
            with groups.telling(name, report):
                peers.append(_Peer(name, stack.enter_context(start(args)), args.ranks))
        collectives.measure_beside(peers, args, report)
        report.results["versions"] = {peer.name: peer.version for peer in peers}
        if not args.no_models:
            with frame.session(args.ranks, args.device):
                _measure_models(peers, args, report)


plot = collectives.plot


class _Peer:
    """Another library, as `collectives.measure_beside` takes it."""

    def __init__(self, name, group, n_ranks):
        self.name, self._group, self._n_ranks = name, group, n_ranks
        version = group.ask("hello")
        self.version = version["version"] if isinstance(version, dict) else version

    def times(self, collective, nbytes, count):
        """Return the seconds of the slowest rank in each repetition."""
        answers = self._group.ask_all("times", collective=collective, nbytes=nbytes, count=count)
        return np.max(answers, axis=0).tolist()

    def check(self, collective):
        """Return whether the results are what they should be on all ranks."""
        examples = []
        for rank in range(self._n_ranks):
            found = collectives.example(collective, rank, self._n_ranks)
            examples.append([None if each is None else each.tolist() for each in found])
        return all(self._group.ask_all("check", collective=collective, examples=examples))


@contextlib.contextmanager
def _open_mpi(args):
    groups.find("mpi4py", [])
    try:
        line = [mpirun.find(), *["--allow-run-as-root"] * (os.geteuid() == 0)]
    except CannotLaunch as error:
        raise frame.Failed(str(error)) from None
    line += ["--oversubscribe", "-n", str(args.ranks)]
    line += programs.interpreter("from benchmarks.programs import open_mpi; open_mpi.main()")
    with contextlib.ExitStack() as stack:
        given = groups.environment(OMP_NUM_THREADS="1")
        environment = stack.enter_context(folders.of_mpirun(given))
        program = programs.Program("Open MPI", line, environment)
        yield stack.enter_context(groups.Group([program]))


@contextlib.contextmanager
def _gloo(args):
    python = groups.find("torch", args.peer_python)
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        ranks = [
            groups.program("gloo", python, "gloo", rank, args.ranks, folder, **settings)
            for rank in range(args.ranks)
        ]
        with groups.Group(ranks) as group:
            yield group


def _measure_models(peers, args, report):
    """Measure what is larger than one array, and show it."""
    seconds = 10 * args.seconds
    report.results["model"] = model = _measure_resnet50(peers, seconds)
    ms = {name: 1e3 * found["median"] for name, found in model["seconds"].items()}
    table = frame.Table(f"all_reduce of ResNet-50, {model['n_numbers']:,} numbers", "ms", first=48)
    report.show(table.head)
    for name, found in ms.items():
        report.show(table.line(f"  {name}", f"{found:.2f}"))
    report.results["many"] = many = _measure_many(_MANY, seconds)
    table = frame.Table(f"{_MANY:,} variables of 10 numbers", "us", "as a vector", first=48)
    report.show(table.head)
    us = {name: f"{1e6 * found['median']:.1f}" for name, found in many["seconds"].items()}
    for name in ("all_reduce", "broadcast", "gather"):
        report.show(table.line(f"  {name}", us[name], us[f"{name} of a vector"]))
    for name, size in (("small scatter", _SMALL), ("scatter", args.gigabytes)):
        report.results[name] = found = _measure_scatter(args.ranks, size, seconds)
        scatter, copy = (found["seconds"][name] for name in ("scatter", "memcpy"))
        table = frame.Table(f"a Data of {found['bytes'] / 1e9:.3g} GB", "ms", "GB/s", first=48)
        report.show(table.head)
        for title, took in (("scatter", scatter), ("parallel memcpy", copy)):
            speed = found["bytes"] / took / 1e9
            report.show(table.line(f"  {title}", f"{1e3 * took:.3f}", f"{speed:.2f}"))


def resnet50_shapes():
    """Return the shapes of the 161 trained arrays of ResNet-50, 25,557,032 numbers in all.

    53 convolutions without bias, each with the scale and shift of a batch normalization, and the
    weights and biases of a dense layer to 1000 classes. The first convolution is 7x7 from 3 to 64
    channels. Four stages of 3, 4, 6 and 3 blocks follow, of width 64, 128, 256 and 512. A block has
    convolutions of 1x1 to its width, 3x3, and 1x1 to 4 times its width; the first block of a stage
    has another of 1x1 beside them, from its input to its output.
    """
    shapes = []

    def convolution(n_out, n_in, size):
        shapes.extend([(n_out, n_in, size, size), (n_out,), (n_out,)])

    convolution(64, 3, 7)
    n_in = 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(n_blocks):
            convolution(width, n_in, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, n_in, 1)
            n_in = 4 * width
    return [*shapes, (n_in, 1000), (1000,)]


def _measure_resnet50(peers, seconds):
    """Time one all_reduce of ResNet-50's parameters, and one of a vector of as many numbers."""
    import synkhronos as synk
    from synkhronos._host import library

    params = [library.shared(np.zeros(shape, "float32")) for shape in resnet50_shapes()]
    size = sum(param.get_value(borrow=True).size for param in params)
    flat = library.shared(np.zeros(size, "float32"))
    measured = turns.Turns(seconds)
    measured.add_calls(
        {
            f"{len(params)} variables at once": lambda: synk.all_reduce(params, op="sum"),
            "one vector": lambda: synk.all_reduce(flat, op="sum"),
        }
    )
    for peer in peers:
        name = f"one vector, {peer.name}"
        measured.add(name, lambda n, peer=peer: peer.times("all_reduce", 4 * size, n))
    figures = measured.take_all("ResNet-50")
    return {"n_variables": len(params), "n_numbers": size, "seconds": figures}


def _measure_many(n_variables, seconds):
    """Time collectives of many small variables at once, and of a vector of as many numbers."""
    import synkhronos as synk
    from synkhronos._host import library

    variables = [library.shared(np.ones(10, "float32")) for _ in range(n_variables)]
    vector = library.shared(np.ones(10 * n_variables, "float32"))
    measured = turns.Turns(seconds)
    for name in ("all_reduce", "broadcast", "gather"):
        call = getattr(synk, name)
        measured.add_calls({name: lambda call=call: call(variables)})
        measured.add_calls({f"{name} of a vector": lambda call=call: call(vector)})
    return {"n_variables": n_variables, "seconds": measured.take_all("many variables")}


def _measure_scatter(n_ranks, gigabytes, seconds):
    """Time a scatter of a Data, and parallel copies of its parts to memory whose pages exist."""
    import synkhronos as synk
    from synkhronos._host import library

    data = synk.data(dtype="float32", shape=(int(gigabytes * 1e9) // 4 // n_ranks * n_ranks,))
    data.data.fill(1)
    vector = library.shared(np.zeros(1, "float32"))
    sources = np.split(data.data, n_ranks)
    targets = [np.full_like(source, 0) for source in sources]
    # So many in a row that the time to start threads does not count.
    in_a_row = range(max(1, int(3e8 // data.data.nbytes)))

    def copy(target, source):
        for _ in in_a_row:
            np.copyto(target, source)

    def scatter():
        for _ in in_a_row:
            synk.scatter(vector, data)

    with ThreadPoolExecutor(n_ranks) as pool:
        measured = turns.Turns(seconds)
        # NumPy copies without the interpreter's lock, so threads are enough.
        copies = {"memcpy": lambda: list(pool.map(copy, targets, sources))}
        measured.add_calls({"scatter": scatter, **copies})
        figures = measured.take_all("scatter")
    medians = {name: found["median"] / len(in_a_row) for name, found in figures.items()}
    return {"bytes": data.data.nbytes, "seconds": medians}
