"""`tiercel cache warm PROMPTS.jsonl`: prefill prompts and store their blocks ahead of traffic."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiercel.cli import EXIT_INTERRUPTED
from tiercel.cli.options import config_options, load_config
from tiercel.cli.progress import ProgressLine
from tiercel.config.schema import MEMORY
from tiercel.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tiercel.config import Config
    from tiercel.engines.transformers import TransformersEngine
    from tiercel.store import TieredStore

EXIT_SOME_REFUSED = 1
_LINE_CHARS_MAX = 64 << 20
_NEEDED = ("torch", "transformers")
_FIELDS = frozenset({"prompt", "messages", "cache_salt"})


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file: a text or a conversation, and the tenant it is for."""

    number: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    salt: str | None


@dataclass(slots=True)
class WarmReport:
    """What became of the prompts. Blocks `missing` were computed but found no room.

    `written_down` is whether every tier took what it should have.
    """

    prompts: int = 0
    refused: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    blocks: int = 0
    there_already: int = 0
    missing: int = 0
    written_down: bool = False
    seconds: float = 0.0


@click.command("warm")
@click.argument("prompts", metavar="PROMPTS.jsonl", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Model folder [default: the demo model].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_options
def warm_command(
    prompts: Path,
    model: Path | None,
    as_json: bool,
    config_file: Path | None,
    settings: tuple[str, ...],
) -> int:
    """Prefill the prompts of a file and keep their blocks in the configured tiers, ahead of traffic.

    Each line is {"prompt": "text"} or {"messages": [{"role": ..., "content": ...}, ...]}, and may have a
    "cache_salt". Blocks are those of the transformers engine (`tiercel serve`): run it with the model and the
    configuration of the server. What is cached already is not computed again.

    Exit code 0: every prompt was taken and written down. 1: some were refused, such as one that is too long
    for the model, or a tier did not take all blocks.
    """
    config = load_config(config_file, settings)
    if all(tier.kind == MEMORY for tier in config.tiers):
        raise ConfigError(
            "warm: no tier is configured that outlives the command; accepted: a configuration with one"
        )
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        raise ConfigError(
            f"warm: {', '.join(missing)} not installed; accepted: pip install 'tiercel[transformers]'"
        )
    # The whole file, before anything is computed for it.
    total = sum(1 for _ in lines_of(prompts))

    from tiercel.engines.transformers import open_engine
    from tiercel.models import demo_model_dir

    folder = model or demo_model_dir(notice=lambda line: click.echo(f"tiercel: {line}", err=True))
    engine, store = open_engine(folder, config)
    report, progress, interrupted = WarmReport(), ProgressLine(), False
    started_s = time.monotonic()
    try:
        for line in lines_of(prompts):
            progress.show(f"{report.prompts} of {total} prompts, {report.computed_tokens:,} tokens computed")
            try:
                _warm(line, engine, store, config, report)
            except RequestError as refusal:
                report.refused += 1
                progress.end()
                click.echo(f"{prompts}:{line.number}: {refusal}", err=True)
            report.prompts += 1
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.end()
        report.written_down = store.close(config.store.flush_deadline_s)
    report.seconds = time.monotonic() - started_s
    click.echo(_json(report, interrupted) if as_json else _text(report))
    if interrupted:
        click.echo("interrupted; the same command goes on from here", err=True)
        return EXIT_INTERRUPTED
    return EXIT_SOME_REFUSED if report.refused or report.missing or not report.written_down else 0


def lines_of(path: Path) -> Iterator[Line]:
    """Every prompt of a file, one at a time. Raises ConfigError naming the line that is not one."""
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while text := file.readline(_LINE_CHARS_MAX):
                number += 1
                if len(text) >= _LINE_CHARS_MAX:
                    raise ConfigError(f"{path}:{number}: is longer than {_LINE_CHARS_MAX:,} characters")
                if text.strip():
                    yield _line(text, path, number)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; accepted: a JSON object per line") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}") from None


def _line(text: str, path: Path, number: int) -> Line:
    where = f"{path}:{number}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: is not JSON; accepted: a JSON object per line") from None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise ConfigError(f'{where}: accepted: an object with either "prompt" or "messages"')
    if unknown := sorted(found.keys() - _FIELDS):
        raise ConfigError(f"{where}: '{unknown[0]}' is unknown; accepted: {', '.join(sorted(_FIELDS))}")
    prompt, messages, salt = found.get("prompt"), found.get("messages"), found.get("cache_salt")
    if "prompt" in found and not isinstance(prompt, str):
        raise ConfigError(f'{where}: "prompt" is not a text')
    if "messages" in found and not (
        isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
    ):
        raise ConfigError(f'{where}: "messages" is not a list of objects with "role" and "content"')
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ConfigError(f'{where}: "cache_salt" is not a text')
    return Line(number, prompt, messages, salt)


def _warm(
    line: Line, engine: TransformersEngine, store: TieredStore, config: Config, report: WarmReport
) -> None:
    """Store the full blocks of one prompt. Raises RequestError when the model does not take it."""
    tokens = (
        engine.encode(line.prompt) if line.prompt is not None else engine.chat_prompt(line.messages or [])
    )
    assert engine.prefix is not None
    chain = engine.prefix.chain(tokens, line.salt)
    held = store.lookup(chain).blocks
    if held < len(chain):
        prefilled = engine.prefill_logits(tokens, salt=line.salt)
        report.computed_tokens += len(tokens) - prefilled.reused_tokens
        # Before the next one needs the room.
        store.flush(config.store.flush_deadline_s)
        report.missing += len(chain) - store.lookup(chain).blocks
    report.tokens += len(tokens)
    report.blocks += len(chain)
    report.there_already += held


def _text(report: WarmReport) -> str:
    text = (
        f"{report.prompts:,} prompts, {report.tokens:,} tokens, {report.computed_tokens:,} of them computed "
        f"in {report.seconds:.1f} s; {report.blocks:,} blocks, {report.there_already:,} there already"
    )
    if report.missing:
        text += f", {report.missing:,} found no room"
    if not report.written_down:
        text += "; a tier did not take all of them"
    return text + (f"; {report.refused:,} prompts refused" if report.refused else "")


def _json(report: WarmReport, interrupted: bool) -> str:
    return json.dumps({**asdict(report), "interrupted": interrupted}, indent=1)
