"""The `Codec` protocol: a payload to fewer bytes, and back."""

from __future__ import annotations

from typing import Protocol

from tiercel.codecs.shape import BlockShape


class Codec(Protocol):
    """All calls may run on several threads at once and own no buffer beyond the call. None raises.

    `number` stands in record headers and marks for ever: another format is another number. What an `exact`
    one gives back is what it was given, bit for bit; it works on any bytes and looks at no shape.
    """

    @property
    def name(self) -> str:
        """What it is called in settings."""

    @property
    def number(self) -> int:
        """What it is called in record headers."""

    @property
    def exact(self) -> bool:
        """Whether it is lossless."""

    def fits(self, shape: BlockShape | None, payload_bytes: int) -> bool:
        """Whether payloads of this shape can be encoded."""

    def encode(self, payload: memoryview, into: memoryview, shape: BlockShape | None) -> int | None:
        """Write the encoded payload to `into`, as long as the payload: its bytes, or None.

        None: it does not pay, or holds what the codec cannot keep (numbers that are none). Then it is stored
        as it is.
        """

    def decode(self, encoded: memoryview, payload: memoryview, shape: BlockShape | None) -> bool:
        """Fill `payload` from what `encode` made of one as long. False: it is not that; trusts no byte."""
