"""The elements of a JSON array, one after the other: a file of gigabytes is never in memory."""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

CHUNK = 1 << 20  # bytes read at a time, at first
BLANK = " \t\r\n"


class _Text:
    """What is read of a file and not yet used: ``text[at:]``."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def more(self, size: int = 0) -> bool:
        """Read on; return False at the end of the file."""
        data = b"" if self.ended else self.file.read(size or CHUNK)
        self.ended = not data
        self.text, self.at = self.text[self.at :] + self.decoder.decode(data, final=not data), 0
        return not self.ended

    def next(self) -> str:
        """Return the next character that is no blank, which stays; "" at the end."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in BLANK:
                    return self.text[self.at]
                self.at += 1
            if not self.more():
                return ""

    def expect(self, wanted: str) -> str:
        """Take the next character, which is one of ``wanted``."""
        found = self.next()
        if not found or found not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)}, got {self.text[self.at : self.at + 20] or 'the end'!r}")
        self.at += 1
        return found


def elements(file: BinaryIO, longest: int) -> Iterator[object]:
    """Yield every element of the array that ``file`` (bytes, UTF-8) is, decoded.

    Example:
        >>> import io
        >>> list(elements(io.BytesIO(b'[{"text": "a"}, 2]'), 100))
        [{'text': 'a'}, 2]

    Raises:
        ValueError: no JSON, more behind the array, an element of more than ``longest`` characters.
        RecursionError: brackets in brackets, thousands of them.
    """
    text, decode = _Text(file), json.JSONDecoder().raw_decode
    text.expect("[")
    if text.next() == "]":
        text.at += 1
    else:
        while True:
            yield _element(text, decode, longest)
            if text.expect(",]") == "]":
                break
            text.next()
    if text.next():
        raise ValueError(f"expected nothing behind the array, got {text.text[text.at : text.at + 20]!r}")


def _element(text: _Text, decode: Callable[[str, int], tuple[object, int]], longest: int) -> object:
    """Read on until it can be decoded and something follows: 12 may be the beginning of 123."""
    size = CHUNK
    while True:
        try:
            record, end = decode(text.text, text.at)
            error = None
        except json.JSONDecodeError as failed:
            error, end = f"{failed.msg}, got {text.text[failed.pos : failed.pos + 20]!r}", len(text.text)
        if end - text.at > longest:
            raise ValueError(
                f"expected an element of at most {longest:,} characters, got more ({error or 'it is complete'})"
            )
        if error is None and end < len(text.text):
            break
        if not text.more(size):
            if error:
                raise ValueError(error)
            break
        size *= 2  # of a long element, so that decoding it anew takes no longer than reading it
    text.at = end
    return record
