"""Names and byte format of blocks: identity, chained keys, record headers."""

from tiercel.blocks.chain import KEY_BYTES, BlockKey, Chain, Media
from tiercel.blocks.identity import TAG_BYTES, Identity, Scope
from tiercel.blocks.record import (
    HEADER_BYTES,
    PAGE_BYTES,
    Header,
    parse,
    payload_of,
    record_bytes,
    seal,
    verify,
)

__all__ = [
    "HEADER_BYTES",
    "KEY_BYTES",
    "PAGE_BYTES",
    "TAG_BYTES",
    "BlockKey",
    "Chain",
    "Header",
    "Identity",
    "Media",
    "Scope",
    "parse",
    "payload_of",
    "record_bytes",
    "seal",
    "verify",
]
