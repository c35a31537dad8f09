"""Tables of the demos, as text."""


def table(titles, rows):
    """Return a table as text: the first column is aligned left, all others right."""
    lines = [[str(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
        for first, *others in lines
    )
