"""Parts that all demos use: the fork, logs of runs, progress bars, precision."""

import sys
from dataclasses import dataclass, field

import numpy as np
from threadpoolctl import threadpool_info

import synkhronos as synk


def fork(arguments, program):
    """Fork as --ranks and --devices say; return the number of ranks, or exit with a message."""
    try:
        return synk.fork(arguments.ranks, devices=arguments.devices)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        sys.exit(f"{program}: {error}")


@dataclass
class Log:
    """The measurements of one training run."""

    label: str
    batch: float = np.nan  # rows in a minibatch
    is_serial: bool = False
    losses: list = field(default_factory=list)  # training loss of each epoch
    accuracies: list = field(default_factory=list)  # accuracy after each epoch; may stay empty
    seconds: list = field(default_factory=list)  # one for each minibatch
    test_accuracy: float = np.nan  # at the end, if there are test rows
    values: list = field(default_factory=list)  # of the parameters, at the end; may stay empty

    @property
    def milliseconds(self):
        """The median over the minibatches: other programs on the machine disturb it least."""
        return 1e3 * float(np.median(self.seconds))

    @property
    def rows_per_second(self):
        return 1e3 * self.batch / self.milliseconds


def replicas_equal(variables):
    """Return whether all ranks have the same bits in each shared variable."""
    return all(
        copy.tobytes() == copies[0].tobytes()
        for copies in map(synk.gather, variables)
        for copy in copies
    )


def float_type():
    """Return the floatX to compute with: float32, unless the user has chosen one.

    It is read from the user's flags, because Keras overwrites Theano's configuration.
    """
    import theano  # imported here, because the lessons run with PyTensor too
    from theano import configparser

    flags = configparser.parse_config_string(configparser.THEANO_FLAGS)
    file = configparser.theano_raw_cfg
    chosen = flags.get("floatX") or file.get("global", "floatX", fallback=None)
    if chosen is None and theano.config.floatX != "float32":
        print("Computing with floatX=float32; set floatX in THEANO_FLAGS to have another.")
    return chosen or "float32"


def progress(rows=None, **settings):
    """Return a progress bar that disappears at its end; no bar is drawn into a file."""
    from tqdm import tqdm  # imported here, because the lessons don't need tqdm

    return tqdm(rows, leave=False, mininterval=0.5, disable=None, **settings)


def usable_threads():
    """Return the number of threads that BLAS uses without a limit."""
    return max([pool["num_threads"] for pool in threadpool_info()], default=1)


def count(number, what):
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"
