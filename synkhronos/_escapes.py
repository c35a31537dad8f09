"""Escapes in place of characters that a terminal obeys."""

import unicodedata

_COMMANDS = {"Cc", "Cs", "Zl", "Zp"}  # control characters, surrogates, line separators


def printable(text, kept="\n\t"):
    """Return a text with escapes in place of characters that a terminal takes for commands.

    For messages that quote a file, or what another process has written.
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(letter)[1:-1] if _is_command(letter) and letter not in kept else letter
        for letter in text
    )


def _is_command(letter):
    """Return whether a terminal obeys a character, or writes the text after it from the right."""
    kind = unicodedata.category(letter)
    turns = kind == "Cf" and unicodedata.bidirectional(letter) not in ("AN", "BN")
    return turns or kind in _COMMANDS
