"""`tiercel explain PROMPT`: what a running server would do with a prompt now, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tiercel.cli.serving import ask, named_prompt, prompt_options, url_option


@click.command("explain")
@prompt_options(session=False)
@url_option
def command(
    prompt: str | None, file: Path | None, messages: Path | None, salt: str | None, url: str, as_json: bool
) -> None:
    """Show what a running tiercel serve would do with PROMPT now, and why: load, compute, or both at once.

    Nothing is loaded and nothing computed. The times are what it has measured so far.

    \b
    tiercel explain --file document.txt
    tiercel explain --messages conversation.json --url http://127.0.0.1:8000
    """
    told = ask(url, "/v1/cache/explain", named_prompt(prompt, file, messages, None, salt))
    click.echo(json.dumps(told) if as_json else "\n".join(lines(told)))


def lines(told: dict[str, Any]) -> list[str]:
    """A decision as a person reads it."""
    block_tokens = told["block_tokens"]
    blocks = sum(told["found"].values())
    places = ", ".join(f"{count} in {place}" for place, count in told["found"].items())
    shown = [
        f"prompt    {told['prompt_tokens']:,} tokens, blocks of {block_tokens}",
        f"stored    {blocks} blocks, {blocks * block_tokens:,} tokens" + (f" ({places})" if places else ""),
    ]
    if expected := told["expected"]:
        shown += [
            f"compute   {_time(expected['compute_all_s'])} without the cache",
            f"load all  {_time(expected['load_all_s'])} to the first token",
        ]
        if 0 < expected["load_blocks"] < blocks:
            best = _time(expected["first_token_s"])
            shown.append(f"load some {best} with the first {expected['load_blocks']} blocks")
        if expected["meet_s"] < min(expected["first_token_s"], expected["compute_all_s"]):
            shown.append(f"both      {_time(expected['meet_s'])}, loading from the end while computing")
    return [*shown, f"so        {told['reason']}"]


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
