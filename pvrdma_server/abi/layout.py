"""`Layout`: one fixed-size C record as a `struct.Struct` and a NamedTuple.

Contract: a `Layout` is immutable, and its construction, at import, refuses an overlap, a field
beyond the record's end, and a field list that differs from the NamedTuple's. Unpacking checks
nothing but the length; packing gives exactly `size` bytes with zero padding. Snapshot guest memory
first: a `Layout` reads its buffer once, but a caller who unpacks twice reads twice.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, Union

T = TypeVar("T", bound=NamedTuple)

ReadableBuffer: TypeAlias = bytes | bytearray | memoryview
WritableBuffer: TypeAlias = bytearray | memoryview

FieldSpec: TypeAlias = tuple[int, Union[str, "Layout[Any]"]]
"""(offset in bytes, a `struct` code without byte order, or the layout of a nested record)."""


class Field(NamedTuple):
    """Where a field lies in its record, in bytes."""

    offset: int
    size: int


class Layout(Generic[T]):
    """The binary form of a record: little-endian, no implicit alignment.

    Args:
        record: The NamedTuple class; its fields must be named and ordered as `fields`.
        size: Size of the whole record in bytes, trailing padding included.
        **fields: Name to (offset, code), in ascending offset.

    Raises:
        ValueError: The fields overlap, exceed `size`, or do not match `record`.
    """

    BYTE_ORDER: ClassVar[str] = "<"

    __slots__ = ("_nested", "_pack", "_sized", "_struct", "_unpack", "fields", "record", "size")

    def __init__(self, record: type[T], size: int, /, **fields: FieldSpec) -> None:
        if tuple(fields) != record._fields:
            raise ValueError(f"{record.__name__}: fields {tuple(fields)} != {record._fields}")
        self.record = record
        self.size = size
        self.fields: Mapping[str, Field] = MappingProxyType(dict(self._place(fields)))
        self._struct = Struct(self.BYTE_ORDER + self._format(fields))
        self._unpack = self._struct.unpack_from
        self._pack = self._struct.pack
        nested = tuple(self._part(code) for _, code in fields.values())
        self._nested = nested if any(nested) else None
        self._sized = tuple(_bytes_fields(fields))

    def __repr__(self) -> str:
        return f"<Layout {self.record.__name__} {self.size} bytes>"

    def unpack_from(self, buffer: ReadableBuffer, offset: int = 0) -> T:
        """Return the record that starts at byte `offset` of `buffer`.

        Raises:
            struct.error: The buffer ends before the record does.
        """
        if self._nested is None:
            return self.record._make(self._unpack(buffer, offset))
        return self._build(iter(self._unpack(buffer, offset)))

    def unpack(self, buffer: ReadableBuffer) -> T:
        """Return the record that `buffer` is.

        Raises:
            ValueError: `buffer` is not exactly `size` bytes long.
        """
        if len(buffer) != self.size:
            raise ValueError(f"{self.record.__name__}: {len(buffer)} bytes, need {self.size}")
        return self.unpack_from(buffer)

    def pack(self, value: T) -> bytes:
        """Return `value` as exactly `size` bytes, reserved bytes zero.

        Raises:
            struct.error: A number does not fit its field.
            ValueError: A bytes field has the wrong length (`struct` alone would cut or pad it).
        """
        if self._nested is None:
            self._check_bytes(value)
            return self._pack(*value)
        return self._pack(*self._flatten(value))

    def pack_into(self, buffer: WritableBuffer, offset: int, value: T) -> None:
        """Store `value` at byte `offset` of `buffer` (a memoryview of format "B") with one copy.

        `struct.pack_into` zeroes its target before it fills it, which a polling guest can see; so
        the bytes are built first and then assigned at once.

        Raises:
            ValueError: The record does not fit there.
        """
        end = offset + self.size
        if offset < 0 or end > len(buffer):
            raise ValueError(f"{self.record.__name__} at {offset} exceeds {len(buffer)} bytes")
        buffer[offset:end] = self.pack(value)

    def _check_bytes(self, value: T) -> None:
        for index, length in self._sized:
            if len(value[index]) != length:
                raise ValueError(f"{value._fields[index]}: {len(value[index])} bytes, not {length}")

    def _place(self, fields: Mapping[str, FieldSpec]) -> Iterator[tuple[str, Field]]:
        end = 0
        for name, (offset, code) in fields.items():
            if offset < end:
                raise ValueError(f"{self.record.__name__}.{name} at {offset} overlaps byte {end}")
            field = Field(offset, self._code_size(code))
            end = offset + field.size
            yield name, field
        if end > self.size:
            raise ValueError(f"{self.record.__name__} ends at {end}, beyond {self.size}")

    def _code_size(self, code: "str | Layout[Any]") -> int:
        return code.size if isinstance(code, Layout) else Struct(self.BYTE_ORDER + code).size

    def _format(self, fields: Mapping[str, FieldSpec]) -> str:
        """The struct format without byte order; every gap becomes explicit pad bytes."""
        parts, end = [], 0
        for offset, code in fields.values():
            parts.append("x" * (offset - end))
            parts.append(self._code_format(code))
            end = offset + self._code_size(code)
        parts.append("x" * (self.size - end))
        return "".join(parts)

    def _code_format(self, code: "str | Layout[Any]") -> str:
        if not isinstance(code, Layout):
            return code
        if code.BYTE_ORDER != self.BYTE_ORDER:
            raise ValueError(f"{self.record.__name__}: {code!r} has the other byte order")
        return code._struct.format[1:]

    def _part(self, code: "str | Layout[Any]") -> "Layout[Any] | None":
        return code if isinstance(code, Layout) else None

    def _build(self, flat: Iterator[Any]) -> T:
        if self._nested is None:
            return self.record._make([next(flat) for _ in self.fields])
        return self.record._make(part._build(flat) if part else next(flat) for part in self._nested)

    def _flatten(self, value: T) -> Iterator[Any]:
        self._check_bytes(value)
        for part, item in zip(self._nested or (None,) * len(value), value, strict=True):
            if part is None:
                yield item
            else:
                yield from part._flatten(item)


class BigEndianLayout(Layout[T]):
    """A `Layout` whose integers are in network byte order: MADs and IP headers."""

    BYTE_ORDER = ">"
    __slots__ = ()


class CMapping(NamedTuple):
    """Which C type a layout stands for; the oracle test compares the two.

    `members` names the C member (a designator such as `wr.rdma.rkey`) of each field whose name
    differs.
    """

    c_type: str
    layout: Layout[Any]
    members: Mapping[str, str] = MappingProxyType({})


class CConstants(NamedTuple):
    """Which C constants an enumeration stands for: `prefix` + member name."""

    prefix: str
    members: Mapping[str, int]


def enum_name(enum: type[IntEnum], value: int) -> str:
    """Name of `value` for people to read; an unknown number is its own name."""
    try:
        return enum(value).name
    except ValueError:
        return str(value)


def _bytes_fields(fields: Mapping[str, FieldSpec]) -> Iterator[tuple[int, int]]:
    """(index, length in bytes) of each bytes field."""
    for index, (_, code) in enumerate(fields.values()):
        if isinstance(code, str) and code.endswith("s"):
            yield index, Struct("<" + code).size
