"""A router that reads KV events as llm-d's does (llm-d-router's pkg/kvevents and pkg/kvcache, autumn 2026).

Three frames; maps with a `type`; hashes cut to their last eight bytes; media in lower case, none is the GPU;
keys of its own, from tokens and the strings among the extra keys, in blocks of its own size; a block whose
parent it does not know is left out; what was stored twice must be removed twice; gaps are asked for again.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "medium", "extra_keys")


def engine_key(raw: bytes | int) -> int:
    """The last eight bytes of a hash."""
    return int.from_bytes(raw[-8:], "big") if isinstance(raw, bytes) else raw & ((1 << 64) - 1)


def parse_topic(topic: str) -> tuple[str, str]:
    parts = topic.split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic, "")


@dataclass
class Router:
    """What one router knows of one pod."""

    block_tokens: int
    model: str = ""
    entries: dict[bytes, set[str]] = field(default_factory=dict)
    keys_of: dict[int, list[bytes]] = field(default_factory=dict)
    stored: Counter[tuple[str, int]] = field(default_factory=Counter)
    orphans: int = 0
    cleared: int = 0

    # What it is asked.

    def expects(self, tokens: Sequence[int], *media: str) -> int:
        """Tokens at the beginning that the pod has, in one of `media` or anywhere below the GPU."""
        found = 0
        for key in self._keys(b"", tokens, [()] * (len(tokens) // self.block_tokens)):
            there = self.entries.get(key, set()) - {"gpu"}
            if not (there & set(media) if media else there):
                break
            found += self.block_tokens
        return found

    def media(self) -> set[str]:
        return {medium for there in self.entries.values() for medium in there}

    # What it is told.

    def take(self, frames: Sequence[bytes]) -> None:
        topic, _, payload = frames
        pod, self.model = parse_topic(topic.decode())
        assert pod, "the topic is in three parts"
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            assert isinstance(event, dict), "events are maps"
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self._removed(event)
                case "AllBlocksCleared":
                    self.clear()
                case other:
                    raise AssertionError(f"unknown event {other}")

    def clear(self) -> None:
        """Every tier of the pod."""
        self.entries.clear()
        self.stored.clear()
        self.cleared += 1

    def _stored(self, event: dict[str, Any]) -> None:
        hashes = [engine_key(one) for one in event["block_hashes"]]
        if event.get("group_idx") is not None and event.get("kv_cache_spec_kind") not in (
            "full_attention",
            "mla_attention",
            "sink_full_attention",
        ):
            return
        parent = b""
        if event["parent_block_hash"] is not None:
            known = self.keys_of.get(engine_key(event["parent_block_hash"]))
            if known is None:
                self.orphans += 1
                return
            parent = known[-1]
        tokens, count = event["token_ids"], len(event["token_ids"]) // self.block_tokens
        medium = (event.get("medium") or "gpu").lower()
        keys = self._keys(parent, tokens, self._features(event.get("extra_keys"), count))
        if not keys:
            return
        for at, one in enumerate(hashes):
            first = at * len(keys) // len(hashes)
            last = max((at + 1) * len(keys) // len(hashes), first + 1)
            self.keys_of[one] = keys[first:last]
        for key in keys:
            self.entries.setdefault(key, set()).add(medium)
        self.stored.update((medium, one) for one in hashes)

    def _removed(self, event: dict[str, Any]) -> None:
        medium = (event.get("medium") or "gpu").lower()
        for one in map(engine_key, event["block_hashes"]):
            if self.stored[medium, one] > 1:
                self.stored[medium, one] -= 1
                continue
            del self.stored[medium, one]
            keys = self.keys_of.get(one, [])
            for key in keys:
                self.entries.get(key, set()).discard(medium)
                if not self.entries.get(key):
                    self.entries.pop(key, None)
            if not any(key in self.entries for key in keys):
                self.keys_of.pop(one, None)

    @staticmethod
    def _features(raw: list[list[Any] | None] | None, count: int) -> list[tuple[str, ...]]:
        """Strings among the extra keys (media, and salts too), for `count` blocks of the router's size."""
        if raw is None or not count:
            return [()] * count
        ours = [tuple(str(one[0] if isinstance(one, list) else one) for one in block or ()) for block in raw]
        if len(ours) <= count:
            return [ours[at * len(ours) // count] for at in range(count)]
        merged: list[tuple[str, ...]] = [()] * count
        for at, one in enumerate(ours):
            merged[at * count // len(ours)] += one
        return merged

    def _keys(self, parent: bytes, tokens: Sequence[int], features: list[tuple[str, ...]]) -> list[bytes]:
        keys = []
        for number, extra in enumerate(features):
            chunk = tokens[number * self.block_tokens : (number + 1) * self.block_tokens]
            words = parent + struct.pack(f"<{len(chunk)}I", *chunk) + repr(extra).encode()
            parent = hashlib.blake2b(words, digest_size=8).digest()
            keys.append(parent)
        return keys


class Subscriber:
    """The sockets of a router: what is published, and what was missed."""

    def __init__(self, router: Router, events: str, replay: str) -> None:
        self.router = router
        self._context = zmq.Context.instance()
        self._replay = replay
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(events)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.last = -1
        self.replayed = 0
        self.lose: set[int] = set()

    def read(self, within_s: float = 0.15) -> None:
        """All that has come, until nothing did for so long."""
        while self._socket.poll(int(within_s * 1000)):
            self._live(self._socket.recv_multipart())

    def _live(self, frames: list[bytes]) -> None:
        assert len(frames) == 3
        number = int.from_bytes(frames[1], "big")
        if number in self.lose or number <= self.last:
            return
        if number > self.last + 1:
            self.ask(self.last + 1)
        if number == self.last + 1:
            self._take(number, frames)

    def ask(self, first: int) -> None:
        """Have everything from `first` on told again."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            expected = first
            while dealer.poll(5000):
                frames = [one for at, one in enumerate(dealer.recv_multipart()) if at or one]
                if len(frames) == 3 and not frames[2]:
                    return
                number = int.from_bytes(frames[1], "big")
                if number > expected:
                    self.router.clear()
                self._take(number, frames)
                self.replayed += 1
                expected = number + 1
        raise AssertionError("nobody replays")

    def _take(self, number: int, frames: list[bytes]) -> None:
        self.router.take(frames)
        self.last = number

    def close(self) -> None:
        self._socket.close(linger=0)
