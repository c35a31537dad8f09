"""Types of command line options, for all benchmarks."""

import argparse


def count(text):
    """Return the integer that a text gives, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def counts(text):
    """Return the integers of a list such as ``1,2,4``, each at least 1."""
    return [count(word.strip()) for word in text.split(",")]


def whole(text):
    """Return the integer that a text gives, at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return int(text)


def positive(text):
    """Return the number above zero that a text gives."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def sizes(text):
    """Return the numbers of bytes in a list such as ``1K,2.5M,1G``; K is 1024."""
    found = []
    for word in text.split(","):
        number, unit = word.strip().upper().rstrip("IB"), 1
        if number[-1:] in ("K", "M", "G"):
            number, unit = number[:-1], 1024 ** (1 + "KMG".index(number[-1]))
        try:
            size = float(number) * unit
        except ValueError:
            size = 0
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no number of bytes: expected some float32, such as 4, 1K or 2.5M"
            )
        found.append(int(size))
    return found


def device(text):
    """Return the name of a device, such as ``cuda0``."""
    from synkhronos._machine.devices import DEVICE_NAME, EXAMPLES

    if not DEVICE_NAME.fullmatch(text.strip()):
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is no device, {EXAMPLES}")
    return text.strip()


def devices_of_ranks(text):
    """Return the devices in a list such as ``cuda0,cuda1``."""
    return [device(name) for name in text.split(",")]


def names(known, what):
    """Return a function that parses a list of names such as ``a,b``, all of them known."""

    def parse(text):
        found = [name.strip() for name in text.split(",")]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is no {what}; there are: {', '.join(known)}"
                )
        return found

    return parse


def add_session(parser):
    """Add the options of a session on this machine."""
    add(parser, "--ranks", count, 2, "ranks of the session")
    what = "of each rank, such as cpu (default: a GPU for each if there are GPUs, else cpu)"
    add(parser, "--device", device, None, what)


def add(parser, name, kind, default, what):
    """Add an option that takes numbers or names, and say its default in the help."""
    shown = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else default
    metavar = {count: None, positive: "S", device: "NAME"}.get(kind, "LIST")
    text = what if default is None else f"{what} ({shown})"
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
