"""The structures that a CUDA source takes as arguments, for its host, read from the source itself.

So a field stands in one place, and Python names it: `Arguments(rows=rows, out=out.data_ptr())`. A structure must be
written plainly: `const TYPE *a, *b;` or `TYPE a, b[4];`, with the types of TYPES, pointers, and structures of the same
source or of a header that it includes. tests/kernels/test_cuda_sources.py compares their layout with the compiler's.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What C++ calls them, and their alignment in bytes where it is not that of the type in Python.
TYPES: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "u8": ctypes.c_uint8,
    "short": ctypes.c_short,
    "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int,
    "u32": ctypes.c_uint32,
    "long long": ctypes.c_longlong,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    # As `kernels.nvrtc.encode_rows` returns it.
    "TensorMap": ctypes.c_uint64 * 16,
}
ALIGNMENTS = {"TensorMap": 64}

# A type, then names separated by commas: each may have a star before it, or a length after it.
_NAME = re.compile(r"(\*?) ?(\w+)(?:\[(\w+)\])?")
_DECLARATION = re.compile(rf"(?:const )?(?P<type>\w+(?: \w+)*?)\b ?(?P<names>{_NAME.pattern}(?: ?, ?{_NAME.pattern})*)")


def structure(source: Path, name: str) -> type[ctypes.Structure]:
    """`struct name` of a source, or of a header that it includes.

    Fields that are not given are zero; a field that the structure does not have raises AttributeError. Raises
    ValueError if there is no such structure, or a field of it is not understood.
    """
    file = _defining(source.resolve(), name)
    if file is None:
        raise ValueError(f"{source.name} and the headers that it includes have no struct {name}")
    made, _ = _made(file, name)
    return made


@dataclass(frozen=True, slots=True)
class _File:
    # The text between the braces of each structure, by its name.
    bodies: dict[str, str]
    constants: dict[str, int]
    includes: tuple[Path, ...]


@cache
def _read(file: Path) -> _File:
    text = re.sub(r"//.*|/\*.*?\*/", "", file.read_text(encoding="utf-8"))
    starts = re.finditer(r"^struct (?:alignas\(\d+\) )?(\w+) \{", text, re.MULTILINE)
    constants = "".join(re.findall(r"^constexpr int [^;]*;", text, re.MULTILINE))
    return _File(
        {start[1]: _between_braces(text, start.end()) for start in starts},
        {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)[,;]", constants)},
        tuple((file.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE)),
    )


def _between_braces(text: str, start: int) -> str:
    """The text from `start`, which follows an opening brace, to the brace that closes it."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.start()]
    raise ValueError("a struct is not closed")


def _files(file: Path) -> Iterator[Path]:
    """The file and all that it includes; some more than once."""
    yield file
    for included in _read(file).includes:
        yield from _files(included)


def _defining(file: Path, name: str) -> Path | None:
    return next((each for each in _files(file) if name in _read(each).bodies), None)


# A header's structure is the same class for all sources that include it, so that one's value may be part of another.
@cache
def _made(file: Path, name: str) -> tuple[type[ctypes.Structure], int]:
    """The class, and its alignment in bytes, which ctypes does not know of tensor maps."""
    fields: list[tuple[str, Any]] = []
    end, alignment = 0, 1
    for field, kind, aligned in _fields(file, name):
        if end % aligned and aligned > ctypes.alignment(kind):
            raise ValueError(f"{file.name}: {name}.{field} must stand first, since it is aligned to {aligned} bytes")
        fields.append((field, kind))
        end, alignment = ctypes.sizeof(_class(name, fields)), max(alignment, aligned)
    if end % alignment:
        fields.append(("_tail", ctypes.c_byte * (-end % alignment)))
    return _class(name, fields), alignment


def _class(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    # Without slots a misspelled field would become an attribute of its own.
    return type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": tuple(fields)})


def _fields(file: Path, name: str) -> Iterator[tuple[str, Any, int]]:
    """The name, type and alignment of each field."""
    for statement in _statements(_read(file).bodies[name]):
        declaration = _DECLARATION.fullmatch(statement)
        if declaration is None:
            raise ValueError(f"{file.name}: {name} has a field that is not understood: {statement}")
        for pointer, field, length in _NAME.findall(declaration["names"]):
            label = f"{name}.{field}"
            kind, aligned = (ctypes.c_void_p, 8) if pointer else _type(file, declaration["type"], label)
            yield field, kind * _length(file, length, label) if length else kind, aligned


def _statements(body: str) -> Iterator[str]:
    """The declarations of fields, with single spaces. Functions are left out."""
    while "{" in body:
        body = re.sub(r"\{[^{}]*\}", ";", body)
    lines = (" ".join(line.split()) for line in body.split(";"))
    return (line for line in lines if line and "(" not in line)


def _type(file: Path, kind: str, field: str) -> tuple[Any, int]:
    """The type and its alignment. field: for the error."""
    if kind in TYPES:
        return TYPES[kind], ALIGNMENTS.get(kind, ctypes.alignment(TYPES[kind]))
    defining = _defining(file, kind)
    if defining is None:
        raise ValueError(f"{file.name}: {field} has a type that is not known: {kind}")
    return _made(defining, kind)


def _length(file: Path, length: str, field: str) -> int:
    if length.isdecimal():
        return int(length)
    for each in _files(file):
        if length in _read(each).constants:
            return _read(each).constants[length]
    raise ValueError(f"{file.name}: {field} has a length that is no number or constexpr int of a number: {length}")
