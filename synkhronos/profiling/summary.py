"""The tables of a profile, as text."""

import numpy as np

from synkhronos._wording import one_line
from synkhronos.profiling.timeline import NAMES
from synkhronos.profiling.views import table


def text(calls, ranks, master_rank, dropped) -> str:
    """Return a table of all functions and collectives, and one of all ranks.

    `calls` is the table of a `Timeline`, `ranks` are the names of the ranks, and `dropped` has the
    number of parts of calls that each had no room for.
    """
    lines = [_headline(calls, len(ranks), dropped)]
    if len(calls):
        lines += ["", "milliseconds of a call (medians; of the ranks, the lowest and highest)"]
        lines += table(_functions(calls, master_rank))
        lines += ["", "seconds of all calls", *table(_ranks(calls, ranks))]
    return "\n".join(lines)


def _headline(calls, n_ranks, dropped):
    text = f"{len({*calls['call'].tolist()})} calls on {n_ranks} rank{'s' * (n_ranks > 1)}"
    if len(calls):
        seconds = (calls["begin"] + calls["seconds"]).max() - calls["begin"].min()
        text += f" in {seconds:.3f} s"
    if any(dropped):
        text += f"; {sum(dropped):,} more parts of later calls had no room"
    return text


def _functions(calls, master_rank):
    """Return a line for each function or collective, sorted by total time, longest first."""
    lines = [("", "calls", "raised", "total s", "ms", *NAMES, "MB")]
    found = [calls[calls["function"] == number] for number in {*calls["function"].tolist()}]
    masters = [each[each["rank"] == master_rank] for each in found]
    for position in sorted(range(len(found)), key=lambda i: -masters[i]["seconds"].sum()):
        each, master = found[position], masters[position]
        ranks = [each[each["rank"] == rank] for rank in {*each["rank"].tolist()}]
        parts = [_span([1e3 * np.median(rank[name]) for rank in ranks]) for name in NAMES]
        line = [one_line(master["name"][0]), len(master), master["raised"].sum()]
        line += [f"{master['seconds'].sum():.3f}", _digits(1e3 * np.median(master["seconds"]))]
        moved = sum(np.median(rank["bytes"]) for rank in ranks)
        lines.append((*line, *parts, _digits(1e-6 * moved)))
    return lines


def _ranks(calls, names):
    """Return a line for each rank."""
    lines = [("", "calls", *NAMES, "MB")]
    for rank, name in enumerate(names):
        own = calls[calls["rank"] == rank]
        parts = [f"{own[part].sum():.3f}" for part in NAMES]
        lines.append((one_line(name), len(own), *parts, _digits(1e-6 * own["bytes"].sum())))
    return lines


def _digits(number):
    return f"{number:.{3 if number < 1 else 2 if number < 100 else 0}f}"


def _span(numbers):
    lowest, highest = _digits(min(numbers)), _digits(max(numbers))
    return lowest if lowest == highest else f"{lowest}-{highest}"
