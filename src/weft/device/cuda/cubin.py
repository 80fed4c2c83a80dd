"""What of a cubin a GPU runs: digests that neither words nor names of the text change.

A cubin is an ELF file. The names of entries and functions stand in tables of strings, in names of sections and in the
order of symbols; relocations and attributes name symbols by number. `entries` reads every entry's code, attributes,
constants and shared memory with symbols by what they are, so that two texts with one machine code have one digest. What
it does not know counts as it is: a difference may be reported where there is none, and never the other way round.

Line tables, unwinding tables and the compiler's notes about itself are left out. No import of Weft: `tools/replay.py`
loads this file beside another commit's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_CODE = ".text."
_SHARED = ".nv.shared."
_RESERVED = ".nv.shared.reserved."
_SYSTEM_BYTES = 1024
"""Since compute capability 9.0 a CTA's section of shared memory has what the system takes of it in front; the
assembler's report leaves that out, and so do we."""
_REGISTER_COUNT = 0x2F
_NOBITS = 8
_RELOCATIONS = {9: struct.Struct("<QQ"), 4: struct.Struct("<QQq")}
"""By a section's type: offset, symbol and kind, and for the second the addend."""
_REGISTERS = 24
"""A code section's `info` has its registers from this bit on, a symbol's number below."""
_LINK_FLAGS = 0x40
"""`SHF_INFO_LINK`: `info` is a section's number, which another order of sections changes."""
_BESIDE = ("", ".shstrtab", ".strtab", ".symtab", ".nv.callgraph", ".nv.prototype")
_BESIDE_PREFIXES = (".debug_", ".rel.debug_", ".rela.debug_", ".nv_debug_", ".note.")
_INFO = ".nv.info"
_SIZED = 4
"""Form of an attribute whose two bytes of value are the size of what follows; all others are 4 bytes."""
_OF_SYMBOL = frozenset({0x11, 0x12, 0x23, 0x2F})
"""Frame size, least and most stack, registers: attributes of the whole file that begin with a symbol's number."""
_WITH_SYMBOL = frozenset({0x0A})
"""Bank of parameters: an attribute of an entry that begins with a symbol's number."""
_EXTERNS = 0x0F
"""Symbols that an entry calls: numbers alone."""
_IS_ENTRY = 0x10
"""`STO_CUDA_ENTRY`, of a symbol's `other`: what has code and no such symbol is called by all."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    flags: int
    info: int
    link: int
    size: int
    alignment: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """What a launch of an entry takes."""

    registers: int
    """Of a thread, as the launch is given them."""
    shared_bytes: int
    """Static shared memory of a CTA."""


def usage(cubin: bytes) -> dict[str, Usage]:
    """What each entry takes, by its name: as the assembler reports it and the driver states it of the loaded function.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or a damaged one.
    """
    try:
        sections = _sections(cubin)
        symbols = _Symbols(sections)
        counted = next((s.data for s in sections if s.name == _INFO), b"")
        registers = {
            symbols.name(value): _number(value[4:]) for code, value in _records(counted) if code == _REGISTER_COUNT
        }
        sizes = {s.name.removeprefix(_SHARED): s.size for s in sections if s.name.startswith(_SHARED)}
        system = _SYSTEM_BYTES if any(s.name.startswith(_RESERVED) for s in sections) else 0
        return {x: Usage(registers[x], max(0, sizes.get(x, 0) - system)) for x in symbols.entries & registers.keys()}
    except (struct.error, ValueError, IndexError, OverflowError, StopIteration) as error:
        raise ValueError(f"not a cubin, or a damaged one: {error}") from None


def entries(cubin: bytes) -> dict[str, str]:
    """SHA-256 (hex) of what a launch of each entry runs, by the entry's name.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or a damaged one.
    """
    try:
        return _entries(_sections(cubin))
    except (struct.error, ValueError, IndexError, OverflowError, StopIteration) as error:
        raise ValueError(f"not a cubin, or a damaged one: {error}") from None


def _entries(sections: Sequence[_Section]) -> dict[str, str]:
    symbols = _Symbols(sections)
    coded = (s.name.removeprefix(_CODE) for s in sections if s.name.startswith(_CODE))
    names = [name for name in coded if name in symbols.entries]
    owned: dict[str, list[object]] = {name: [] for name in names}
    shared: list[object] = []
    for section in sections:
        if section.name in _BESIDE or section.name.startswith(_BESIDE_PREFIXES):
            continue
        if section.name == _INFO:
            for owner, attribute in symbols.attributes_of_file(section.data):
                owned.get(owner, shared).append(attribute)
            continue
        owner, plain = symbols.place(section.name)
        owned.get(owner, shared).append([plain, *_described(section, plain, symbols)])
    return {name: _digest([_sorted(parts), _sorted(shared)]) for name, parts in owned.items()}


def _described(section: _Section, plain: str, symbols: _Symbols) -> list[object]:
    """What counts of a section."""
    info = section.info >> _REGISTERS if plain == _CODE else 0 if section.flags & _LINK_FLAGS else section.info
    head: list[object] = [section.kind, section.flags, info, section.size, section.alignment]
    if section.kind in _RELOCATIONS:
        return [section.kind, list(symbols.relocations(section))]
    if plain == f"{_INFO}.":
        return [section.kind, list(symbols.attributes(section.data))]
    return [*head, hashlib.sha256(section.data).hexdigest()]


class _Symbols:
    """The table of symbols, each by what it is."""

    def __init__(self, sections: Sequence[_Section]) -> None:
        table = next(s for s in sections if s.name == ".symtab")
        strings = sections[table.link].data
        rows = [(_string(strings, name), *rest) for name, *rest in _SYMBOL.iter_unpack(table.data)]
        self.entries = {name for name, _, other, *_ in rows if other & _IS_ENTRY}
        self._names = [name for name, *_ in rows]
        self._known: list[tuple[str, list[object]]] = []
        for name, kind, other, section, value, size in rows:
            inside = sections[section].name if 0 < section < len(sections) else ""
            owner, plain = self.place(inside)
            external = "" if inside else name  # what others define is known by its name alone
            self._known.append((owner, [external, kind, other, plain, value, size]))

    def name(self, value: bytes) -> str:
        """Of the symbol that an attribute begins with."""
        name: str = self._names[_number(value)]
        return name

    def place(self, name: str) -> tuple[str, str]:
        """The entry whose section it is, or nothing, and its name without the entry's."""
        owner = name.rpartition(".")[2]  # names of entries have no dots
        return (owner, name.removesuffix(owner)) if owner in self.entries else ("", name)

    def relocations(self, section: _Section) -> Iterator[list[object]]:
        """Offset, kind, symbol and what is added, in their order."""
        for offset, info, *added in _RELOCATIONS[section.kind].iter_unpack(section.data):
            yield [offset, info & 0xFFFFFFFF, self._known[info >> 32][1], *added]

    def attributes(self, data: bytes) -> Iterator[list[object]]:
        """Of an entry."""
        for code, value in _records(data):
            if code in _WITH_SYMBOL:
                yield [code, self._known[_number(value)][1], value[4:].hex()]
            elif code == _EXTERNS:
                yield [code, [self._known[n][1] for (n,) in struct.iter_unpack("<I", value)]]
            else:
                yield [code, value.hex()]

    def attributes_of_file(self, data: bytes) -> Iterator[tuple[str, list[object]]]:
        """Each with the entry that it belongs to, or nothing."""
        for code, value in _records(data):
            if code in _OF_SYMBOL:
                owner, symbol = self._known[_number(value)]
                yield owner, [_INFO, code, symbol, value[4:].hex()]
            else:
                yield "", [_INFO, code, value.hex()]


def _sections(cubin: bytes) -> list[_Section]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    step, count, strings_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [_HEADER.unpack_from(cubin, start + k * step) for k in range(count)]
    names = cubin[headers[strings_at][4] :][: headers[strings_at][5]]
    return [
        _Section(_string(names, name), kind, flags, info, link, size, alignment,
                 b"" if kind == _NOBITS else cubin[at : at + size])
        for name, kind, flags, _, at, size, link, info, alignment, _ in headers
    ]  # fmt: skip


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes: a byte of form, a byte of code, two of value or of the size of what follows."""
    at = 0
    while at < len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        size = value if form == _SIZED else 0
        yield code, data[at + 4 : at + 4 + size] if form == _SIZED else data[at : at + 4]
        at += 4 + size


def _number(value: bytes) -> int:
    return int.from_bytes(value[:4], "little")


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _sorted(parts: Sequence[object]) -> list[str]:
    """Sections and attributes stand in any order."""
    return sorted(json.dumps(p) for p in parts)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
