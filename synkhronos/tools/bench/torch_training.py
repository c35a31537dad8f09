"""PyTorch training the networks of ``bench training``: the benchmark's side, and its script.

One process with some threads, or several in DistributedDataParallel over gloo, each with its part
of each minibatch. They begin with the same weights, pick the same rows, and average loss and
gradients over all rows, so that their losses are those of the other systems. The processes may run
another Python, without Synkhronos: as a script this file imports only `peers`, from its folder.
"""

import sys
import time
from pathlib import Path

import numpy as np

try:
    from synkhronos.tools.bench import peers
except ImportError:
    import peers

_clock = time.perf_counter


def write_setup(path, network, rows, batch, rate, momentum):
    """Write what the processes train: weights, rows, and the settings of the update."""
    weights = [param.get_value() for param in network.params]
    # Theano turns filters around.
    weights = [w[:, :, ::-1, ::-1] if w.ndim == 4 else w for w in weights]
    arrays = {f"p{number}": values for number, values in enumerate(weights)}
    settings = {"batch": batch, "rate": rate, "momentum": momentum}
    np.savez(path, x=rows[0], y=rows[1], **arrays, **settings)


class TorchTraining(peers.Peers):
    """Processes of PyTorch, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    python : str
        An interpreter that can import torch.
    n_ranks, threads : int
        Processes, and threads of each.
    name : str
        Of the network.
    setup : callable
        Takes a path, and writes there what `write_setup` writes.
    """

    def __init__(self, python, n_ranks, threads, name, setup):
        super().__init__("gloo", python, n_ranks)
        self.name = "PyTorch"
        self._threads, self._network, self._write = threads, name, setup

    def ask(self, what, count):
        """Take `count` steps and return their losses or times, of the first rank."""
        return dict(self._ask({"do": what, "count": count}))[0]

    def _commands(self, folder):
        self._write(folder / "setup.npz")
        script = str(Path(__file__).resolve())
        group = [str(self._n_ranks), str(self._threads), self._network, str(folder)]
        return [[self._python, script, str(rank), *group] for rank in range(self._n_ranks)]


def _networks(torch):
    """Return the forward passes: (rows, weights in the order of `networks`, buffers) -> scores."""
    functional = torch.nn.functional

    def dense(x, weights):
        return x @ next(weights) + next(weights)

    def mlp(x, weights, buffers):
        for _ in range(2):
            x = functional.relu(dense(x, weights))
        return dense(x, weights)

    def cnn(x, weights, buffers):
        for _ in range(2):
            x = functional.relu(functional.conv2d(x, next(weights), next(weights)))
            x = functional.max_pool2d(x, 2)
        x = functional.relu(dense(x.flatten(1), weights))
        return dense(x, weights)

    def convolve(x, weights, buffers, stride=1):
        filters = next(weights)
        x = functional.conv2d(x, filters, stride=stride, padding=filters.shape[-1] // 2)
        scale, shift = next(weights), next(weights)
        running = next(buffers), next(buffers)
        return functional.batch_norm(x, *running, scale, shift, training=True, eps=1e-4)

    def resnet(x, weights, buffers):
        x = functional.relu(convolve(x, weights, buffers))
        for n_out, stride in ((8, 1), (16, 2), (32, 2)):
            branch = functional.relu(convolve(x, weights, buffers, stride))
            branch = convolve(branch, weights, buffers)
            has_filters = x.shape[1] != n_out
            shortcut = convolve(x, weights, buffers, stride) if has_filters else x
            x = functional.relu(branch + shortcut)
        return dense(x.mean((2, 3)), weights)

    return {"mlp": mlp, "cnn": cnn, "resnet": resnet}


class _Trainer:
    """A process that trains: a method for each thing that the benchmark asks for."""

    def __init__(self, rank, n_ranks, threads, name, folder):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        self.rank, self._n_ranks, self._dist = rank, n_ranks, dist
        self.version = f"torch {torch.__version__}"
        setup = dict(np.load(Path(folder, "setup.npz")))
        self._batch = int(setup["batch"])
        self._rows, self._random = (setup["x"], setup["y"]), np.random.RandomState(3)
        weights = [setup[f"p{number}"] for number in range(len(setup)) if f"p{number}" in setup]
        if n_ranks > 1:
            where = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=n_ranks)
        self._model = _model(torch, name, weights)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=float(setup["rate"]), momentum=float(setup["momentum"])
        )
        if n_ranks > 1:
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        self._from_numpy = torch.from_numpy
        n_own = len(np.array_split(np.empty(self._batch), n_ranks)[rank])
        # Gradients are averaged over ranks; so weighted, that is their average over all rows.
        self._weight = n_own * n_ranks / self._batch
        self._buffers = [np.empty((n_own, *a.shape[1:]), a.dtype) for a in self._rows]

    def losses(self, count):
        """Return the losses of so many steps, with the rank."""
        return self.rank, [self._step() for _ in range(count)]

    def times(self, count):
        """Return the seconds of so many steps, with the rank."""
        seconds = []
        for _ in range(count):
            begin = _clock()
            self._step()
            seconds.append(_clock() - begin)
        return self.rank, seconds

    def close(self):
        """Leave the group."""
        if self._n_ranks > 1:
            self._dist.destroy_process_group()

    def _step(self):
        chosen = self._random.randint(0, len(self._rows[0]), self._batch)
        chosen = np.array_split(chosen, self._n_ranks)[self.rank]
        for array, buffer in zip(self._rows, self._buffers):
            np.take(array, chosen, axis=0, out=buffer, mode="clip")
        x, y = map(self._from_numpy, self._buffers)
        self._optimizer.zero_grad()
        loss = self._model(x, y) * self._weight
        loss.backward()
        self._optimizer.step()
        loss = loss.detach()
        if self._n_ranks > 1:
            self._dist.all_reduce(loss)
        return float(loss) / self._n_ranks


def _model(torch, name, weights):
    forward = _networks(torch)[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            arrays = [torch.from_numpy(np.ascontiguousarray(w)) for w in weights]
            self._weights = torch.nn.ParameterList(map(torch.nn.Parameter, arrays))
            # Of the batch normalization of each filter's output.
            sizes = [w.shape[0] for w in weights if w.ndim == 4 and name == "resnet"]
            for number, size in enumerate(size for size in sizes for _ in range(2)):
                self.register_buffer(f"running{number}", torch.zeros(size))

        def forward(self, x, y):
            buffers = (buffer for _, buffer in self.named_buffers())
            scores = forward(x, iter(self._weights), buffers)
            return torch.nn.functional.cross_entropy(scores, y.long())

    return Model()


if __name__ == "__main__":
    *_numbers, _name, _folder = sys.argv[1:]
    peers.serve(f"{_folder}/socket", lambda: _Trainer(*map(int, _numbers), _name, _folder))
