"""Reading traces: both dialects, gzip, order, ids; and every way a line can be wrong."""

from __future__ import annotations

import gzip
import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tiercel.errors import TraceError
from tiercel.plan.simulate import Trace, read_trace

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}'


def line(**fields: object) -> str:
    return json.dumps(json.loads(GOOD) | fields)


def read(tmp_path: Path, *lines: str, **options: object) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(text + "\n" for text in lines))
    return read_trace(path, **options)  # type: ignore[arg-type]


def chain_lists(trace: Trace) -> list[list[int]]:
    return [trace.blocks[a:b].tolist() for a, b in pairwise(trace.offsets.tolist())]


def test_a_mooncake_file(tmp_path: Path) -> None:
    trace = read(tmp_path, GOOD, line(timestamp=1500, input_length=1025, hash_ids=[7, 9, 10]))
    assert trace.block_tokens == 512
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.input_tokens.tolist() == [600, 1025]
    assert trace.output_tokens.tolist() == [5, 5]
    assert chain_lists(trace) == [[0, 1], [0, 2, 3]]
    assert trace.parents.tolist() == [-1, 0, 0, 2]
    assert not trace.rechained


def test_own_format_states_block_size_and_may_leave_the_incomplete_block_out(tmp_path: Path) -> None:
    header = '{"format": "tiercel-trace", "version": 1, "block_tokens": 256}'
    trace = read(tmp_path, header, line(input_length=600, hash_ids=[1, 2], session=4, scope="a"))
    assert trace.block_tokens == 256
    assert chain_lists(trace) == [[0, 1]]


def test_output_length_may_be_missing(tmp_path: Path) -> None:
    trace = read(tmp_path, '{"timestamp": 0, "input_length": 3, "hash_ids": [1]}')
    assert trace.output_tokens.tolist() == [0]


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress((GOOD + "\n").encode()))
    assert read_trace(path).request_count == 1


def test_a_byte_order_mark_and_dos_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n".encode())
    assert read_trace(path).request_count == 2
    path.write_bytes(b"\xef\xbb\xbf")
    assert read_trace(path).request_count == 0


@pytest.mark.parametrize("first", ["", '{"format": "tiercel-trace", "x": '])
def test_a_line_nested_too_deeply_is_one_line(tmp_path: Path, first: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(first + "[" * 100_000 + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 1: ") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_truncated_gzip_is_one_line(tmp_path: Path) -> None:
    whole = gzip.compress((GOOD + "\n").encode() * 500)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"trace.jsonl.gz, after line \d+: damaged gzip"):
        read_trace(path)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(GOOD.encode()))))
    assert read_trace("-").request_count == 1


def test_requests_are_sorted_by_arrival_with_their_blocks(tmp_path: Path) -> None:
    trace = read(tmp_path, line(timestamp=9, hash_ids=[5, 6]), line(timestamp=3, hash_ids=[5, 7]))
    assert trace.arrival_s.tolist() == [0.003, 0.009]
    assert chain_lists(trace) == [[0, 2], [0, 1]]


def test_ids_without_their_prefix_are_renamed_by_prefix(tmp_path: Path) -> None:
    trace = read(tmp_path, line(hash_ids=[1, 3]), line(hash_ids=[2, 3]), line(hash_ids=[1, 3]))
    assert trace.rechained
    assert chain_lists(trace) == [[0, 1], [2, 3], [0, 1]]


def test_large_sparse_ids(tmp_path: Path) -> None:
    trace = read(tmp_path, line(hash_ids=[2**64 - 1, 5]), line(hash_ids=[2**64 - 1, 2**63]))
    assert chain_lists(trace) == [[2, 0], [2, 1]]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_an_empty_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    trace = read_trace(path)
    assert (trace.request_count, trace.block_count, trace.duration_s) == (0, 0, 0.0)
    assert trace.block_hit_ratio_max == 0.0


BAD_LINES = {
    "{": "not JSON",
    "3": "is 3; accepted: a JSON object",
    '{"input_length": 1, "hash_ids": [1]}': "field 'timestamp' is missing",
    '{"timestamp": 0, "hash_ids": [1]}': "field 'input_length' is missing",
    '{"timestamp": 0, "input_length": 1}': "field 'hash_ids' is missing",
    line(timestamp=-1): "field 'timestamp' is -1; accepted: milliseconds, 0 to 1e",
    line(timestamp="noon"): "field 'timestamp' is \"noon\"",
    line(timestamp=True): "field 'timestamp' is true",
    line(timestamp=1e300): "field 'timestamp' is 1e",
    line(input_length=-600): "field 'input_length' is -600; accepted: a whole number of tokens",
    line(input_length=600.5): "field 'input_length' is 600.5",
    line(input_length=None): "field 'input_length' is null",
    line(output_length=2**40): "field 'output_length' is 1099511627776",
    line(hash_ids="7"): "field 'hash_ids' is \"7\"; accepted: a list",
    line(hash_ids=[7, "x"]): "field 'hash_ids' holds \"x\"; accepted: whole numbers",
    line(hash_ids=[7, -1]): "field 'hash_ids' holds -1",
    line(hash_ids=[7, 2**64]): "field 'hash_ids' holds 18446744073709551616",
    line(hash_ids=[7]): None,
    line(
        hash_ids=[7, 8, 9]
    ): "'hash_ids' has 3 ids for input_length 600 at 512 tokens per block; accepted: 2, or 1",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_names_file_line_field_value_accepted(tmp_path: Path, bad: str) -> None:
    told = BAD_LINES[bad]
    if told is None:  # the control: a line that looks odd and is right
        assert read(tmp_path, GOOD, bad).request_count == 2
        return
    with pytest.raises(TraceError) as caught:
        read(tmp_path, GOOD, "", bad)
    assert str(caught.value).startswith(f"{tmp_path / 'trace.jsonl'}, line 3: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    bad = [text for text, told in BAD_LINES.items() if told]
    trace = read(tmp_path, GOOD, *bad, GOOD, skip_bad_lines=True)
    assert trace.request_count == 2
    assert trace.bad_lines == len(bad)
    assert "line 2: not JSON" in trace.first_bad_line


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ('{"format": "tiercel-trace", "version": 2, "block_tokens": 16}', "version 2; accepted"),
        ('{"format": "tiercel-trace", "version": 1}', "bad header"),
        ('{"format": "tiercel-trace", "version": 1, "block_tokens": 0}', "bad header"),
    ],
)
def test_a_bad_header_is_never_skipped(tmp_path: Path, header: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        read(tmp_path, header, GOOD, skip_bad_lines=True)


def test_block_tokens_must_not_contradict_the_header(tmp_path: Path) -> None:
    header = '{"format": "tiercel-trace", "version": 1, "block_tokens": 16}'
    with pytest.raises(TraceError, match="'block_tokens' is 16, asked for was 512"):
        read(tmp_path, header, block_tokens=512)
    assert read(tmp_path, line(input_length=30, hash_ids=[1, 2]), block_tokens=16).block_tokens == 16


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / name)
