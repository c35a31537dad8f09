"""Objects that are shown as tables, as text and in a notebook."""

import html

from synkhronos._wording import printable


class Tables:
    """Shows an object as tables.

    A derived class has::

        _headline()   a sentence
        _tables()     the title, the names of the columns and the rows of each table, all text

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
        return printable(self._headline()), tables

    def __repr__(self):
        headline, tables = self._printable()
        lines = [headline]
        for title, columns, rows in tables:
            widths = [max(map(len, column)) for column in zip(columns, *rows)]
            lines += ["", title]
            for row in (columns, *rows):
                lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join(lines)

    def _repr_html_(self):
        def row(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        headline, tables = self._printable()
        text = f"<p>{html.escape(headline)}</p>"
        for title, columns, rows in tables:
            text += f"<table><caption>{html.escape(title)}</caption><thead>{row(columns, 'th')}"
            body = "".join(row(cells, "td") for cells in rows)
            text += f"</thead><tbody>{body}</tbody></table>"
        return text
