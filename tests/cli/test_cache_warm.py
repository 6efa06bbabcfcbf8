"""`tiercel cache warm`: prompts prefilled ahead of traffic are hits for the engine that comes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercel.cli import run
from tiercel.cli.cache_warm import lines_of
from tiercel.config import Config
from tiercel.errors import ConfigError

LONG = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6
MESSAGES = [{"role": "system", "content": LONG}, {"role": "user", "content": "Who jumps?"}]
LINES = [
    {"prompt": LONG},
    {"messages": MESSAGES},
    {"prompt": LONG + "And then?", "cache_salt": "s3cret"},
    {"prompt": "hi"},
    {"prompt": LONG * 200},
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiercel.toml"
    path.write_text(
        f'[[tiers]]\npath = "{tmp_path / "cache"}"\nsize = "1GiB"\n'
        '[model]\nblock_tokens = 32\n[ram]\nsize = "32MiB"\n'
    )
    return path


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return path


def warm(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> dict[str, float]:
    assert run(["cache", "warm", "--json", *map(str, args)]) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert isinstance(found, dict)
    return found | {"complaints": captured.err.count("\n")}


@pytest.mark.model
def test_what_was_warmed_is_hit_by_the_engine_and_not_computed_twice(
    model_dir: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", LINES)
    first = warm(capsys, prompts, "--model", model_dir, "--config", config, code=1)
    assert (first["prompts"], first["refused"], first["there_already"], first["missing"]) == (5, 1, 0, 0)
    assert first["complaints"] == 1
    assert first["blocks"] >= 9
    assert first["written_down"]
    again = warm(capsys, write(prompts, LINES[:4]), "--model", model_dir, "--config", config)
    assert again["blocks"] == again["there_already"] == first["blocks"]
    # A prompt without a full block is computed by nobody.
    assert again["computed_tokens"] == 0

    from tiercel.engines.transformers import Request, Result, open_engine

    engine, store = open_engine(model_dir, Config.load(config))
    with store:
        assert store.scanned(10)
        asked = Request(tokens=tuple(engine.chat_prompt(MESSAGES)), max_new_tokens=1)
        result = list(engine.generate(asked))[-1]
        assert isinstance(result, Result)
        assert result.reused_tokens >= (len(asked.tokens) - 1) // 32 * 32 > 0
        assert set(result.sources) == {"disk"}
        # What was warmed for a tenant is that tenant's.
        others = Request(tokens=tuple(engine.encode(LINES[2]["prompt"])), salt="other", max_new_tokens=1)
        assert list(engine.generate(others))[-1].reused_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "2: is not JSON"),
        ("[1]", 'accepted: an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": 3}', '"prompt" is not a text'),
        ('{"messages": "hi"}', '"messages" is not a list'),
        ('{"prompt": "a", "salt": "x"}', "'salt' is unknown; accepted: cache_salt"),
        ('{"prompt": "a", "cache_salt": ""}', '"cache_salt" is not a text'),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_before_anything_is_computed(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + text + "\n")
    assert run(["cache", "warm", str(prompts), "--config", str(config)]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_files_that_cannot_be_read_and_a_missing_tier_are_one_line(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    for path, complaint in (("bytes", "not UTF-8"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=complaint):
            list(lines_of(tmp_path / path))
    assert run(["cache", "warm", str(tmp_path / "none")]) == 2
    assert "no tier is configured" in capsys.readouterr().err
    memory = ["--set", "tiers.0.kind=memory", "--set", "tiers.0.size=1GiB"]
    assert run(["cache", "warm", str(tmp_path / "none"), *memory]) == 2
    assert "no tier is configured that outlives the command" in capsys.readouterr().err
