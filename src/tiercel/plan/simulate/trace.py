"""Read request traces (JSON lines) into a few compact arrays, one line at a time.

A line is a request: when it came, how long it was, and which blocks it needs. Two dialects are read, and
may be gzipped: Mooncake's public traces (512 tokens per block), and Tiercel's own access log, the same
lines after a header that says the version and the block size. Nothing here simulates anything.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tiercel.errors import TraceError

FORMAT_NAME = "tiercel-trace"
FORMAT_VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
LINE_BYTES_MAX = 64 << 20
TOKENS_MAX = 2**31 - 1
TIMESTAMP_MS_MAX = 1e15
BLOCK_ID_MAX = 2**64 - 1
_GZIP_MAGIC = b"\x1f\x8b"

Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
Stamp = Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MS_MAX)]


class _Line(msgspec.Struct):
    timestamp: Stamp
    input_length: Count
    hash_ids: list[int]
    output_length: Count = 0


class _Header(msgspec.Struct):
    format: str
    version: int
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    `blocks[offsets[i]:offsets[i + 1]]` are request i's blocks, root first, as dense numbers below
    `block_count`. Such a number names a block *and everything before it*, so each has one parent:
    `parents[b]`, or -1 for a root. `rechained` tells that the file's own ids did not have that property,
    and that ids were renamed by the prefix they follow.
    """

    source: str
    block_tokens: int
    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    rechained: bool = False
    bad_lines: int = 0
    first_bad_line: str = ""

    @property
    def request_count(self) -> int:
        return len(self.arrival_s)

    @property
    def block_count(self) -> int:
        """How many different blocks there are: what an unbounded cache would hold at the end."""
        return len(self.parents)

    @property
    def duration_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0]) if self.request_count else 0.0

    @property
    def block_hit_ratio_max(self) -> float:
        """Share of block references that an unbounded cache serves: all but the first of each block."""
        return 1 - self.block_count / len(self.blocks) if len(self.blocks) else 0.0


@dataclass(slots=True)
class _Columns:
    """What has been read so far; arrays of machine numbers, so that a million requests stay small."""

    arrival_ms: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    chain_blocks: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("Q"))


def read_trace(path: str | Path, *, block_tokens: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read a trace file, or standard input for `-`; gzip is recognised by its first bytes.

    `block_tokens` is for files without a header and defaults to 512, Mooncake's. A bad line raises
    TraceError naming file, line, field, value and what is accepted; with `skip_bad_lines` it is counted.
    """
    source = str(path)
    columns = _Columns()
    header_tokens: int | None = None
    bad, first_bad = 0, ""
    for number, line in _lines(source):
        if number == 1 and b'"' + FORMAT_NAME.encode() + b'"' in line:
            header_tokens = _read_header(source, line, block_tokens)
            continue
        try:
            _append(columns, line, header_tokens or block_tokens or MOONCAKE_BLOCK_TOKENS)
        except _BadLineError as error:
            text = f"{source}, line {number}: {error}"
            if not skip_bad_lines:
                raise TraceError(text) from None
            bad, first_bad = bad + 1, first_bad or text
    return build_trace(
        source,
        header_tokens or block_tokens or MOONCAKE_BLOCK_TOKENS,
        np.frombuffer(columns.arrival_ms, dtype=np.float64) / 1e3,
        np.frombuffer(columns.input_tokens, dtype=np.int64),
        np.frombuffer(columns.output_tokens, dtype=np.int64),
        np.frombuffer(columns.chain_blocks, dtype=np.int64),
        np.frombuffer(columns.ids, dtype=np.uint64),
        bad_lines=bad,
        first_bad_line=first_bad,
    )


def build_trace(
    source: str,
    block_tokens: int,
    arrival_s: npt.NDArray[np.float64],
    input_tokens: npt.NDArray[np.int64],
    output_tokens: npt.NDArray[np.int64],
    chain_blocks: npt.NDArray[np.int64],
    ids: npt.NDArray[np.uint64],
    *,
    bad_lines: int = 0,
    first_bad_line: str = "",
) -> Trace:
    """Return the Trace of raw columns: sorted by arrival, ids made dense and each with one parent."""
    offsets = np.concatenate(([0], np.cumsum(chain_blocks))).astype(np.int64)
    order = np.argsort(arrival_s, kind="stable")
    if len(order) and np.any(np.diff(order) != 1):
        arrival_s, input_tokens, output_tokens = arrival_s[order], input_tokens[order], output_tokens[order]
        pieces = [ids[offsets[i] : offsets[i + 1]] for i in order]
        ids = np.concatenate(pieces) if pieces else ids
        offsets = np.concatenate(([0], np.cumsum(chain_blocks[order]))).astype(np.int64)
    blocks, block_count = _dense(ids)
    parents = _one_parent_each(blocks, offsets, block_count)
    rechained = parents is None
    if parents is None:
        blocks, parents = _rechain(blocks, offsets)
    return Trace(
        source, block_tokens, arrival_s, input_tokens, output_tokens, offsets, blocks, parents,
        rechained, bad_lines, first_bad_line,
    )  # fmt: skip


def header_line(block_tokens: int) -> str:
    """Return the first line of a file in Tiercel's own format, with its line end."""
    header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "block_tokens": block_tokens}
    return msgspec.json.encode(header).decode() + "\n"


def _lines(source: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of every line that is not blank."""
    number = 0
    try:
        with _open(source) as stream:
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{source}, line {number}: longer than {LINE_BYTES_MAX} bytes")
                if line and not line.isspace():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{source}, after line {number}: damaged gzip data ({error})") from None
    except OSError as error:
        raise TraceError(f"trace '{source}' cannot be read: {error.strerror or error}") from None


@contextmanager
def _open(source: str) -> Iterator[Any]:
    """A buffered binary stream of the file's text, unpacked; standard input is left open."""
    with ExitStack() as closing:
        stream: Any = sys.stdin.buffer if source == "-" else closing.enter_context(Path(source).open("rb"))
        if stream.peek(2)[:2] == _GZIP_MAGIC:
            stream = closing.enter_context(gzip.GzipFile(fileobj=stream))
        yield stream


class _BadLineError(Exception):
    """What is wrong with one line: field, value, accepted."""


_line_decoder = msgspec.json.Decoder(_Line)


def _append(columns: _Columns, line: bytes, block_tokens: int) -> None:
    try:
        request = _line_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _BadLineError(_diagnose(line)) from None
    ids = request.hash_ids
    tokens = request.input_length
    # The last, incomplete block may have an id of its own (Mooncake) or none (logs of full blocks).
    if not tokens // block_tokens <= len(ids) <= -(-tokens // block_tokens):
        raise _BadLineError(
            f"'hash_ids' has {len(ids)} ids for input_length {tokens} at {block_tokens} tokens per block; "
            f"accepted: {-(-tokens // block_tokens)}, or {tokens // block_tokens} without the incomplete one"
        )
    try:
        packed = array("Q", ids)
    except (OverflowError, TypeError):
        raise _BadLineError(_diagnose(line)) from None
    columns.ids.extend(packed)
    columns.arrival_ms.append(request.timestamp)
    columns.input_tokens.append(tokens)
    columns.output_tokens.append(request.output_length)
    columns.chain_blocks.append(len(ids))


def _diagnose(line: bytes) -> str:
    """Say what the strict decoder did not like, in words that name field, value and what is accepted."""
    try:
        row = msgspec.json.decode(line)
    except RecursionError:
        return f"nested too deeply: {line[:40]!r}; accepted: one JSON object per line"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"not JSON ({error}): {line[:40]!r}; accepted: one JSON object per line"
    if not isinstance(row, dict):
        return f"is {_shown(row)}; accepted: a JSON object with timestamp, input_length, hash_ids"
    limits = {"timestamp": TIMESTAMP_MS_MAX, "input_length": TOKENS_MAX, "output_length": TOKENS_MAX}
    for name, most in limits.items():
        if name not in row:
            if name == "output_length":
                continue
            return f"field '{name}' is missing"
        value = row[name]
        kinds = (int, float) if name == "timestamp" else (int,)
        if type(value) not in kinds or not 0 <= value <= most:
            what = "milliseconds" if name == "timestamp" else "a whole number of tokens"
            return f"field '{name}' is {_shown(value)}; accepted: {what}, 0 to {most:g}"
    if "hash_ids" not in row:
        return "field 'hash_ids' is missing"
    ids = row["hash_ids"]
    if not isinstance(ids, list):
        return f"field 'hash_ids' is {_shown(ids)}; accepted: a list of whole numbers"
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i <= BLOCK_ID_MAX), None)
    return f"field 'hash_ids' holds {_shown(wrong)}; accepted: whole numbers, 0 to 2^64-1"


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _read_header(source: str, line: bytes, block_tokens: int | None) -> int:
    where = f"{source}, line 1"
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{where}: bad header ({error}); accepted: {header_line(MOONCAKE_BLOCK_TOKENS).strip()}"
        ) from None
    if header.format != FORMAT_NAME or header.version != FORMAT_VERSION:
        raise TraceError(
            f"{where}: format '{header.format}' version {header.version}; "
            f"accepted: {FORMAT_NAME} version {FORMAT_VERSION}"
        )
    if block_tokens is not None and block_tokens != header.block_tokens:
        raise TraceError(
            f"{where}: 'block_tokens' is {header.block_tokens}, asked for was {block_tokens}; "
            "accepted: leave the option out"
        )
    return header.block_tokens


def _dense(ids: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int32], int]:
    """Return `ids` renumbered 0..n-1, and n."""
    if not len(ids):
        return np.zeros(0, dtype=np.int32), 0
    top = int(ids.max())
    if top >= 4 * len(ids) + 1024:
        unique, inverse = np.unique(ids, return_inverse=True)
        return inverse.astype(np.int32), len(unique)
    # Ids that are nearly dense already need a table, not a sort: an order less memory and time.
    used = np.zeros(top + 1, dtype=bool)
    used[ids] = True
    table = np.cumsum(used, dtype=np.int32) - 1
    return table[ids].astype(np.int32), int(table[-1]) + 1


def _one_parent_each(
    blocks: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], block_count: int
) -> npt.NDArray[np.int32] | None:
    """Return the parent of every block, or None if some block follows different blocks."""
    before = np.empty(len(blocks), dtype=np.int32)
    before[1:] = blocks[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    before[starts] = -1
    parents = np.full(block_count, -1, dtype=np.int32)
    parents[blocks] = before
    return parents if np.array_equal(parents[blocks], before) else None


def _rechain(
    blocks: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Rename every block by (prefix it follows, id), as its KV depends on both."""
    names: dict[tuple[int, int], int] = {}
    chained = array("i")
    parents = array("i")
    for start, end in pairwise(offsets.tolist()):
        node = -1
        for block in blocks[start:end].tolist():
            name = names.setdefault((node, block), len(names))
            if name == len(parents):
                parents.append(node)
            chained.append(name)
            node = name
    return np.frombuffer(chained, dtype=np.int32), np.frombuffer(parents, dtype=np.int32)
