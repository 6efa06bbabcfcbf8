"""An encrypted record: the same size and shape as a plain one, readable only with its key.

AES-256-GCM with a key per tenant, derived from the master key and the scope's tag. The payload is replaced by
its ciphertext, so a record stays whole pages; the plain header is encrypted too and lies in the new one:

    codec 64, key, payload bytes, depth, time of sealing, checksum of the ciphertext: in the clear
    scope root: zeros
    info: {"cipher", "key_id", "payload_nonce", "payload_tag", "nonce", "header": base64 of the ciphertext}

So whoever reads the place sees which keys (hashes) lie there, how long and old they are and which belong to
one scope, but no model, tenant, checksum of content or KV. Key, length and depth are authenticated with both
parts, and the payload's tag with the header: swapped, cut and mixed records fail. Knows no tier.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import replace

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from tiercel.blocks import TAG_BYTES, BlockKey, Header, parse, payload_of, record_bytes
from tiercel.blocks.record import (
    ENCRYPTED_CODEC,
    HEADER_BYTES,
    INFO_BYTES_MAX,
    header_part,
    write_header,
)
from tiercel.tiers.base import MISSING, OK, Fate, Outcome
from tiercel.tiers.keyring import KeyRing

_CIPHER = "AES-256-GCM"
_NONCE_BYTES = 12
_ROOT_BYTES = 32
# The interpreter lock is held for one chunk at a time: 20 µs at 14 GB/s, measured for 64 KiB to 8 MiB.
_CHUNK_BYTES = 256 << 10
# Base64 of this much, with the rest of the info, still fits the page.
_PLAIN_HEADER_BYTES_MAX = (INFO_BYTES_MAX - 512) * 3 // 4


def encrypt(record: memoryview, into: memoryview, keys: KeyRing) -> int | str:
    """Write the encrypted record of a sealed one into another buffer: its bytes, or why it cannot be.

    Reads `record` without changing it; `into` is at least as long.
    """
    header = parse(record)
    if isinstance(header, str):
        return header
    size = record_bytes(header.payload_bytes)
    if header.codec == ENCRYPTED_CODEC or size > len(record):
        return "not a plain record"
    key = keys.derive(keys.first, header.key[:TAG_BYTES])
    assert key is not None
    plain = header_part(record)
    if len(plain) > _PLAIN_HEADER_BYTES_MAX:
        shorter = memoryview(bytearray(HEADER_BYTES))
        write_header(shorter, header, b"{}")
        plain = header_part(shorter)
    bound = _bound(header, keys.first)
    payload_nonce, nonce = os.urandom(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
    encryptor = Cipher(AES(key), GCM(payload_nonce)).encryptor()
    encryptor.authenticate_additional_data(bound)
    source, target = payload_of(record, header.payload_bytes), payload_of(into, header.payload_bytes)
    for at in range(0, len(source), _CHUNK_BYTES):
        encryptor.update_into(source[at : at + _CHUNK_BYTES], target[at : at + _CHUNK_BYTES])
    encryptor.finalize()
    info = {
        "cipher": _CIPHER,
        "key_id": keys.first,
        "payload_nonce": payload_nonce.hex(),
        "payload_tag": encryptor.tag.hex(),
        "nonce": nonce.hex(),
        "header": base64.b64encode(
            AESGCM(key).encrypt(nonce, plain, bound + payload_nonce + encryptor.tag)
        ).decode(),
    }
    shown = replace(
        header, root=bytes(_ROOT_BYTES), codec=ENCRYPTED_CODEC, checksum=xxhash.xxh3_128_digest(target)
    )
    write_header(into, shown, json.dumps(info).encode())
    end = HEADER_BYTES + header.payload_bytes
    into[end:size] = bytes(size - end)
    return size


def decrypt(record: memoryview, key: BlockKey, keys: KeyRing) -> Outcome:
    """Turn an encrypted record into the plain one, in place. OK only if every bit was authentic.

    MISSING where it was encrypted with a key that the ring lacks, CORRUPT where it is not what was written;
    the buffer then holds nothing of use.
    """
    opened = _open(record, key, keys)
    if isinstance(opened, Outcome):
        return opened
    header, plain, tenant_key = opened
    if HEADER_BYTES + header.payload_bytes > len(record):
        return Outcome(Fate.CORRUPT, "payload is cut short")
    info = header.info
    payload_tag = bytes.fromhex(str(info["payload_tag"]))
    decryptor = Cipher(
        AES(tenant_key), GCM(bytes.fromhex(str(info["payload_nonce"])), payload_tag)
    ).decryptor()
    decryptor.authenticate_additional_data(_bound(header, str(info["key_id"])))
    payload = payload_of(record, header.payload_bytes)
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, len(payload))))
    for at in range(0, len(payload), _CHUNK_BYTES):
        part = payload[at : at + _CHUNK_BYTES]
        # Through a buffer of its own: the library does not promise to work in place.
        decryptor.update_into(part, chunk)
        part[:] = chunk[: len(part)]
    try:
        decryptor.finalize()
    except InvalidTag:
        return Outcome(Fate.CORRUPT, "authentication failed")
    record[: len(plain)] = plain
    record[len(plain) : HEADER_BYTES] = bytes(HEADER_BYTES - len(plain))
    return OK


def decrypt_header(page: bytes, key: BlockKey, keys: KeyRing) -> bytes | Outcome:
    """The plain header page of an encrypted one, or what is wrong with it. Says nothing about the payload."""
    opened = _open(page, key, keys)
    return opened if isinstance(opened, Outcome) else opened[1].ljust(HEADER_BYTES, b"\0")


def key_id_of(record: memoryview) -> str:
    """The name of the key an encrypted record says it was encrypted with."""
    header = parse(record)
    return "" if isinstance(header, str) else str(header.info.get("key_id"))


def _open(record: memoryview | bytes, key: BlockKey, keys: KeyRing) -> tuple[Header, bytes, bytes] | Outcome:
    """The outer header, the plain inner one and the tenant's key."""
    header = parse(record)
    if isinstance(header, str):
        return Outcome(Fate.CORRUPT, header)
    if header.key != key:
        return Outcome(Fate.CORRUPT, "another block's record")
    if header.codec != ENCRYPTED_CODEC:
        return Outcome(Fate.CORRUPT, "not encrypted")
    try:
        key_id = str(header.info["key_id"])
        payload_nonce, payload_tag, nonce = (
            bytes.fromhex(str(header.info[name])) for name in ("payload_nonce", "payload_tag", "nonce")
        )
        sealed = base64.b64decode(str(header.info["header"]), validate=True)
    except (KeyError, ValueError):
        return Outcome(Fate.CORRUPT, "encrypted in another way")
    if (len(payload_nonce), len(payload_tag), len(nonce)) != (_NONCE_BYTES, 16, _NONCE_BYTES):
        return Outcome(Fate.CORRUPT, "encrypted in another way")
    tenant_key = keys.derive(key_id, key[:TAG_BYTES])
    if tenant_key is None:
        return MISSING
    try:
        plain = AESGCM(tenant_key).decrypt(
            nonce, sealed, _bound(header, key_id) + payload_nonce + payload_tag
        )
    except InvalidTag:
        return Outcome(Fate.CORRUPT, "authentication failed")
    return header, plain, tenant_key


def _bound(header: Header, key_id: str) -> bytes:
    """What is authenticated beside the bytes: the record's place in the world."""
    numbers = header.payload_bytes.to_bytes(8, "little") + header.depth.to_bytes(4, "little")
    return b"tiercel record 1" + header.key + numbers + key_id.encode()
