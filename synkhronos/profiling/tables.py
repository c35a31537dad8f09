"""Objects that are shown as tables, as text and in a notebook."""

import html

from synkhronos._wording import printable


def as_html(headline, tables, notes=()):
    """Return tables as HTML: a headline, titles, columns, rows of text, and lines after them."""

    def row(cells, tag):
        shown = (f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{''.join(shown)}</tr>"

    text = f"<p>{html.escape(headline)}</p>"
    for title, columns, rows in tables:
        caption = f"<caption>{html.escape(title)}</caption>" if title else ""
        body = "".join(row(cells, "td") for cells in rows)
        text += f"<table>{caption}<thead>{row(columns, 'th')}</thead><tbody>{body}</tbody></table>"
    lines = html.escape("\n".join(notes))
    return f"{text}<pre>{lines}</pre>" if lines else text


class Tables:
    """Shows an object as tables.

    A derived class has::

        _headline()   a sentence
        _tables()     the title, the names of the columns and the rows of each table, all text
        _notes()      the lines after the tables, if any

    Tables without rows are left out. The text may come from other users and machines: control
    characters are taken out.
    """

    def _printable(self):
        def cells(line):
            return [printable(cell, kept="") for cell in line]

        tables = [
            (printable(title, kept=""), cells(columns), list(map(cells, rows)))
            for title, columns, rows in self._tables()
            if rows
        ]
        return printable(self._headline()), tables, list(map(printable, self._notes()))

    def _notes(self):
        return []

    def __repr__(self):
        headline, tables, notes = self._printable()
        lines = [headline]
        for title, columns, rows in tables:
            widths = [max(map(len, column)) for column in zip(columns, *rows)]
            lines += ["", title]
            for row in (columns, *rows):
                lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join([*lines, "", *notes] if notes else lines)

    def _repr_html_(self):
        return as_html(*self._printable())
