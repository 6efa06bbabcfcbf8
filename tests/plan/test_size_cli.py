"""`tiercel size` as people and scripts call it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercel.cli import run
from tiercel.geometry.engines import Engine

FIXTURES = Path(__file__).parents[1] / "geometry" / "fixtures"
LLAMA = str(FIXTURES / "meta-llama--Meta-Llama-3.1-8B.json")


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(["size", *args]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(told(capsys, *args, "--json"))
    return result


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(["size", *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_file_and_a_name_give_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    by_file = as_json(capsys, LLAMA)
    assert by_file == as_json(capsys, "llama-3.1-8b")
    assert by_file["bytes_per_token"] == 131_072
    assert by_file["total_bytes"] == 32_768 * 131_072
    assert by_file["window_tokens"] is None


def test_a_configuration_on_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    given(Path(LLAMA).read_text(encoding="utf-8"))
    assert as_json(capsys, "-") == as_json(capsys, LLAMA)
    given("{}")
    assert "model_type: missing" in refused(capsys, "-")
    given("")
    assert "standard input: line 1: not JSON" in refused(capsys, "-")


def test_a_byte_order_mark_does_not_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + Path(LLAMA).read_bytes())
    assert as_json(capsys, str(file)) == as_json(capsys, LLAMA)


def test_a_memory_share_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("llama-3.1-8b", "--gpu", "h100", "--memory-share")
    assert "fit" in as_json(capsys, *args, "0.5")
    assert "--memory-share: nan" in refused(capsys, *args, "nan")


def test_the_text_shows_the_formula_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "llama-3.1-8b", "--tokens", "8192", "--batch", "16")
    assert "32 layers × 8 KV heads × (128 + 128) × 2 B = 131,072 B/token" in text
    assert "16 sequences × 8,192 tokens = 17.18 GB = 16.00 GiB" in text
    assert "Weights (8.03 B parameters" in text


def test_hybrid_text_has_all_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "qwen3.5-27b")
    assert "65,536 B per token" in text
    assert "fixed    153,944,064 B per sequence" in text
    assert "windowed 36,864 B per token, up to 128 tokens" in told(capsys, "gpt-oss-120b")


def test_the_reverse_question(capsys: pytest.CaptureFixture[str]) -> None:
    fit = as_json(capsys, "llama-3.1-8b", "--memory", "16GiB", "--tokens", "8192")["fit"]
    assert fit == {
        "kv_bytes_per_rank": 16 * 2**30,
        "weights_bytes_per_rank": None,
        "sequences": 16,
        "tokens_of_one_sequence": 131_072,
    }


def test_a_gpu_holds_what_its_weights_leave(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(
        capsys, "llama-3.1-8b", "--gpu", "h100", "--weights-dtype", "awq-int4", "--tokens", "8192"
    )
    weights = result["weights"]["bytes"]
    assert result["fit"]["weights_bytes_per_rank"] == weights
    assert result["fit"]["kv_bytes_per_rank"] == int(80 * 2**30 * 0.9) - weights
    assert result["fit"]["sequences"] == result["fit"]["kv_bytes_per_rank"] // (8192 * 131_072)
    two = as_json(capsys, "llama-3.1-8b", "--gpu", "h100", "--weights-dtype", "awq-int4", "--tp", "2")
    assert two["fit"]["weights_bytes_per_rank"] == -(-weights // 2)


def test_weights_that_do_not_fit_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the weights do not fit" in told(capsys, "llama-3.1-405b", "--gpu", "h100")


@pytest.mark.parametrize(
    "args",
    [
        ("deepseek-v3.2", "--tp", "8"),
        ("gemma-4-26B-A4B",),
        ("whisper-large-v3",),
        ("gpt-oss-120b", "--gpu", "h100", "--tp", "4", "--weights-dtype", "mxfp4"),
        ("llama-3.1-405b", "--gpu", "h100", "--tp", "8", "--pp", "2", "--batch", "64"),
    ],
)
def test_the_page_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    lines = told(capsys, *args).splitlines()
    assert len(lines) > 10
    assert [line for line in lines if len(line) > 80 and "https://" not in line] == []


def test_sequences_that_weigh_nothing_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "llama-3.1-8b", "--tokens", "0", "--memory", "1GiB")
    assert "any number of sequences of 0 tokens" in text
    assert "GiB  one of 122,533 tokens" in text
    assert "1,000,000,000" not in text


def test_ranks_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert "8.00 copies of the cache on the GPUs; distinct shards: 1" in told(
        capsys, "deepseek-v3", "--tp", "8"
    )
    rank = as_json(capsys, "qwen3-235b-a22b", "--tp", "8", "--batch", "2")["per_rank"]
    assert rank["bytes_per_token"] == 48_128
    assert rank["total_bytes"] == 2 * 32_768 * 48_128
    assert rank["all_ranks_bytes"] == 8 * rank["total_bytes"]
    assert rank["distinct_shards"] == 4


@pytest.mark.parametrize("engine", list(Engine))
def test_every_engine_prints(capsys: pytest.CaptureFixture[str], engine: Engine) -> None:
    assert f"storage: {engine.value}" in told(capsys, "qwen3.5-27b", "--engine", engine.value)


def test_cross_attention_asks_for_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--source-tokens" in told(capsys, "llama-3.2-11b-vision")
    with_images = as_json(capsys, "llama-3.2-11b-vision", "--source-tokens", "1601")
    assert with_images["fixed_state_bytes"] == 8 * 8 * 256 * 2 * 1601


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert "openai/gpt-oss-120b" in told(capsys, "--list").splitlines()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "MODEL is missing"),
        (("no-such-model",), "'no-such-model' is no file, folder or built-in name"),
        ((LLAMA, "--kv-dtype", "fp7"), "kv dtype: 'fp7'; accepted: float32"),
        ((LLAMA, "--tp", "3"), "--tp: 3; accepted"),
        ((LLAMA, "--tokens", "-1"), "--tokens: -1; accepted"),
        ((LLAMA, "--engine", "ollama"), "engine: 'ollama'; accepted"),
        ((LLAMA, "--gpu", "h101"), "h101"),
        ((LLAMA, "--memory", "16"), "--memory: '16'"),
        ((LLAMA, "--memory", "16GiB", "--gpu", "h100"), "--memory and --gpu"),
        ((LLAMA, "--weights-dtype", "int3"), "--weights-dtype: 'int3'; accepted"),
        ((LLAMA, "--params", "lots"), "--params: 'lots'; accepted"),
        ((LLAMA, "--params", "nan"), "--params: 'nan'; accepted"),
        (("nemotron-h-56b-base-8k", "--gpu", "h100"), "--params"),
        ((LLAMA, "--source-tokens", "5"), "--source-tokens: 5; accepted"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], named: str) -> None:
    assert named in refused(capsys, *args)


def test_a_bad_file_is_named_with_its_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": -3}',
        encoding="utf-8",
    )
    line = refused(capsys, str(path))
    assert f"{path}: num_hidden_layers: -3; accepted: a whole number from 1" in line
    assert f"{path}: " in refused(capsys, str(tmp_path)), "the folder that holds it"


def test_it_never_loads_what_is_heavy() -> None:
    code = (
        "import sys; from tiercel.cli import run; "
        "run(['size', 'qwen3.5-27b', '--gpu', 'h100', '--params', '27e9']); "
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'vllm'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What fits" in done.stdout
