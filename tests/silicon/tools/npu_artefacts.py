"""Write the smallest NPU artefacts that the real XRT 2.25 accepts. Usage: python3 npu_artefacts.py FOLDER

full.elf     full-ELF flow: kernel "DPU:main", three buffer arguments, a partition of four columns
nouid.elf    the same without the UID note
noconfig.elf the same without the configuration note, which XRT refuses
scalar.elf   a kernel signature with a scalar argument, which XRT refuses
txn.bin      a transaction of one operation: the instruction stream of the xclbin flow
empty.pdi    4096 zero bytes, the configuration part of the xclbin (built with xclbinutil from xclbin/*.json)

They configure nothing and compute nothing: they exist to take the host libraries through every call.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import NamedTuple

OSABI_AIE2P = 69
ABI_VERSION = 0x10
ELF32_HEADER = 52
ELF32_SECTION = 40

SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_GROUP = 1, 2, 3, 7, 17
SHF_ALLOC_EXECINSTR = 6
FUNCTION, OBJECT = 0x12, 0x11


class Section(NamedTuple):
    """One ELF section; `link`, `info` and `entry` are the header fields of those names."""

    name: str
    kind: int
    data: bytes
    flags: int = 0
    link: int = 0
    info: int = 0
    entry: int = 0


def elf32(sections: list[Section]) -> bytes:
    """An executable 32-bit ELF for AIE2P with these sections after the empty one."""
    names = bytearray(b"\0")
    offsets = [0]
    everything = [Section("", 0, b""), *sections, Section(".shstrtab", SHT_STRTAB, b"")]
    for section in everything[1:]:
        offsets.append(len(names))
        names += section.name.encode() + b"\0"
    everything[-1] = everything[-1]._replace(data=bytes(names))
    body, table = bytearray(), bytearray()
    for section, name in zip(everything, offsets, strict=True):
        body += bytes(-(ELF32_HEADER + len(body)) % 8)
        start = ELF32_HEADER + len(body) if section.kind else 0
        table += struct.pack(
            "<10I",
            name,
            section.kind,
            section.flags,
            0,
            start,
            len(section.data),
            section.link,
            section.info,
            4 if section.kind else 0,
            section.entry,
        )
        body += section.data
    body += bytes(-(ELF32_HEADER + len(body)) % 8)
    ident = b"\x7fELF" + bytes([1, 1, 1, OSABI_AIE2P, ABI_VERSION]) + bytes(7)
    header = struct.pack(
        "<HHIIIIIHHHHHH",
        2,
        0,
        1,
        0,
        0,
        ELF32_HEADER + len(body),
        0,
        ELF32_HEADER,
        0,
        0,
        ELF32_SECTION,
        len(everything),
        len(everything) - 1,
    )
    return ident + header + bytes(body + table)


def note(content: bytes) -> bytes:
    """A note of the vendor XRT."""
    name = b"XRT\0"
    return struct.pack("<III", len(name), len(content), 1) + name + content + bytes(-len(content) % 4)


def transaction() -> bytes:
    """One register write: header (version 0.1, device 4, 6 rows, 4 columns, 1 memory row), one operation."""
    operation = struct.pack("<BBBBIQII", 0, 0, 0, 0, 0, 0x2000000, 0x1234, 24)
    return struct.pack("<BBBBBBHII", 0, 1, 4, 6, 4, 1, 0, 1, 16 + len(operation)) + operation


def symbol(name: int, info: int, section: int) -> bytes:
    """One symbol table entry."""
    return struct.pack("<IIIBBH", name, 0, 0, info, 0, section)


def full_elf(
    kernel: bytes = b"_Z3DPUPvPvPv",
    instance: bytes = b"main",
    *,
    uid: bool = True,
    configuration: bool = True,
) -> bytes:
    """Full ELF: the mangled kernel name gives XRT the number of arguments, the group its control code."""
    strings = b"\0" + kernel + b"\0" + instance + b"\0"
    sections = []
    if configuration:
        sections.append(Section(".note.xrt.configuration", SHT_NOTE, note(struct.pack("<I", 4))))
    if uid:
        sections.append(Section(".note.xrt.UID", SHT_NOTE, note(bytes(range(16)))))
    sections.append(Section(".strtab", SHT_STRTAB, strings))
    string_table = len(sections)
    symbols = symbol(0, 0, 0) + symbol(1, FUNCTION, 0) + symbol(2 + len(kernel), OBJECT, 1)
    sections.append(Section(".symtab", SHT_SYMTAB, symbols, link=string_table, info=1, entry=16))
    symbol_table = len(sections)
    sections.append(Section(".ctrltext.0.0", SHT_PROGBITS, transaction(), SHF_ALLOC_EXECINSTR))
    group = struct.pack("<II", 1, len(sections))
    sections.append(Section(".group", SHT_GROUP, group, link=symbol_table, info=2, entry=4))
    return elf32(sections)


def write_all(folder: Path) -> None:
    """Write every artefact that needs no tool of XRT."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "full.elf": full_elf(),
        "nouid.elf": full_elf(uid=False),
        "noconfig.elf": full_elf(configuration=False),
        "scalar.elf": full_elf(kernel=b"_Z3DPUPvi"),
        "txn.bin": transaction(),
        "empty.pdi": bytes(4096),
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write_all(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
