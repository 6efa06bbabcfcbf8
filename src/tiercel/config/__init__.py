"""One typed configuration from a TOML file, the environment and flags; sizes and durations with units.

`Config.load()` is the way in. Nothing here imports anything of Tiercel but its errors.
"""

from __future__ import annotations

from tiercel.config.config import Config
from tiercel.config.paths import cache_dir, default_socket, writable_cache_dir
from tiercel.config.schema import (
    AttentionConfig,
    DaemonConfig,
    ModelConfig,
    RamConfig,
    ServeConfig,
    StoreConfig,
    TierConfig,
)
from tiercel.config.units import format_bytes, format_seconds, human_bytes, parse_bytes, parse_seconds

__all__ = [
    "AttentionConfig",
    "Config",
    "DaemonConfig",
    "ModelConfig",
    "RamConfig",
    "ServeConfig",
    "StoreConfig",
    "TierConfig",
    "cache_dir",
    "default_socket",
    "format_bytes",
    "format_seconds",
    "human_bytes",
    "parse_bytes",
    "parse_seconds",
    "writable_cache_dir",
]
