"""Whether somebody agreed to lossy codecs: by saying so, or with the report of an evaluation of them.

A report is what `tiercel eval --json` writes: `{"model": NAME, "revision": DIGEST, "rows": [{"policy":
"int8", ...}, ...]}`. That a row is there is enough: whether its figures are good is for whoever names the
file. Nothing here looks at a block.
"""

from __future__ import annotations

import json
from pathlib import Path

from tiercel.codecs.mark import LossyTiers
from tiercel.codecs.names import LOSSY
from tiercel.config import Config
from tiercel.errors import ConfigError

_YES = ("yes", "true", "1")
_NO = ("no", "false", "0")
_REPORT_BYTES_MAX = 64 << 20


def lossy_tiers(config: Config) -> LossyTiers:
    """The lossy codecs of a configuration's tiers. Raises ConfigError unless they were accepted."""
    codecs = tuple(sorted({tier.codec for tier in config.tiers if tier.codec in LOSSY}))
    answer = config.store.accept_lossy
    if not codecs or answer.lower() in _YES:
        return LossyTiers(codecs)
    number, name = next((i, one.codec) for i, one in enumerate(config.tiers) if one.codec in LOSSY)
    accepted = (
        "accepted: --accept-lossy (store.accept_lossy = yes), or store.accept_lossy = FILE, the report of an "
        f"evaluation of '{name}' with the model"
    )
    if answer.lower() in _NO:
        raise ConfigError(f"tiers.{number}.codec = {name} changes answers; {accepted}")
    model, judged = _read(Path(answer))
    for codec in codecs:
        if codec not in judged:
            raise ConfigError(f"store.accept_lossy: {answer} says nothing of codec '{codec}'; {accepted}")
    return LossyTiers(codecs, (model,))


def _read(path: Path) -> tuple[str, set[str]]:
    """The model of a report, and what it judges."""
    try:
        if path.stat().st_size > _REPORT_BYTES_MAX:
            raise ConfigError(f"store.accept_lossy: {path} is too large for a report")
        report = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "is not JSON"
        raise ConfigError(
            f"store.accept_lossy: {path}: {reason}; accepted: yes, no, or the file of a report"
        ) from None
    if not isinstance(report, dict) or not isinstance(report.get("model"), str):
        raise ConfigError(f"store.accept_lossy: {path} names no model; accepted: a report of an evaluation")
    revision, rows = report.get("revision"), report.get("rows")
    model = f"{report['model']}@{revision}" if isinstance(revision, str) else str(report["model"])
    named = [row.get("policy") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return model, {one for one in named if isinstance(one, str)}
