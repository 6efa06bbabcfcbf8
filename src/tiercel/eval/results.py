"""The report: a row per policy, task and budget, as JSON. Reading one back is for whoever wants to see it
judged.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tiercel.report.files import read_json

FORMAT = 1
_BYTES_MAX = 64 << 20
# What a policy makes smaller, and how: for people and for the plot.
EXACT, DROPS, SKIPS, STORED = "exact", "drops", "skips", "stored"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one task; means over seeds, `…_low` and `…_high` their 95 % intervals (None: one seed).

    policy, kind     `kind`: exact, drops (evicted KV is gone), skips (kept elsewhere), stored (a codec)
    budget           share of the context's tokens it may keep or read; 1.0 where that means nothing
    kl               nats per answer token against full attention on the same tokens
    agreement        share of answer tokens with the same most likely token as full attention
    accuracy         share of answers right, `accuracy_drop` what full attention has above that
    score            text2json's score (0 to 1), values as the model would write them
    nll, nll_rise    nats per answer token, and how much more than full attention
    read_share       share of the context a query attends to, measured
    device_share     bytes on the device over those of the full KV, by the policy's definition
    stored_share     bytes kept elsewhere over the same; fetched_share: moved per new token
    device_bytes_per_token, fetched_bytes_per_token   the same in bytes, per token of context
    acts             whether the policy decided for any layer; False: all have a window of the model's own
    prefill_s, answer_s   seconds per sample here, under the judge; nothing about serving
    ttft_s, tpot_s, device_bytes, moved_bytes_per_token   of a short generation (`speed`); None: not asked for
    """

    policy: str
    kind: str
    task: str
    dense: bool
    budget: float
    kl: float
    kl_low: float | None
    kl_high: float | None
    agreement: float
    accuracy: float | None
    accuracy_full: float | None
    accuracy_drop: float | None
    accuracy_drop_low: float | None
    accuracy_drop_high: float | None
    score: float | None
    nll: float
    nll_rise: float
    nll_rise_low: float | None
    nll_rise_high: float | None
    read_share: float
    device_share: float
    stored_share: float
    fetched_share: float
    device_bytes_per_token: float
    fetched_bytes_per_token: float
    seeds: int
    answers: int
    tokens: int
    context_tokens: int
    prefill_s: float
    answer_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    device_bytes: int | None = None
    moved_bytes_per_token: float | None = None
    acts: bool = True


class EndpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A server against a baseline server on one task: shares of answers that are right, and that are the
    same.
    """

    task: str
    accuracy: float
    accuracy_baseline: float
    accuracy_drop: float
    accuracy_drop_low: float | None
    accuracy_drop_high: float | None
    same: float
    seeds: int
    answers: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole evaluation. `revision` is the digest of the model's weights; `failed` says which gates did not
    hold.
    """

    format: int
    version: str
    when: str
    command: str
    model: str
    revision: str
    dtype: str
    seeds: list[int]
    facts: list[tuple[str, str]]
    rows: list[Row]
    verdicts: dict[str, str]
    failed: list[str]
    endpoints: list[EndpointRow] = []

    def to_json(self) -> bytes:
        """As it is written to a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """A report from its file. Raises ConfigError for what is none."""
    return read_json(path, Report, FORMAT, "tiercel eval --json", _BYTES_MAX)


def rows_of(report: Report, policy: str, budget: float | None = None) -> list[Row]:
    """What a report says of a policy, at one budget or at all; empty: it was not judged."""
    return [
        row for row in report.rows
        if row.policy == policy and (budget is None or abs(row.budget - budget) < 1e-9)
    ]  # fmt: skip
