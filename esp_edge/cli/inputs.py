"""Files and standard input: bytes, and text that must be UTF-8."""

from __future__ import annotations

import sys
from pathlib import Path

from esp_edge.errors import PromptError

__all__ = ["decode_utf8", "is_terminal", "read_bytes", "read_text", "without_line_end"]

STDIN = "-"


def is_terminal() -> bool:
    """Whether somebody types on stdin; False when it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_bytes(source: str | Path) -> tuple[bytes, str]:
    """Everything in a file, or on stdin for ``-``, and a name for messages.

    Raises:
        PromptError: it cannot be read.
    """
    try:
        if str(source) == STDIN:
            return b"" if sys.stdin is None else sys.stdin.buffer.read(), "stdin"
        return Path(source).read_bytes(), str(source)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise PromptError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_text(source: str | Path) -> str:
    """Text of a file, or of stdin for ``-``.

    Raises:
        PromptError: it cannot be read or is not UTF-8.
    """
    return decode_utf8(*read_bytes(source))


def decode_utf8(data: bytes, name: str) -> str:
    """Text of UTF-8 bytes, a leading byte order mark dropped.

    Raises:
        PromptError: names what was read and the first bad byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise PromptError(f"{name} must be UTF-8, but byte {error.start} is 0x{bad:02x}; convert it first") from None


def without_line_end(text: str) -> str:
    """The text without the one line end that editors and ``echo`` put behind it."""
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
