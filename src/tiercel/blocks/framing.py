"""Typed, length-framed fields for hashing: no two different field lists give the same bytes.

Joining fields without tags lets a value pass for its neighbour ('a','bc' against 'ab','c', or an
adapter named like somebody's salt). Every field here carries its type and its length instead.
"""

from __future__ import annotations

Field = str | bytes | int | None


def frame(*fields: Field) -> bytes:
    """Encode `fields` injectively: one type byte, 8 bytes of length, then the value, for each."""
    parts: list[bytes] = []
    for field in fields:
        tag, body = _encode(field)
        parts.append(tag + len(body).to_bytes(8, "little") + body)
    return b"".join(parts)


def _encode(field: Field) -> tuple[bytes, bytes]:
    if field is None:
        return b"n", b""
    if isinstance(field, bytes):
        return b"b", field
    if isinstance(field, str):
        return b"s", field.encode("utf-8", "surrogatepass")
    return b"i", str(int(field)).encode("ascii")
