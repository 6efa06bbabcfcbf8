"""What of SGLang is supported, and which of its options are ours. All else is refused at start, in a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercel.config import Config
from tiercel.engines.options import read_options
from tiercel.errors import ConfigError, EngineError

VERSIONS = ("0.5.23",)
_WHERE = "hicache-storage-backend-extra-config"
# What SGLang reads from these options itself; some of it is taken out before we see them.
_SGLANGS = frozenset(
    "backend_name module_path class_name interface_v1 allocator prefetch_threshold prefetch_timeout_base "
    "prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys".split()
)
_REVISION = "revision"


@dataclass(frozen=True, slots=True)
class Options:
    """`revision` names the weights, where the user would rather do that than have them read."""

    config: Config
    revision: str | None


def read(extra: Mapping[str, object]) -> Options:
    """Our part of `--hicache-storage-backend-extra-config`. Raises ConfigError, one line."""
    ours = {name: value for name, value in extra.items() if name not in _SGLANGS and value is not None}
    revision = ours.pop(_REVISION, None)
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ConfigError(f"{_WHERE}: {_REVISION} is {revision!r}; accepted is a text that names the weights")
    return Options(read_options(ours, _WHERE), revision)


def check_version(found: str) -> None:
    """Raises EngineError unless the storage interface of this SGLang release is known.

    It changes between releases. Those before this one leave salts and adapters out of the names of pages.
    """
    release = re.match(r"\d+\.\d+\.\d+", found)
    if release is None or release.group() not in VERSIONS:
        raise EngineError(f"SGLang {found} is not supported; accepted are {', '.join(VERSIONS)}")


def check_ranks(config: Any) -> None:
    """Raises EngineError for a way to spread KV over ranks whose pages cannot be told apart."""
    if (ranks := getattr(config, "dcp_size", 1)) > 1:
        raise EngineError(f"dcp-size is {ranks}; accepted is 1 with TiercelHiCache")
