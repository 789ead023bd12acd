"""Fake NVIDIA driver library with the real one's answers, for machines without a GPU.

A shared object, because the launcher looks for a mapped file of that name and calls into it.
`cuInit` succeeds; before it `cuDeviceGetCount` returns 3, which is CUDA_ERROR_NOT_INITIALIZED, and
0 after it.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

NOT_INITIALIZED = 3
_HEADER_BYTES, _SEGMENT_BYTES, _SYMBOL_BYTES, _ENTRY_BYTES = 64, 56, 24, 16
_LOAD, _DYNAMIC, _RWX, _RW = 1, 2, 7, 6
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT = 4, 5, 6, 10, 11
_GLOBAL_FUNCTION = 0x12
_NAMES = ("cuInit", "cuDeviceGetCount")


def write_driver(path: Path) -> Path:
    """Write the library to that path; x86-64 code."""
    assert platform.machine() == "x86_64", "the stand-in for libcuda is x86-64 code"
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in _NAMES)
    at_code = _HEADER_BYTES + 2 * _SEGMENT_BYTES
    init, count, state = _functions(at_code)
    at_symbols = at_code + 32
    at_strings = at_symbols + 3 * _SYMBOL_BYTES
    at_hash = -(-(at_strings + len(strings)) // 8) * 8
    table = struct.pack("<7I", 1, 3, 1, 0, 2, 0, 0)  # one bucket: symbol 1, then 2
    at_dynamic = -(-(at_hash + len(table)) // 8) * 8
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (_HASH, at_hash),
            (_STRTAB, at_strings),
            (_SYMTAB, at_symbols),
            (_STRSZ, len(strings)),
            (_SYMENT, _SYMBOL_BYTES),
            (0, 0),
        )
    )
    whole = at_dynamic + len(dynamic)
    places = [(1, at_code), (1 + len(_NAMES[0]) + 1, at_code + len(init))]
    symbols = bytes(_SYMBOL_BYTES) + b"".join(
        struct.pack("<IBBHQQ", name, _GLOBAL_FUNCTION, 0, 1, place, 0) for name, place in places
    )
    image = bytearray(whole)
    image[0:at_code] = _header() + _segment(_LOAD, _RWX, 0, whole, 4096)
    image[at_code - _SEGMENT_BYTES : at_code] = _segment(_DYNAMIC, _RW, at_dynamic, len(dynamic), 8)
    for at, part in (
        (at_code, init + count + state),
        (at_symbols, symbols),
        (at_strings, strings),
        (at_hash, table),
        (at_dynamic, dynamic),
    ):
        image[at : at + len(part)] = part
    path.write_bytes(image)
    return path


def _functions(at: int) -> tuple[bytes, bytes, bytes]:
    """Return `cuInit`, `cuDeviceGetCount`, and the number behind them that they set and return."""
    init_bytes, count_bytes = 13, 7
    to_state = init_bytes + count_bytes
    # mov dword [rip + …], 0; xor eax, eax; ret
    init = b"\xc7\x05" + struct.pack("<iI", to_state - 10, 0) + b"\x31\xc0\xc3"
    # mov eax, [rip + …]; ret
    count = b"\x8b\x05" + struct.pack("<i", to_state - init_bytes - 6) + b"\xc3"
    return init, count, struct.pack("<I", NOT_INITIALIZED)


def _header() -> bytes:
    """Return an ELF header for x86-64: a shared object with two segments and no sections."""
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    return identity + struct.pack(
        "<HHIQQQIHHHHHH",
        3,
        62,
        1,
        0,
        _HEADER_BYTES,
        0,
        0,
        _HEADER_BYTES,
        _SEGMENT_BYTES,
        2,
        0,
        0,
        0,
    )


def _segment(kind: int, flags: int, at: int, size: int, align: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)
