"""The one way in for a file that a stranger may have sent: bounded before any of its bytes is held.

Every reader of a run, a policy, a lock, a trace, a snapshot, a link or a configuration begins here. Only regular files
are opened: a named pipe would block the process, and a device has no end. Packed bytes are counted before they are
unpacked into memory. `files.py` has the records of such files; this file knows none of them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator

from explorer.errors import UnreadableFile, message_of

LARGEST_RATIO = 200
"""Unpacked bytes of a packed file at most, times its packed bytes. Run files and traces stay below 40."""
GZIP = zlib.MAX_WBITS | 16
_PIECE_BYTES = 16 * 1024
"""Packed bytes that are unpacked at once, to 16 MiB at most."""
_LARGEST_CONFIGURATION = 8 * 1024**2
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_start(path: str | os.PathLike[str], n_bytes: int) -> bytes:
    """The first bytes of a regular file, at most `n_bytes`. Raises UnreadableFile for any other kind of file."""
    return _read(path, n_bytes, whole=False, hint="")


def read_file(path: str | os.PathLike[str], most_bytes: int, *, hint: str = "") -> bytes:
    """The bytes of a regular file. Raises UnreadableFile for any other kind of file, and for more than `most_bytes`."""
    return _read(path, most_bytes, whole=True, hint=hint)


def _read(path: str | os.PathLike[str], most_bytes: int, *, whole: bool, hint: str) -> bytes:
    try:
        # Without O_NONBLOCK the call waits until another process writes into a named pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UnreadableFile(f"{path} cannot be read: {_reason(error)}.", hint=hint) from error
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            kind = _KINDS.get(stat.S_IFMT(info.st_mode), "no file")
            raise UnreadableFile(
                f"{path} cannot be read: it is {kind}, and only regular files are opened.",
                hint=hint or "Write its content into a file first.",
            )
        data = b""
        if info.st_size <= most_bytes or not whole:
            with os.fdopen(handle, "rb", closefd=False) as file:
                data = file.read(most_bytes + 1 if whole else most_bytes)  # one more shows that it has grown
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {_reason(error)}.", hint=hint) from error
    finally:
        os.close(handle)
    if whole and max(info.st_size, len(data)) > most_bytes:
        raise UnreadableFile(f"{path} has more than {most_bytes:,} bytes, the most that are read.", hint=hint)
    return data


def read_text(path: str | os.PathLike[str], most_bytes: int, *, hint: str = "") -> str:
    """The UTF-8 text of a regular file. Raises UnreadableFile."""
    try:
        return read_file(path, most_bytes, hint=hint).decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path} is not text: byte {error.start} is not UTF-8.") from error


def read_configuration(path: str | os.PathLike[str]) -> dict[str, object]:
    """The object in a JSON file that describes a model. Raises UnreadableFile."""
    text = read_text(path, _LARGEST_CONFIGURATION)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path} is no JSON: {message_of(error)}.") from error
    if not isinstance(values, dict):
        raise UnreadableFile(f"{path} holds a {type(values).__name__}, and a configuration is an object of names.")
    return values


def unpack(packed: bytes, most_bytes: int, name: str, *, wbits: int = zlib.MAX_WBITS) -> bytearray:
    """The bytes that zlib or gzip packed. Raises UnreadableFile that begins with `name`.

    At most `most_bytes` and LARGEST_RATIO times the packed bytes are unpacked; they are counted before they are held.
    """
    most = min(most_bytes, LARGEST_RATIO * len(packed))
    n_bytes = sum(map(len, _pieces(packed, most, name, wbits)))
    if n_bytes > most:
        raise UnreadableFile(
            f"{name} of {len(packed):,} packed bytes unpacks to more than {most:,} bytes, the most that are read.",
            hint="Export it again where it was made.",
        )
    whole = bytearray(n_bytes)
    start = 0
    for piece in _pieces(packed, most, name, wbits):
        whole[start : start + len(piece)] = piece
        start += len(piece)
    return whole


def _pieces(packed: bytes, most: int, name: str, wbits: int) -> Iterator[bytes]:
    """Unpacked pieces, at most one piece beyond `most` bytes. Raises UnreadableFile."""
    decompressor = zlib.decompressobj(wbits)
    try:
        for start in range(0, len(packed), _PIECE_BYTES):
            piece = decompressor.decompress(packed[start : start + _PIECE_BYTES])
            most -= len(piece)
            yield piece
            if most < 0:
                return
    except zlib.error as error:
        raise UnreadableFile(f"{name} is damaged: {message_of(error)}.", hint="Export or copy it again.") from error
    if not decompressor.eof:
        raise UnreadableFile(f"{name} is damaged: its end is missing.", hint="Export or copy it again.")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "it is a socket, and only regular files are opened"
    return (isinstance(error, OSError) and error.strerror) or message_of(error)
