"""vLLM's name for the options it passes on."""

from __future__ import annotations

from collections.abc import Mapping

from tiercel.config import Config
from tiercel.engines import options


def read_options(extra: Mapping[str, object]) -> Config:
    """See `tiercel.engines.options.read_options`."""
    return options.read_options(extra, "kv_connector_extra_config")
