"""Objects that are shown as tables, as text and in a notebook."""

import html


class Tables:
    """Shows an object as tables.

    A derived class has::

        _headline()   a sentence
        _tables()     the title, the names of the columns and the rows of each table, all text
    """

    def __repr__(self):
        lines = [self._headline()]
        for title, columns, rows in self._tables():
            widths = [max(map(len, column)) for column in zip(columns, *rows)]
            lines += ["", title]
            for row in (columns, *rows):
                lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join(lines)

    def _repr_html_(self):
        def row(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        text = f"<p>{html.escape(self._headline())}</p>"
        for title, columns, rows in self._tables():
            text += f"<table><caption>{html.escape(title)}</caption><thead>{row(columns, 'th')}"
            body = "".join(row(cells, "td") for cells in rows)
            text += f"</thead><tbody>{body}</tbody></table>"
        return text
