"""Options that several commands have: `--config FILE`, `--set KEY=VALUE`, and `--log-format` where they stay.

A command that has flags of its own for single settings merges them into the overrides it is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click

from tiercel.config import Config
from tiercel.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


def config_options(function: F) -> F:
    """Add `--config` and `--set` to a command, which gets them as `config_file` and `settings`."""
    with_set = click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one value, such as ram.size=4GiB."
    )(function)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="TOML file of settings [default: $TIERCEL_CONFIG].",
    )(with_set)


def accept_lossy_option(function: F) -> F:
    """Add `--accept-lossy` to a command that opens a store, which gets it as `accept_lossy`."""
    return click.option(
        "--accept-lossy",
        is_flag=True,
        help="Let codecs, a policy of attention or chunks change answers, unseen (store.accept_lossy).",
    )(function)


def check_consent(config: Config) -> None:
    """Refuse what changes answers and nobody accepted, before anything is loaded. Raises ConfigError."""
    from tiercel.codecs.consent import lossy_attention, lossy_chunks, lossy_tiers

    lossy_tiers(config)
    lossy_attention(config)
    lossy_chunks(config)


def log_format_option(function: F) -> F:
    """Add `--log-format` to a command that serves, which gets it as `log_format`."""
    return click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="How lines on stderr are written.",
    )(function)


def load_config(
    config_file: Path | None,
    settings: Sequence[str],
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration of a command: file < environment < `--set` < its own `flags` (dotted keys).

    Raises ConfigError as `Config.load` does, and for a `--set` that is not KEY=VALUE.
    """
    overrides: dict[str, object] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"flag: --set: '{text}' is not KEY=VALUE; accepted: such as ram.size=4GiB")
        overrides[key.strip()] = value
    overrides.update({key: value for key, value in (flags or {}).items() if value is not None})
    return Config.load(config_file, environ, overrides)
