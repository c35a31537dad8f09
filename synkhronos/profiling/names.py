"""How tables and pictures show names, in which there may be anything."""

import re

MOST = 80  # characters


def shown(name) -> str:
    """Return a name on one line: what can't be printed is escaped, and a long name cut.

    Its end stays, too: names of functions that were given none end with the line that made them.
    """
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(name)
    )
    if len(text) <= MOST:
        return text
    return f"{text[: MOST // 2 - 3]}...{text[-MOST // 2 :]}"


def without_folder(name) -> str:
    """Return a name; of one that is an absolute path and a line, the file's own name and line."""
    text = str(name)
    return text.rpartition("/")[2] if re.fullmatch(r"/.*:\d+", text, re.DOTALL) else text
