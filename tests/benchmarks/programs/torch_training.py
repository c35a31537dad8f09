"""PyTorch training a network of ``bench training``, in one process or several.

One process with some threads, or several in DistributedDataParallel over gloo, each with its part
of each minibatch. They begin with the weights of the other systems, pick the same rows, and average
loss and gradients over all rows. On CUDA they compute in single precision, as Theano does: without
TF32.
"""

import functools
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.programs.serving import seconds_of_each, serve

functional = torch.nn.functional


def _networks():
    """Return the forward passes: (rows, weights in the order of `networks`, buffers) -> scores."""

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

    def convolve(x, weights, buffers, stride=1, epsilon=1e-4):
        filters = next(weights)
        x = functional.conv2d(x, filters, stride=stride, padding=filters.shape[-1] // 2)
        scale, shift = next(weights), next(weights)
        running = next(buffers), next(buffers)
        return functional.batch_norm(x, *running, scale, shift, training=True, eps=epsilon)

    def resnet(x, weights, buffers):
        x = functional.relu(convolve(x, weights, buffers))
        for n_out, stride in ((8, 1), (16, 2), (32, 2)):
            branch = functional.relu(convolve(x, weights, buffers, stride))
            branch = convolve(branch, weights, buffers)
            has_filters = x.shape[1] != n_out
            shortcut = convolve(x, weights, buffers, stride) if has_filters else x
            x = functional.relu(branch + shortcut)
        return dense(x.mean((2, 3)), weights)

    def demo(x, weights, buffers, n_convolutions, *n_blocks):
        """The networks of ``demos/resnet``: convolutions of each block, blocks of each stage."""
        convolved = functools.partial(convolve, weights=weights, buffers=buffers, epsilon=1e-5)
        if len(n_blocks) == 4:
            x = functional.max_pool2d(functional.relu(convolved(x, stride=2)), 3, 2, padding=1)
        else:
            x = functional.relu(convolved(x))
        for stage, n in enumerate(n_blocks):
            for block in range(n):
                stride = 2 if stage and not block else 1
                branch = functional.relu(convolved(x, stride=stride))
                for _ in range(n_convolutions - 2):
                    branch = functional.relu(convolved(branch))
                branch = convolved(branch)
                has_filters = not block and (stage or n_convolutions == 3)
                shortcut = convolved(x, stride=stride) if has_filters else x
                x = functional.relu(branch + shortcut)
        return dense(x.mean((2, 3)), weights)

    return {"mlp": mlp, "cnn": cnn, "resnet": resnet, "demo": demo}


class Trainer:
    """A process that trains: a method for each thing that the benchmark asks for."""

    def __init__(self, rank, n_ranks, threads, device, name, folder):
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._device = torch.device(device)
        self._rank, self._n_ranks = rank, n_ranks
        setup = dict(np.load(Path(folder, "setup.npz")))
        self._batch = int(setup["batch"])
        self._rows, self._random = (setup["x"], setup["y"]), np.random.RandomState(3)
        weights = [setup[f"p{number}"] for number in range(len(setup)) if f"p{number}" in setup]
        self._model = Model(name, weights).to(self._device)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=float(setup["rate"]), momentum=float(setup["momentum"])
        )
        if n_ranks > 1:
            where = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=n_ranks)
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        n_own = len(np.array_split(np.empty(self._batch), n_ranks)[rank])
        # Gradients are averaged over ranks; so weighted, that is their average over all rows.
        self._weight = n_own * n_ranks / self._batch
        self._buffers = [np.empty((n_own, *a.shape[1:]), a.dtype) for a in self._rows]

    def losses(self, count):
        """Return the losses of so many steps."""
        return [self._step() for _ in range(count)]

    def times(self, count):
        """Return the seconds of so many steps."""
        return seconds_of_each(self._step, count)

    def _step(self):
        chosen = self._random.randint(0, len(self._rows[0]), self._batch)
        chosen = np.array_split(chosen, self._n_ranks)[self._rank]
        for array, buffer in zip(self._rows, self._buffers):
            np.take(array, chosen, axis=0, out=buffer, mode="clip")
        x, y = (torch.from_numpy(each).to(self._device) for each in self._buffers)
        self._optimizer.zero_grad()
        loss = self._model(x, y) * self._weight
        loss.backward()
        self._optimizer.step()
        loss = loss.detach()
        if self._n_ranks > 1:
            dist.all_reduce(loss)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the update, too, is in the time of a step
        return float(loss) / self._n_ranks


class Model(torch.nn.Module):
    """A network, with weights of its own."""

    def __init__(self, name, weights):
        super().__init__()
        name, *numbers = name.split("-")  # as of demo-3-3-4-6-3
        self._forward, self._numbers = _networks()[name], [*map(int, numbers)]
        arrays = [torch.from_numpy(np.ascontiguousarray(w)) for w in weights]
        self._weights = torch.nn.ParameterList(map(torch.nn.Parameter, arrays))
        # Of the batch normalization of each filter's output.
        sizes = [w.shape[0] for w in weights if w.ndim == 4 and name in ("resnet", "demo")]
        for number, size in enumerate(size for size in sizes for _ in range(2)):
            self.register_buffer(f"running{number}", torch.zeros(size))

    def forward(self, x, y):
        """Return the loss."""
        buffers = (buffer for _, buffer in self.named_buffers())
        scores = self._forward(x, iter(self._weights), buffers, *self._numbers)
        return functional.cross_entropy(scores, y.long())


if __name__ == "__main__":
    *numbers, device, name, folder = sys.argv[1:]
    rank, n_ranks, threads, *cores = map(int, numbers)
    if cores:
        os.sched_setaffinity(0, cores)
    serve(Trainer(rank, n_ranks, threads, device, name, folder))
    if dist.is_initialized():
        dist.destroy_process_group()
