"""A careful reader for the header of a GGUF file, and the check made before llama.cpp sees the file.

llama.cpp aborts the whole process on some broken files (``GGML_ASSERT``). So the header is read here first, in plain
Python, without trusting one number in it: nothing is allocated from a count that the file's size does not cover, and
whatever the bytes are, the only exceptions are :class:`ModelFileError` and :class:`UnsupportedModelError`, each with
one line naming file, cause and fix.

Layout of a file (little-endian, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)::

    "GGUF"  version:u32  n_tensors:u64  n_kv:u64
    n_kv      x  key:str  type:u32  value            str = length:u64 bytes, array = type:u32 count:u64 values
    n_tensors x  name:str  n_dims:u32  ne:u64...  type:u32  offset:u64        offset counts from the data section
    padding to the alignment, then the data section
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from esp_edge.errors import ConfigError, ModelFileError
from esp_edge.models import gguf_checks

__all__ = [
    "ArrayInfo",
    "GGUFHeader",
    "TensorInfo",
    "embedding_tensor",
    "memory_estimate",
    "preflight",
    "quant_name",
    "read_array",
    "read_header",
    "read_parts",
]

# Written out instead of taken from the gguf package, whose older versions do not know the newest types.
# ggml type -> (name, elements of a block, bytes of a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98)},
    **{21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56), 20: ("IQ4_NL", 32, 18)},
    **{23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36)},
}
# general.file_type -> name; the gaps are types llama.cpp has dropped
FILE_TYPE_RUNS = {
    0: "F32 F16 Q4_0 Q4_1",
    7: "Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS",
    24: "IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16",
    36: "TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0",
}
FILE_TYPES: dict[int, str] = {
    first + index: name for first, run in FILE_TYPE_RUNS.items() for index, name in enumerate(run.split())
}
GUESSED_FILE_TYPE = 1024  # llama.cpp's flag: the type was not in the file

U8, I8, U16, I16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)  # value types
SCALARS: dict[int, struct.Struct] = {
    **{U8: struct.Struct("<B"), I8: struct.Struct("<b"), U16: struct.Struct("<H"), I16: struct.Struct("<h")},
    **{UINT32: struct.Struct("<I"), INT32: struct.Struct("<i")},
    **{UINT64: struct.Struct("<Q"), INT64: struct.Struct("<q")},
    **{FLOAT32: struct.Struct("<f"), FLOAT64: struct.Struct("<d"), BOOL: struct.Struct("<?")},
}

MAGIC = b"GGUF"
MAX_ARRAY, MAX_TEXT, MAX_KEY = 1 << 30, 1 << 26, (1 << 16) - 1  # elements, bytes, bytes
MAX_NAME, MAX_DIMS = 64, 4  # GGML_MAX_NAME includes the closing NUL
MAX_ELEMENTS = (1 << 63) - 1
SMALL_ARRAY = 4096  # longer arrays, and all of the tokenizer's, stay in the file
MIN_KV_BYTES, MIN_TENSOR_BYTES = 14, 24
WINDOW = 1 << 20
U32, U64 = SCALARS[UINT32], SCALARS[UINT64]

SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: such as ``token_embd.weight``.
        shape: ggml order, the row length first: (n_embd, n_vocab) for the token embedding.
        ggml_type: number of the ggml type; type_name: its name, such as ``Q4_1``.
        offset: bytes from the start of the file.
        n_bytes: size of the data.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A metadata array left in the file; :func:`read_array` fetches it.

    Attributes:
        path: the file.
        element_type: number of the GGUF value type.
        count: elements.
        offset, n_bytes: where the elements lie in the file (strings with their length prefixes).
    """

    path: Path
    element_type: int
    count: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything a GGUF file says before its data.

    Attributes:
        path: the file.
        version: 2 or 3.
        alignment: of the tensor data, in bytes.
        metadata: key -> int, float, bool, str, list (at most 4096 numbers or strings) or :class:`ArrayInfo`
            (longer ones and every ``tokenizer.*`` array).
        value_types: key -> number of the GGUF value type.
        tensors: name -> place, in file order; of this file only, see :func:`read_parts`.
        data_offset: where the tensor data starts, in bytes.
        file_size: in bytes.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    value_types: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    data_offset: int
    file_size: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, or an empty text."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def hyperparameter(self, name: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<name>``."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary; 0 without one."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.count if isinstance(tokens, ArrayInfo) else 0


def _fail(path: Path, cause: str, fix: str) -> ModelFileError:
    return ModelFileError(f"{gguf_checks.one_line(str(path), gguf_checks.PATH_LIMIT)}: {cause}; {fix}")


# ---------------------------------------------------------------------------------------------------------- opening


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise _fail(path, "no such file", "check the path (models from Hugging Face are written owner/repo)") from None
    except PermissionError:
        raise _fail(path, "its directory may not be read", "check the permissions of the directory") from None
    except (OSError, ValueError) as error:
        raise _fail(path, f"cannot be opened ({_reason(error)})", "check the path") from None


def _reason(error: Exception) -> str:
    return gguf_checks.one_line(getattr(error, "strerror", None) or str(error))


def _directory_error(path: Path) -> ModelFileError:
    try:
        names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".gguf"))
    except OSError:
        names = []
    found = "it holds no .gguf file" if not names else f"it holds {gguf_checks.some(names)}"
    return _fail(path, f"is a directory, a GGUF file was expected ({found})", "name the file itself")


def _check_regular(path: Path) -> int:
    """Return the size of a non-empty regular file."""
    info = _stat(path)
    if stat.S_ISDIR(info.st_mode):
        raise _directory_error(path)
    if not stat.S_ISREG(info.st_mode):
        raise _fail(path, "is not a regular file", "copy the model to a file first")
    if info.st_size == 0:
        raise _fail(path, "is empty (0 bytes)", AGAIN)
    return info.st_size


# first bytes -> what the file is, and what to do; letters are compared in lower case and without leading spaces
OTHER_TEXTS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    (
        (b"<!doctype", b"<html", b"<?xml"),
        "is a web page, not a GGUF file",
        "download the file itself (the 'resolve' link, not the 'blob' page)",
    ),
    (
        (b"version https://git-lfs",),
        "is a Git LFS pointer, not the model itself",
        "run 'git lfs pull' beside it or download the file",
    ),
    ((b"{", b"["), "is a JSON document (an error message of the server?), not a GGUF file", AGAIN),
)
OTHER_BYTES: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    ((b"PK\x03\x04",), "is a zip archive (a PyTorch checkpoint?)", "use a GGUF of this model or convert it"),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "is a Python pickle (a PyTorch checkpoint?)",
        "use a GGUF of this model or convert it",
    ),
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "is in a format older than GGUF", "get a GGUF of this model"),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00"), "is compressed", "unpack it first"),
)


def _sniff(path: Path, head: bytes) -> ModelFileError:
    """What a file without the magic really is."""
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        fix = "use a GGUF of this model or convert it with convert_hf_to_gguf.py"
        return _fail(path, "is a safetensors file", fix)
    for text, known in ((head.lstrip().lower(), OTHER_TEXTS), (head, OTHER_BYTES)):
        for starts, cause, fix in known:
            if text.startswith(starts):
                return _fail(path, cause, fix)
    if not any(head):
        return _fail(path, "starts with zeros, so its download never finished", AGAIN)
    found = f"it starts with the bytes {head[:4].hex(' ')} instead of 47 47 55 46 ('GGUF')"
    if sum(a == b for a, b in zip(head, MAGIC, strict=False)) >= 3:
        return _fail(path, f"is damaged: {found}", AGAIN)
    return _fail(path, f"is not a GGUF file: {found}", "check the path")


# ---------------------------------------------------------------------------------------------------------- reading


class _Cursor:
    """Reads a file front to back through a window that grows with what is really there, never with what is claimed."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.window, self.start, self.pos = file.read(WINDOW), 0, 0  # start: file offset of window[0]

    @property
    def offset(self) -> int:
        """Where the next byte lies in the file."""
        return self.start + self.pos

    def ensure(self, n: int, what: str) -> None:
        """Have ``n`` more bytes in the window."""
        if self.pos + n <= len(self.window):
            return
        self.check_inside(n, what)
        rest = self.window[self.pos :]
        self.start, self.pos = self.offset, 0
        self.window = rest + self.file.read(max(n - len(rest), WINDOW))
        if len(self.window) < n:
            raise _fail(self.path, f"became shorter while it was read (inside {what})", "try again")

    def check_inside(self, n: int, what: str) -> None:
        """``n`` more bytes must lie inside the file."""
        if self.offset + n > self.size:
            raise _fail(self.path, f"is truncated or damaged: its {self.size} bytes end inside {what}", AGAIN)

    def skip(self, n: int, what: str) -> None:
        """Pass over ``n`` bytes without reading them."""
        self.check_inside(n, what)
        if self.pos + n <= len(self.window):
            self.pos += n
            return
        self.start, self.pos, self.window = self.offset + n, 0, b""
        self.file.seek(self.start)

    def number(self, layout: struct.Struct, what: str) -> Any:
        """One number."""
        self.ensure(layout.size, what)
        (value,) = layout.unpack_from(self.window, self.pos)
        self.pos += layout.size
        return value

    def string(self, what: str, limit: int = MAX_TEXT) -> bytes:
        """A string with its length in front."""
        length = self.number(U64, what)
        if length > limit:
            raise _fail(self.path, f"is damaged: {what} claims a text of {length} bytes", AGAIN)
        self.ensure(length, what)
        self.pos += length
        return self.window[self.pos - length : self.pos]

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over ``count`` strings; a vocabulary has hundreds of thousands, so this loop stays bare."""
        unpack = U64.unpack_from
        for _ in range(count):
            if self.pos + 8 > len(self.window):
                self.ensure(8, what)
            (length,) = unpack(self.window, self.pos)
            self.pos += 8
            if self.pos + length > len(self.window):
                if length > MAX_TEXT:
                    raise _fail(self.path, f"is damaged: {what} claims a text of {length} bytes", AGAIN)
                self.ensure(length, what)
            self.pos += length


def _read_scalar(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == STRING:
        return cursor.string(what).decode("utf-8", "replace")
    return cursor.number(SCALARS[kind], what)


def _read_array_value(cursor: _Cursor, key: str, what: str) -> list[Any] | ArrayInfo:
    kind, count = cursor.number(U32, what), cursor.number(U64, what)
    if kind not in SCALARS and kind != STRING:
        raise _fail(cursor.path, f"is damaged: {what} has elements of the unknown type {kind}", AGAIN)
    if count > MAX_ARRAY:
        raise _fail(cursor.path, f"is damaged: {what} claims {count} elements", AGAIN)
    cursor.check_inside(count * (8 if kind == STRING else SCALARS[kind].size), what)
    if count <= SMALL_ARRAY and not key.startswith("tokenizer."):
        return [_read_scalar(cursor, kind, what) for _ in range(count)]
    start = cursor.offset
    if kind == STRING:
        cursor.skip_strings(count, what)
    else:
        cursor.skip(count * SCALARS[kind].size, what)
    return ArrayInfo(cursor.path, kind, count, start, cursor.offset - start)


def _read_metadata(cursor: _Cursor, n_kv: int) -> tuple[dict[str, Any], dict[str, int]]:
    metadata: dict[str, Any] = {}
    types: dict[str, int] = {}
    seen: set[bytes] = set()
    for index in range(n_kv):
        raw = cursor.string(f"metadata key {index}", MAX_KEY)
        key = raw.decode("utf-8", "replace")
        what = f"metadata key {gguf_checks.quoted(key)}"
        if not raw or raw in seen:
            raise _fail(cursor.path, f"is damaged: {what} is {'repeated' if raw else 'empty'}", AGAIN)
        seen.add(raw)
        types[key] = kind = cursor.number(U32, what)
        if kind == ARRAY:
            metadata[key] = _read_array_value(cursor, key, what)
        elif kind in SCALARS or kind == STRING:
            metadata[key] = _read_scalar(cursor, kind, what)
        else:
            raise _fail(cursor.path, f"is damaged: {what} has the unknown type {kind}", AGAIN)
    return metadata, types


def _read_shape(cursor: _Cursor, what: str) -> tuple[int, ...]:
    n_dims = cursor.number(U32, what)
    if n_dims > MAX_DIMS:
        raise _fail(cursor.path, f"is damaged: {what} has {n_dims} dimensions, at most 4 are allowed", AGAIN)
    shape = tuple(cursor.number(U64, what) for _ in range(n_dims)) or (1,)
    elements = 1
    for length in shape:
        elements *= length
    if elements == 0 or elements > MAX_ELEMENTS:
        raise _fail(cursor.path, f"is damaged: {what} has the shape {list(shape)}", AGAIN)
    return shape


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    raw = cursor.string(f"the name of tensor {index}", MAX_KEY)
    name = raw.decode("utf-8", "replace")
    what = f"tensor {gguf_checks.quoted(name)}"
    if len(raw) >= MAX_NAME:
        raise _fail(cursor.path, f"is damaged: the name of {what} has {len(raw)} bytes, at most 63 are allowed", AGAIN)
    shape = _read_shape(cursor, what)
    kind, offset = cursor.number(U32, what), cursor.number(U64, what)
    if kind not in GGML_TYPES:
        fix = "the file is damaged or newer than this program: download it again or update esp-edge"
        raise _fail(cursor.path, f"{what} has the unknown type {kind}", fix)
    type_name, block, block_bytes = GGML_TYPES[kind]
    if shape[0] % block:
        cause = f"is damaged: rows of {what} have {shape[0]} elements, {type_name} needs a multiple of {block}"
        raise _fail(cursor.path, cause, AGAIN)
    elements = 1
    for length in shape:
        elements *= length
    return TensorInfo(name, shape, kind, type_name, offset, elements // block * block_bytes)


def _read_tensors(cursor: _Cursor, n_tensors: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        tensor = _read_tensor(cursor, index)
        if tensor.name in tensors:
            raise _fail(cursor.path, f"is damaged: tensor {gguf_checks.quoted(tensor.name)} is there twice", AGAIN)
        tensors[tensor.name] = tensor
    return tensors


def _read_version(cursor: _Cursor) -> int:
    version: int = cursor.number(U32, "the version")
    if version & 0xFFFF == 0:
        raise _fail(cursor.path, "was written for a big-endian machine", "get the little-endian GGUF of this model")
    if version < 2:
        raise _fail(cursor.path, f"is GGUF version {version}, this program reads 2 and 3", "convert the model again")
    if version > 3:
        fix = "update esp-edge, or download it again if it should not be that new"
        raise _fail(cursor.path, f"is GGUF version {version}, this program reads 2 and 3", fix)
    return version


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    n_tensors, n_kv = cursor.number(U64, "the tensor count"), cursor.number(U64, "the metadata count")
    for count, least, what in ((n_tensors, MIN_TENSOR_BYTES, "tensors"), (n_kv, MIN_KV_BYTES, "metadata entries")):
        if count * least > cursor.size:
            raise _fail(cursor.path, f"is damaged: it claims {count} {what} in {cursor.size} bytes", AGAIN)
    return n_tensors, n_kv


def _read_alignment(path: Path, metadata: Mapping[str, Any], types: Mapping[str, int]) -> int:
    alignment = metadata.get("general.alignment", 32)
    ok = types.get("general.alignment", UINT32) == UINT32
    if not ok or alignment == 0 or alignment & (alignment - 1):
        shown = gguf_checks.quoted(alignment)
        raise _fail(path, f"is damaged: its alignment is {shown}, a power of two was expected", AGAIN)
    return int(alignment)


def _place(path: Path, tensors: dict[str, TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
    """Make offsets absolute. llama.cpp wants the tensors one after the other, each padded to the alignment."""
    expected = 0
    placed = {}
    for name, tensor in tensors.items():
        if tensor.offset != expected:
            place = f"is at {tensor.offset}, not at {expected}"
            raise _fail(path, f"is damaged: the data of tensor {gguf_checks.quoted(name)} {place}", AGAIN)
        absolute = start + tensor.offset
        placed[name] = TensorInfo(name, tensor.shape, tensor.ggml_type, tensor.type_name, absolute, tensor.n_bytes)
        expected += -(-tensor.n_bytes // alignment) * alignment
    return placed


def _check_extent(path: Path, tensors: Mapping[str, TensorInfo], size: int) -> None:
    for tensor in tensors.values():
        end = tensor.offset + tensor.n_bytes
        if end > size:
            need = max(t.offset + t.n_bytes for t in tensors.values())
            cause = f"it has {size} of {need} bytes and tensor {gguf_checks.quoted(tensor.name)} is not complete"
            raise _fail(path, f"is truncated: {cause}", AGAIN)


def _read(file: BinaryIO, path: Path, size: int) -> GGUFHeader:
    cursor = _Cursor(file, path, size)
    if cursor.window[:4] != MAGIC:
        raise _sniff(path, cursor.window[:256])
    cursor.pos = 4
    version = _read_version(cursor)
    n_tensors, n_kv = _read_counts(cursor)
    metadata, types = _read_metadata(cursor, n_kv)
    alignment = _read_alignment(path, metadata, types)
    tensors = _read_tensors(cursor, n_tensors)
    start = -(-cursor.offset // alignment) * alignment if n_tensors else cursor.offset
    placed = _place(path, tensors, start, alignment)
    _check_extent(path, placed, size)
    return GGUFHeader(path, version, alignment, metadata, types, placed, start, size)


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of one GGUF file and check that its tensors lie inside the file.

    Raises:
        ModelFileError: missing, unreadable, not a GGUF, damaged or truncated.
    """
    path = Path(path)
    size = _check_regular(path)
    try:
        with path.open("rb") as file:
            return _read(file, path, size)
    except PermissionError:
        raise _fail(path, "may not be read by this user", "change its permissions") from None
    except OSError as error:
        raise _fail(path, f"cannot be read ({_reason(error)})", "check the disk and try again") from None


def _iter_strings(data: bytes, count: int) -> Iterator[bytes]:
    pos = 0
    for _ in range(count):
        (length,) = U64.unpack_from(data, pos)
        yield data[pos + 8 : pos + 8 + length]
        pos += 8 + length


def read_array(array: ArrayInfo) -> list[Any]:
    """The elements of a metadata array that was left in the file; texts as bytes.

    Raises:
        ModelFileError: the file cannot be read any more.
    """
    try:
        with array.path.open("rb") as file:
            file.seek(array.offset)
            data = file.read(array.n_bytes)
    except OSError as error:
        raise _fail(array.path, f"cannot be read ({_reason(error)})", "check the disk and try again") from None
    if len(data) != array.n_bytes:
        raise _fail(array.path, "became shorter while it was read", "try again")
    if array.element_type == STRING:
        return list(_iter_strings(data, array.count))
    return [item[0] for item in SCALARS[array.element_type].iter_unpack(data)]


# ------------------------------------------------------------------------------------------------------ split files


def _split_position(header: GGUFHeader) -> tuple[int, int]:
    """(number of this part from 0, number of parts); (0, 1) for a whole file."""
    for key in ("split.no", "split.count"):
        if header.value_types.get(key, U16) != U16:
            raise _fail(header.path, f"is damaged: {key} is not a 16-bit number", AGAIN)
    count = header.metadata.get("split.count", 0)
    return (header.metadata.get("split.no", 0), count) if count > 1 else (0, 1)


def _part_path(path: Path, no: int, count: int) -> Path | None:
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        return None
    return path.with_name(f"{match['stem']}-{no + 1:05d}-of-{count:05d}.gguf")


def _check_first_part(header: GGUFHeader, no: int, count: int) -> None:
    first = _part_path(header.path, 0, count)
    if no != 0:
        name = gguf_checks.one_line(first.name) if first else f"the file ending in -00001-of-{count:05d}.gguf"
        raise _fail(header.path, f"is part {no + 1} of {count}", f"give the first part: {name}")
    if first != header.path:
        fix = f"give it back the name that ends in -00001-of-{count:05d}.gguf"
        raise _fail(header.path, f"is part 1 of {count} but its name does not say so", fix)


def read_parts(header: GGUFHeader) -> list[GGUFHeader]:
    """Headers of all files of a model, the given first one included; one for a model that is not split.

    Raises:
        ModelFileError: not the first part, parts missing, or parts that do not belong together.
    """
    no, count = _split_position(header)
    if count == 1:
        return [header]
    _check_first_part(header, no, count)
    paths = [path for i in range(1, count) if (path := _part_path(header.path, i, count))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        cause = f"is part 1 of {count}, but {len(missing)} of the others are not beside it"
        raise _fail(header.path, cause, f"download {gguf_checks.some(missing)}")
    parts = [header, *(read_header(path) for path in paths)]
    for index, part in enumerate(parts):
        if _split_position(part)[0] != index or "split.no" not in part.metadata:
            raise _fail(part.path, f"is not part {index + 1} of this model", AGAIN)
    total = sum(len(part.tensors) for part in parts)
    names = {name for part in parts for name in part.tensors}
    if total != header.metadata.get("split.tensors.count") or len(names) != total:
        raise _fail(header.path, f"its {count} parts do not belong together", "download all of them again")
    return parts


# ------------------------------------------------------------------------------------------------------- public use


def preflight(path: str | os.PathLike[str]) -> GGUFHeader:
    """Check everything that can be checked cheaply before llama.cpp opens a model, all parts included.

    Raises:
        ModelFileError: the file is missing, damaged, incomplete or not a GGUF.
        UnsupportedModelError: a healthy file that is no text-generating model.
    """
    header = read_header(path)
    gguf_checks.check_kind(header)
    tensors = {name: tensor for part in read_parts(header) for name, tensor in part.tensors.items()}
    gguf_checks.check_tensors(header, tensors)
    gguf_checks.check_hyperparameters(header, tensors)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    gguf_checks.check_vocabulary(header, read_array(tokens) if isinstance(tokens, ArrayInfo) else [])
    return header


def embedding_tensor(header: GGUFHeader) -> tuple[Path, TensorInfo]:
    """(file, place) of ``token_embd.weight``, whichever part holds it.

    Raises:
        ModelFileError: no part holds it.
    """
    for part in read_parts(header):
        tensor = part.tensors.get(gguf_checks.TOKEN_EMBD)
        if tensor is not None:
            return part.path, tensor
    raise _fail(header.path, f"has no tensor {gguf_checks.TOKEN_EMBD}", "get another GGUF of this model")


def quant_name(header: GGUFHeader) -> str:
    """Quantisation of a file, such as ``Q4_K_M``: what it says, else the type that fills most of it."""
    file_type = header.metadata.get("general.file_type")
    if isinstance(file_type, int) and file_type & ~GUESSED_FILE_TYPE in FILE_TYPES:
        return FILE_TYPES[file_type & ~GUESSED_FILE_TYPE]
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.n_bytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "unknown"


def _element_bytes(type_name: str) -> float:
    for name, block, block_bytes in GGML_TYPES.values():
        if name == type_name.upper():
            return block_bytes / block
    raise ConfigError(f"a KV cache type must be a ggml type such as f16 or q8_0, but {type_name!r} was given")


def _per_layer(value: Any, n_layer: int) -> list[int]:
    values = value if isinstance(value, list) else [value] * n_layer
    return [item if isinstance(item, int) else 0 for item in values] + [0] * (n_layer - len(values))


def _number(header: GGUFHeader, name: str, default: int = 0) -> int:
    value = header.hyperparameter(name, default)
    return value if isinstance(value, int) else default


def _kv_bytes_per_token(header: GGUFHeader, k_bytes: float, v_bytes: float) -> float:
    n_layer = _number(header, "block_count")
    heads = _per_layer(header.hyperparameter("attention.head_count"), n_layer)
    kv_heads = _per_layer(header.hyperparameter("attention.head_count_kv", heads), n_layer)
    if header.architecture in gguf_checks.RECURRENT:
        return 0.0
    head_size = _number(header, "embedding_length") // max(1, *heads)
    k_size = _number(header, "attention.key_length", head_size)
    v_size = _number(header, "attention.value_length", head_size)
    if header.hyperparameter("attention.key_length_mla"):
        v_size = 0  # multi-head latent attention keeps one latent row per token; the values are a view of it
    return sum(kv_heads) * (k_size * k_bytes + v_size * v_bytes)


def _state_bytes(header: GGUFHeader) -> int:
    """Recurrent state of one sequence (F32): convolution and scan of every layer, RWKV's two shifts and matrix."""
    inner, state = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
    conv = max(0, _number(header, "ssm.conv_kernel") - 1)
    groups, rwkv = _number(header, "ssm.group_count"), _number(header, "wkv.head_size")
    n_embd = _number(header, "embedding_length")
    cells = conv * (inner + 2 * groups * state) + inner * state + (n_embd * (rwkv + 2) if rwkv else 0)
    return 4 * _number(header, "block_count") * cells


def memory_estimate(
    header: GGUFHeader, n_ctx: int, type_k: str = "f16", type_v: str = "f16", n_ubatch: int = 512
) -> dict[str, int]:
    """Bytes a model needs at a context of ``n_ctx`` tokens.

    ``weights`` is exact. ``kv_cache`` counts every layer at full length (a sliding window is not taken off).
    ``compute`` is a guess: the logits and the widest activations of one micro-batch of ``n_ubatch`` rows.

    Raises:
        ConfigError: an unknown cache type.
    """
    k_bytes, v_bytes = _element_bytes(type_k), _element_bytes(type_v)
    weights = sum(tensor.n_bytes for part in read_parts(header) for tensor in part.tensors.values())
    kv_cache = int(n_ctx * _kv_bytes_per_token(header, k_bytes, v_bytes)) + _state_bytes(header)
    widest = max(_per_layer(header.hyperparameter("feed_forward_length"), 1))
    width = header.n_vocab + 6 * _number(header, "embedding_length") + 2 * widest
    compute = 4 * n_ubatch * width
    return {"weights": weights, "kv_cache": kv_cache, "compute": compute, "total": weights + kv_cache + compute}
