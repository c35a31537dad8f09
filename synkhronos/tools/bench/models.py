"""A model's parameters against one vector, many small variables, and scatter against copies."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

REPETITIONS = 5  # at least
MANY = 1000  # small variables
SMALL = 1e-3  # gigabytes of the small Data to scatter

_clock = time.perf_counter


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


def measure_model(peers, seconds):
    """Time one all_reduce of ResNet-50's parameters, and one of a vector of as many numbers."""
    import synkhronos as synk
    from synkhronos._host import library

    params = [library.shared(np.zeros(shape, "float32")) for shape in resnet50_shapes()]
    size = sum(param.get_value(borrow=True).size for param in params)
    flat = library.shared(np.zeros(size, "float32"))
    calls = {
        "variables": lambda: synk.all_reduce(params, op="sum"),
        "flat": lambda: synk.all_reduce(flat, op="sum"),
    }
    for peer in peers:
        calls[peer.name] = lambda peer=peer: peer.times("all_reduce", 4 * size, 2)
    times = _take_turns(calls, seconds)
    return {"n_variables": len(params), "n_numbers": size, "seconds": times}


def measure_scatter(n_ranks, gigabytes, seconds):
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
        calls = {
            "scatter": scatter,
            # NumPy copies without the interpreter's lock, so threads are enough.
            "memcpy": lambda: list(pool.map(copy, targets, sources)),
        }
        times = _take_turns(calls, seconds)
    seconds = {name: each / len(in_a_row) for name, each in times.items()}
    return {"bytes": data.data.nbytes, "seconds": seconds}


def measure_many(n_variables, seconds):
    """Time collectives of many small variables at once, and of a vector of as many numbers."""
    import synkhronos as synk
    from synkhronos._host import library

    variables = [library.shared(np.ones(10, "float32")) for _ in range(n_variables)]
    vector = library.shared(np.ones(10 * n_variables, "float32"))
    calls = {}
    for name, call in (
        ("all_reduce", synk.all_reduce),
        ("broadcast", synk.broadcast),
        ("gather", synk.gather),
    ):
        calls[name] = lambda call=call: call(variables)
        calls[f"{name} of a vector"] = lambda call=call: call(vector)
    return {"n_variables": n_variables, "seconds": _take_turns(calls, seconds)}


def _take_turns(calls, seconds):
    """Return the median time of each call.

    Where a call returns times of each rank, its time is that of the slowest rank's last.
    """
    times = {name: [] for name in calls}
    end = _clock() + seconds
    repetition = -1  # the first is not timed
    while repetition < REPETITIONS or _clock() < end:
        for name, call in calls.items():
            begin = _clock()
            answer = call()
            took = _clock() - begin
            if isinstance(answer, list) and isinstance(answer[0], list):
                took = max(ranks[-1] for ranks in answer)
            if repetition >= 0:
                times[name].append(took)
        repetition += 1
    return {name: statistics.median(each) for name, each in times.items()}


def model_text(model):
    """Return the results of :func:`measure_model` as text."""
    ms = {name: 1e3 * seconds for name, seconds in model["seconds"].items()}
    ratio = ms["variables"] / ms["flat"]
    lines = [f"all_reduce of ResNet-50, {model['n_numbers']:,} numbers"]
    lines.append(f"  {model['n_variables']} variables at once   {ms['variables']:8.2f} ms")
    lines.append(f"  one vector             {ms['flat']:8.2f} ms   variables / vector {ratio:.2f}x")
    for name in [name for name in ms if name not in ("variables", "flat")]:
        ratio = ms[name] / ms["variables"]
        lines.append(f"  one vector, {name:10} {ms[name]:8.2f} ms   {name} / synk {ratio:.2f}x")
    return "\n".join(lines)


def scatter_text(results):
    """Return the results of :func:`measure_scatter` as text."""
    scatter, copy = (results["seconds"][name] for name in ("scatter", "memcpy"))
    size = results["bytes"] / 1e9
    return (
        f"scatter of a Data of {size:.3g} GB\n"
        f"  scatter                {1e3 * scatter:8.3f} ms {size / scatter:8.2f} GB/s\n"
        f"  parallel memcpy        {1e3 * copy:8.3f} ms {size / copy:8.2f} GB/s   "
        f"scatter / memcpy {scatter / copy:.2f}x"
    )


def many_text(results):
    """Return the results of :func:`measure_many` as text."""
    us = {name: 1e6 * seconds for name, seconds in results["seconds"].items()}
    lines = [f"{results['n_variables']:,} variables of 10 numbers, at once; a vector of as many"]
    for name in [name for name in us if f"{name} of a vector" in us]:
        lines.append(f"  {name:12} {us[name]:10.1f} us {us[name + ' of a vector']:10.1f} us")
    return "\n".join(lines)
