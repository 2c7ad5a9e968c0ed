"""Text of a model in C source: the only ways in are these three.

A name in an ONNX file may hold anything: the end of a comment (spelled with line splices and
trigraphs, if need be), quotes, newlines. What of it reaches a source or a header does so as an
escaped literal, as a comment of harmless characters, or not at all.
"""

from __future__ import annotations

import re

from apq_tvm.errors import BuildError

# A star between blanks, as in "2 * batch", neither opens nor closes a comment.
_ODD_IN_COMMENT = re.compile(r"(?!(?<= )\* )[^A-Za-z0-9_.,:=()\[\]/+ -]")


def _utf8(text: str) -> bytes:
    """Bytes of any text, lone surrogates too, which UTF-8 has no place for."""
    return text.encode("utf-8", "surrogatepass")


def literal(text: str) -> str:
    """Write a C string literal: printable ASCII kept, other UTF-8 bytes as octal escapes.

    A NUL is written as C0 80, as in Java's modified UTF-8: it would end the string, and two names
    could become one.
    """
    out = []
    for byte in _utf8(text).replace(b"\0", b"\xc0\x80"):
        char = chr(byte)
        plain = 32 <= byte < 127 and char not in '"\\?'
        out.append(char if plain else f"\\{byte:03o}")
    return '"' + "".join(out) + '"'


def comment(text: str) -> str:
    """Write text that is to stand inside a comment: odd characters as in a URL, ``%0A``."""
    return _ODD_IN_COMMENT.sub(lambda odd: "".join(f"%{byte:02X}" for byte in _utf8(odd[0])), text)


def identifier(name: str) -> str:
    """Return `name` if it is a C identifier.

    Raises
    ------
    BuildError
        It is none.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise BuildError(f"kernel name {name!r} is not a C identifier")
    return name
