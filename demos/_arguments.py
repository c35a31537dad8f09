"""The command lines of the demos: types that refuse bad values, and common arguments."""

import argparse
import math
from pathlib import Path


def number_type(kind, is_valid, wanted):
    """Return a type of argument: valid numbers of a kind, int or float."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return convert


positive = number_type(int, lambda value: value >= 1, "a whole number of at least 1")
seed = number_type(int, lambda value: 0 <= value < 2**32, f"a whole number from 0 to {2**32 - 1}")
above_zero = number_type(float, lambda value: 0 < value < math.inf, "a number above zero")


def names(text):
    """Return the names in a text that commas separate."""
    return text.split(",")


def output_file(text):
    """Return the path of a file; refuse one that can't be written now, not after the training."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can't be written: {error.strerror}") from None
    if not existed:
        path.unlink()
    return path


def picture(text):
    """Return the path of a file that can be written, in a format that Matplotlib can draw."""
    from matplotlib.figure import Figure

    suffixes = sorted(Figure().canvas.get_supported_filetypes())
    if Path(text).suffix[1:].lower() not in suffixes:
        raise argparse.ArgumentTypeError(f"must end in one of .{', .'.join(suffixes)}, got {text}")
    return output_file(text)


def add_rank_arguments(parser):
    """Add --ranks and --devices, for `demos._shared.fork`."""
    add = parser.add_argument
    add("--ranks", type=positive, metavar="N", help="how many (one for each GPU or else core)")
    add("--devices", type=names, metavar="A,B", help="one for each rank, as in cpu,cpu")


def add_common_arguments(parser, parallel=True):
    """Add --seed and --plot, and for a demo with ranks --ranks and --devices."""
    if parallel:
        add_rank_arguments(parser)
    add = parser.add_argument
    add("--seed", type=seed, default=1, metavar="N", help="of all random numbers (1)")
    add("--plot", type=picture, metavar="FILE.png", help="draw the curves of training, and times")


def parse_lesson(argv, docstring):
    """Read the command line of a lesson; the first line of its docstring is the description."""
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    add_rank_arguments(parser)
    return parser.parse_args(argv)
