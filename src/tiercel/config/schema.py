"""Every setting there is: its name, type, default, bounds and one line of explanation.

This is the only list; the loader, the reference page and the suggestions for misspelt names read it.
A setting is called in files, variables and flags like its field without the unit (`size_bytes` is `size`),
because there the value carries the unit. Fewer than 40 settings is a promise, checked by a test.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = dataclasses.MISSING  # in place of a default: the setting must be given
KIB, MIB, GIB = 2**10, 2**20, 2**30
FILES = "files"
MEMORY = "memory"
# Kinds of tiers that come with Tiercel; other packages add theirs as entry points.
TIER_KINDS = (FILES, MEMORY, "valkey", "objects", "mooncake")


class Kind(enum.Enum):
    """How the text of a setting is read."""

    SIZE = "size"
    DURATION = "duration"
    INTEGER = "integer"
    SHARE = "share"
    CHOICE = "choice"
    FLAG = "flag"
    TEXT = "text"
    URL = "url"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is accepted for one field. Bounds are inclusive, in the field's own unit."""

    kind: Kind
    doc: str
    low: float = 0
    high: float = float("inf")
    choices: tuple[str, ...] = ()


def setting(kind: Kind, default: object, doc: str, **bounds: Any) -> Any:
    """Declare a field that is a setting; Any, as dataclasses.field is, so that the annotation rules."""
    # A URL may hold a password; it is shown only by those who mask it.
    return dataclasses.field(
        default=default, repr=kind is not Kind.URL, metadata={"setting": Setting(kind, doc, **bounds)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RamConfig:
    """The arena: the tier in host memory."""

    size_bytes: int = setting(Kind.SIZE, 2 * GIB, "memory for cached blocks", low=MIB)
    kind: str = setting(
        Kind.CHOICE, "private", "private to the process, or shared memory", choices=("private", "shared")
    )
    reserved_slots: int = setting(
        Kind.INTEGER, 4, "slots kept free so that a full arena can still load", low=1, high=4096
    )
    slot_bytes: int = setting(
        Kind.SIZE, 0, "room for one block; 0B: what the first engine of a daemon asks for", high=GIB
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One place below RAM; the first in the list is asked first."""

    kind: str = setting(
        Kind.TEXT,
        "files",
        f"the kind of place: {', '.join(TIER_KINDS)}, or one that an installed package adds",
    )
    # `setting` only declares; the linter knows that of dataclasses.field, and of a Path it is wary.
    path: Path | None = setting(Kind.PATH, None, "directory of its own for the blocks (files)")  # noqa: RUF009
    url: str | None = setting(Kind.URL, None, "where the place is, with its options (not files, not memory)")
    size_bytes: int | None = setting(
        Kind.SIZE,
        None,
        "most bytes the tier may hold (needed for files and memory; elsewhere not set: no cap of ours)",
        low=MIB,
    )
    write: str = setting(
        Kind.CHOICE,
        "through",
        "when a block is written: at once, when RAM evicts it (what memory does unless told), or never",
        choices=("through", "on-evict", "off"),
    )
    write_per_day_bytes: int | None = setting(
        Kind.SIZE,
        None,
        "most bytes to write there per day, an hour's share at once; for disks that wear",
        low=MIB,
    )
    read_workers: int = setting(Kind.INTEGER, 2, "reads at a time", low=1, high=64)
    write_workers: int = setting(Kind.INTEGER, 1, "writes at a time", low=1, high=64)
    deadline_s: float = setting(Kind.DURATION, 5.0, "longest wait for one batch", low=0.001, high=3600)
    required: bool = setting(
        Kind.FLAG, False, "refuse to start while the place does not answer, instead of going on without it"
    )
    codec: str = setting(
        Kind.CHOICE,
        "none",
        "how blocks are kept there: as they are, smaller and exactly so, or nearly (docs/codecs.md)",
        choices=("none", "lossless", "int8", "fp8", "int4"),
    )
    encrypt: str | None = setting(
        Kind.TEXT, None, "encrypt what lies there with the key from `file:PATH`, `env:NAME` or `command:...`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Movement between tiers."""

    read_queue_blocks: int = setting(
        Kind.INTEGER, 1024, "blocks that may wait to be read; more are misses", low=1, high=10**6
    )
    write_queue_blocks: int = setting(
        Kind.INTEGER, 1024, "blocks that may wait to be written; more are dropped", low=1, high=10**6
    )
    admission: str = setting(
        Kind.CHOICE,
        "at-once",
        "store a block at once, or when it comes by for the second time",
        choices=("at-once", "second-sight"),
    )
    load: str = setting(
        Kind.CHOICE,
        "when-faster",
        "load what is stored where that is expected to be faster than computing it, or always",
        choices=("when-faster", "always"),
    )
    accept_lossy: str = setting(
        Kind.TEXT,
        "no",
        "whether codecs may change answers: `no`, `yes`, or the report of an evaluation that shows how much",
    )
    load_deadline_s: float = setting(
        Kind.DURATION, 10.0, "longest wait for a prefix; then it is recomputed", low=0.001, high=3600
    )
    flush_deadline_s: float = setting(
        Kind.DURATION, 30.0, "longest wait for writes when the store closes", low=0.001, high=3600
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The HTTP server."""

    host: str = setting(Kind.TEXT, "127.0.0.1", "address to listen on")
    port: int = setting(Kind.INTEGER, 8000, "port to listen on; 0 takes a free one", high=65535)
    queue_requests: int = setting(
        Kind.INTEGER, 32, "requests that may wait; more are refused with 429", low=1, high=10**5
    )
    request_deadline_s: float = setting(
        Kind.DURATION, 600.0, "longest time for one request", low=0.001, high=86400
    )
    max_body_bytes: int = setting(Kind.SIZE, 16 * MIB, "largest request body", low=KIB)
    max_answer_tokens: int = setting(
        Kind.INTEGER, 4096, "most tokens one request may generate", low=1, high=10**7
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How the engine runs the model."""

    dtype: str = setting(
        Kind.CHOICE,
        "auto",
        "number format of weights and cache; auto is the model's own",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = setting(Kind.CHOICE, "auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    # A block is also a prefill step. For SmolLM2-135M at 6,000 tokens on two cores, steps of 256 tokens cost
    # 5-7 % over one plain step, 128 cost 9-24 %, 64 cost 30 %; what is computed anew at every resume, half a
    # block on average, takes 0.43 s, 0.24 s and 0.14 s.
    block_tokens: int = setting(Kind.INTEGER, 256, "tokens in a block, the unit of reuse", low=1, high=65536)
    kv_device_budget_bytes: int | None = setting(
        Kind.SIZE, None, "most KV on the device, the rest lies in host memory; not set: all of it", low=KIB
    )
    batch: int = setting(
        Kind.INTEGER,
        1,
        "answers that take their steps together; above 1 they may round otherwise",
        low=1,
        high=64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """What answers read of a prompt, in the transformers engine."""

    policy: str = setting(
        Kind.TEXT,
        "full",
        "all of it, or what a method of `tiercel eval` keeps or fetches: changes answers (docs/eval.md)",
    )
    budget: float = setting(
        Kind.SHARE, 0.25, "share of a prompt's tokens that a policy keeps, or reads per new token"
    )
    chunks: str = setting(
        Kind.TEXT,
        "no",
        "reuse chunks anywhere, with so many first tokens computed anew, such as `16`: changes answers",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The store as a process of its own, shared by the engines of a host."""

    # None cannot be written; it stands for `default_socket()`, which needs the environment.
    socket: Path | None = setting(Kind.PATH, None, "Unix socket to serve on or connect to")  # noqa: RUF009


# Sections of one instance each, by their name in the file. Tiers are a list and stand apart.
SECTIONS: dict[str, type[Any]] = {
    "ram": RamConfig,
    "store": StoreConfig,
    "daemon": DaemonConfig,
    "serve": ServeConfig,
    "model": ModelConfig,
    "attention": AttentionConfig,
}
TIERS = "tiers"
TIERS_MAX = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting in place: its section, its name for people, its field and its declaration."""

    section: str
    name: str
    field: dataclasses.Field[Any]
    setting: Setting

    @property
    def default(self) -> object:
        """The default, or dataclasses.MISSING where the setting must be given."""
        return self.field.default


def public_name(field_name: str) -> str:
    """Return a field's name in files, variables and flags: the same without its unit.

    Only units that the value itself carries are dropped; a count keeps its noun (`block_tokens`).
    """
    for suffix in ("_bytes", "_s"):
        if field_name.endswith(suffix):
            return field_name.removesuffix(suffix)
    return field_name


def entries() -> Iterator[Entry]:
    """Yield every setting in the order of the reference page; those of a tier once."""
    for section, cls in {"ram": RamConfig, TIERS: TierConfig, **SECTIONS}.items():
        for field in dataclasses.fields(cls):
            yield Entry(section, public_name(field.name), field, field.metadata["setting"])
