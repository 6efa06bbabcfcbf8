"""The size report: parts, totals, formulas, the reverse question, and weights against KV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.plan import catalogue, size
from tiercel.plan.parallel import Parallel
from tiercel.plan.weights import Parameters, count_parameters, weight_format

BF16 = kv_dtype("bfloat16")
FIXTURES = sorted((Path(__file__).parents[1] / "geometry" / "fixtures").glob("*.json"))


def report_of(name: str, tokens: int = 32_768, batch: int = 1, dtype: str = "bfloat16") -> size.SizeReport:
    model = catalogue.find_model(name)
    assert model is not None
    return size.measure(KVGeometry.from_config(model.config), kv_dtype(dtype), tokens, batch)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_groups_add_up_to_the_whole(path: Path) -> None:
    report = size.measure(KVGeometry.from_config(path), BF16, 5000, batch=3)
    assert sum(g.sequence_bytes for g in report.groups) - report.sequence_bytes in range(
        len(report.groups) + 1
    )
    assert report.total_bytes == 3 * report.sequence_bytes
    grows = sum(g.bytes_per_token for g in report.groups if g.group.window_tokens is None)
    assert grows == report.bytes_per_token


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_formula_shown_gives_the_number_shown(path: Path) -> None:
    """Read the text back as arithmetic: an oracle that shares no code with the sizes."""
    report = size.measure(KVGeometry.from_config(path), BF16, 1000)
    for group in report.groups:
        text = group.formula
        if "read another" in text:
            continue
        text = re.sub(r"(?<=\d),(?=\d)", "", text)
        text = re.sub(r"[A-Za-z]+", "", text).replace("×", "*").replace("÷", "/")
        if group.group.source_tokens is None and group.group.kind == "cross":
            continue
        value = eval(text, {"__builtins__": {}})  # noqa: S307 - the text is this test's own
        assert value == pytest.approx(float(group.bytes_per_token or group.fixed_bytes), rel=1e-12)


def test_llama_2_in_numbers() -> None:
    report = report_of("llama-2-7b", tokens=512, batch=56)
    assert report.bytes_per_token == 2 * 32 * 32 * 128 * 2 == 524_288
    assert report.batch * report.tokens == 28_672
    assert report.total_bytes == 14 * 2**30


@pytest.mark.parametrize(("tokens", "batch"), [(-1, 1), (10**13, 1), (1, 0), (1, -5)])
def test_workloads_out_of_range_are_refused(tokens: int, batch: int) -> None:
    with pytest.raises(ConfigError, match="accepted: a whole number"):
        report_of("llama-3.1-8b", tokens, batch)


@given(
    st.sampled_from(FIXTURES),
    st.integers(0, 10**13),
    st.sampled_from(["exact", "vllm"]),
    st.sampled_from([1, 2, 4]),
)
def test_the_longest_sequence_that_fits_is_found_by_search(
    path: Path, budget: int, engine: str, pp: int
) -> None:
    geometry = KVGeometry.from_config(path)
    report = size.measure(
        geometry, BF16, 1000, parallel=Parallel(pp=min(pp, geometry.num_layers)), engine=engine
    )
    fit = size.fit_into(report, budget)

    def held(tokens: int) -> int:
        return size.rank_sequence_bytes(report.stored, tokens, BF16, report.parallel)

    if fit.tokens is None:
        assert held(size.TOKENS_MAX) <= budget
    else:
        assert held(fit.tokens) <= budget or fit.tokens == 0
        assert held(fit.tokens + 1) > budget
    assert fit.sequences * held(1000) <= budget


def test_windows_make_any_length_fit() -> None:
    report = report_of("mistral-7b-v0.1")
    assert size.fit_into(report, 600_000_000).tokens is None
    assert size.fit_into(report, 500_000_000).tokens == 500_000_000 // 131_072


def test_kv_overtakes_the_weights_where_it_says() -> None:
    report = report_of("llama-2-7b", tokens=2048)
    parameters = count_parameters("llama", catalogue.models()["meta-llama/Llama-2-7b-hf"].config)
    assert parameters is not None
    row = size.weight_row(report, parameters, weight_format("bf16"))
    assert row.nbytes == 2 * parameters.total == 13_476_831_232
    assert row.tokens == -(-row.nbytes // 524_288) == 25_706
    assert row.sequences == -(-row.nbytes // (2048 * 524_288)) == 13


def test_windows_alone_never_overtake_the_weights() -> None:
    row = size.weight_row(
        report_of("mistral-7b-v0.1"), Parameters(7 * 10**9, 0, "given"), weight_format("bf16")
    )
    assert row.tokens is None
    assert row.sequences == -(-14 * 10**9 // (4096 * 131_072))


def test_json_has_the_seven_keys() -> None:
    assert set(size.as_json(report_of("gpt-oss-120b"))) == {
        "bytes_per_token",
        "window_bytes_per_token",
        "window_tokens",
        "fixed_state_bytes",
        "total_bytes",
        "per_rank",
        "groups",
    }


def test_json_numbers_are_whole_where_they_are_whole() -> None:
    whole = size.as_json(report_of("llama-3.1-8b"))
    assert isinstance(whole["bytes_per_token"], int)
    assert size.as_json(report_of("deepseek-v4-flash"))["bytes_per_token"] == 3850.25
