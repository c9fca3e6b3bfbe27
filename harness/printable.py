"""Text that somebody else chose, made fit for a terminal, a pipe and a file."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The text on one line, with escapes for what does not show as itself.

    That is control characters, with which a text can play with the terminal, marks that turn the direction of writing,
    and lone surrogates, which no encoding can write. Tabs and all kinds of spaces stay.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """The same for text of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def _shown(character: str) -> str:
    if character.isprintable() or character == "\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
