"""``Model``: what models of Theano-MPI's contract have in common: settings, batches, iterations."""

from __future__ import annotations

from typing import Any

import numpy as np
import theano


class Model:
    """A model whose rule calls `train_iter` and `val_iter`; a subclass computes.

    Class attributes are settings: a key of `config` with the same name replaces one. A subclass
    has these methods, which are called in this order: `make_data`, `build`, `compile_iter_fns`,
    and for each batch `load`, then `train_batch` or `val_batch` for each of its parts.

    Attributes
    ----------
    statistics : list of shared variables
        Running statistics, which are no parameters: of batch normalization.
    shared_lr : shared variable
        The learning rate.

    Parameters
    ----------
    config : dict
        ``verbose``, ``rank``, ``size``, and settings.
    """

    n_epochs = 1
    batch_size = 32
    file_batch_size = 0  # rows that are loaded at once; 0 for `batch_size`
    learning_rate = 0.01
    lr_step = ()  # epochs after which the learning rate is divided by 10
    seed = 23455  # of the first parameters

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.verbose = bool(config.get("verbose", False))
        self.rank, self.size = int(config.get("rank", 0)), int(config.get("size", 1))
        for name, value in config.items():
            if self._is_setting(name):
                setattr(self, name, value)
        self.name = type(self).__name__
        self.file_batch_size = self.file_batch_size or self.batch_size
        if self.file_batch_size % self.batch_size:
            raise ValueError(
                f"file_batch_size must be a multiple of batch_size={self.batch_size}, got "
                f"{self.file_batch_size}."
            )
        self.n_subb = self.file_batch_size // self.batch_size
        self.epoch = 0
        self.current_info: list[float] = []
        self.statistics: list[Any] = []
        self.shared_lr = theano.shared(np.float32(self.learning_rate), "lr")
        self.data = self.make_data()
        self.data.batch_data(self.file_batch_size)
        self._share("train")
        self.data.shuffle_data("val")
        self.data.shard_data("val", self.rank, self.size)
        # The next batch and its sub-batch, to train and to validate with.
        self.current_t = self.subb_t = self.current_v = self.subb_v = 0
        self.build()

    def _is_setting(self, name: str) -> bool:
        value = getattr(type(self), name, None)
        return value is not None and not callable(value) and not isinstance(value, property)

    def _share(self, mode: str) -> None:
        self.data.shuffle_data(mode, common_seed=self.epoch)
        self.data.shard_data(mode, self.rank, self.size)

    def make_data(self) -> Any:
        """Return the data set."""
        raise NotImplementedError

    def build(self) -> None:
        """Set the parameters and the graphs."""
        raise NotImplementedError

    def compile_iter_fns(self, *args: Any, **kwargs: Any) -> None:
        """Compile the functions."""
        raise NotImplementedError

    def load(self, mode: str, number: int) -> None:
        """Load a batch of this rank."""
        raise NotImplementedError

    def train_batch(self, part: int) -> tuple[Any, Any]:
        """Update the parameters with a part of the loaded batch; return cost and error."""
        raise NotImplementedError

    def val_batch(self, part: int) -> tuple[Any, Any, Any]:
        """Return cost, error and top-5 error of a part of the loaded batch."""
        raise NotImplementedError

    def train_iter(self, count: int, recorder: Any) -> None:
        """Train with the next sub-batch; order and divide the data at the beginning of an epoch."""
        if self.current_t == self.subb_t == 0:
            self._share("train")
        self._load("train", self.current_t, self.subb_t, recorder)
        recorder.start()
        cost, error = self.train_batch(self.subb_t)
        recorder.end("calc")
        recorder.train_error(count, cost, error)
        self.subb_t = (self.subb_t + 1) % self.n_subb
        if self.subb_t == 0:
            # Asynchronous workers go on with another order after all of their batches.
            self.current_t = (self.current_t + 1) % max(self.data.n_batch_train, 1)

    def val_iter(self, count: int, recorder: Any) -> Any:
        """Validate with the next sub-batch."""
        self._load("val", self.current_v, self.subb_v, recorder)
        recorder.start()
        cost, error, top5 = self.val_batch(self.subb_v)
        recorder.end("calc")
        recorder.val_error(count, cost, error, top5)
        self.subb_v = (self.subb_v + 1) % self.n_subb
        if self.subb_v == 0:
            self.current_v = (self.current_v + 1) % max(self.data.n_batch_val, 1)

    def _load(self, mode, number, part, recorder):
        recorder.start()
        if part == 0:
            self.load(mode, number)
        recorder.end("wait")

    def reset_iter(self, mode: str) -> None:
        """Begin with the first batch again; mode is "train" or "val"."""
        if mode == "train":
            self.current_t = self.subb_t = 0
        else:
            self.current_v = self.subb_v = 0

    def adjust_hyperp(self, epoch: float) -> None:
        """Divide the learning rate by 10 after the epochs in `lr_step`.

        It is changed in proportion, so that a warm-up's factor is kept.
        """
        if int(epoch) in self.lr_step:
            self.scale_lr(0.1)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate."""
        self.shared_lr.set_value(np.float32(self.shared_lr.get_value() * factor))

    def cleanup(self) -> None:
        """End the loader, if there is one."""
        if self.data.para_load:
            self.data.para_load_close()


def refuse_cdd(model: Any, sync_type: str | None) -> None:
    """Refuse to exchange velocities of a model that updates its parameters itself.

    Raises
    ------
    ValueError
        For sync type cdd on several ranks.
    """
    chosen = sync_type or getattr(model, "sync_type", None)
    if chosen == "cdd" and model.size > 1:
        raise ValueError(
            f"{model.name} updates its parameters itself, so there are no velocities that sync "
            "type cdd could exchange. Take sync type avg: BSP_SYNC_TYPE=avg in a configuration "
            "file, or BSP(sync_type='avg')."
        )
