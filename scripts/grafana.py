"""Writes deploy/grafana/tiercel.json, the dashboard, from the rows below: `python -m scripts.grafana`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy" / "grafana" / "tiercel.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
# What every expression is about; `$__rate_interval` is Grafana's: long enough for the scrape interval.
OF = 'job=~"$job",instance=~"$instance"'
OF_TIER = f'{OF},tier=~"$tier"'
IN = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `lines` are (legend, PromQL); `unit` is Grafana's name of one."""

    title: str
    says: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    upside_down: str = ""  # a regular expression of legends that are drawn below zero
    limits: tuple[float | None, float | None] = (0, None)
    options: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, tuple[str, str]] = field(default_factory=dict)  # value -> words, colour


def rate(name: str, by: str = "", of: str = OF) -> str:
    """The rate of a counter, summed."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{of}}}{IN}))"


def quantile(share: float, name: str, by: str, of: str = OF) -> str:
    """A quantile of a histogram, by the labels in `by`."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{{{of}}}{IN})))"


BY_PLACE = "tiercel_reused_tokens_total"
PROMPT, SAVED, SPENT = (
    rate(f"tiercel_{name}_total") for name in ("prompt_tokens", "saved_prefill_seconds", "spent_seconds")
)
ANSWERS = f'{OF},endpoint=~"/v1/(chat/)?completions"'
TTFT, HTTP_TTFT = "tiercel_time_to_first_token_seconds", "tiercel_http_time_to_first_token_seconds"
RUNNING, WAITING = "tiercel_http_running_requests", "tiercel_http_queue_requests"


def now(name: str, of: str = OF, by: str = "") -> str:
    """A gauge, summed."""
    return f"sum{f' by ({by}) ' if by else ''}({name}{{{of}}})"


def breaker() -> str:
    """0 closed, 1 probing, 2 open, the worst of each tier."""
    probing, is_open = (
        f'max by (tier) (tiercel_tier_breaker{{{OF_TIER},state="{state}"}})' for state in ("probing", "open")
    )
    return f"{probing} + 2 * {is_open}"


def first_token(reuse: str) -> str:
    """The median time to first token of prompts that reused what the store gave, or nothing at all."""
    return quantile(0.5, TTFT, "", f'{OF},reuse="{reuse}"')


HELPS = (
    Panel(
        "Hit ratio", "Share of the prompts' tokens that was not computed; the engine's own reuse counts too.",
        (("", f"{rate(BY_PLACE)} / {PROMPT}"),), "percentunit", "stat", 4, 5, limits=(0, 1),
    ),
    Panel(
        "Prefill saved", "Seconds of prefill that the store saved, per second, as the engines measured it.",
        (("", SAVED),), "s", "stat", 4, 5,
    ),
    Panel(
        "Spent on it", "Seconds per second that requests waited for the store: lookups and loads.",
        (("", SPENT),), "s", "stat", 4, 5,
    ),
    Panel(
        "Saved per second spent", "Below 1 the cache is slower than computing.",
        (("", f"{SAVED} / {SPENT}"),), "short", "stat", 4, 5,
    ),
    Panel(
        "First token with reuse", "Median, from when the engine took the prompt up; the store gave KV.",
        (("", first_token("store")),), "s", "stat", 4, 5,
    ),
    Panel(
        "First token without", "Median of prompts of which nothing was reused. They may be other prompts.",
        (("", first_token("none")),), "s", "stat", 4, 5,
    ),
)  # fmt: skip

REQUESTS = (
    Panel(
        "Prompt tokens", "By where their KV came from, and computed.",
        (("{{place}}", rate(BY_PLACE, "place")), ("computed", rate("tiercel_computed_tokens_total"))),
        "short", stacked=True,
    ),
    Panel(
        "Prefill saved and time spent", "Per second.",
        (("saved", SAVED), ("spent", SPENT)), "s",
    ),
    Panel(
        "Time to first token", "From when the engine took the prompt up, by what gave KV.",
        (("{{reuse}} p50", quantile(0.5, TTFT, "reuse")), ("{{reuse}} p95", quantile(0.95, TTFT, "reuse"))),
        "s",
    ),
    Panel(
        "Decisions", "What was done with what was stored of a prompt.",
        (("{{action}}", rate("tiercel_decisions_total", "action")),), "reqps", stacked=True,
    ),
    Panel(
        "Requests", "How prompts ended in the engine, and what HTTP clients were told (tiercel serve).",
        (
            ("{{outcome}}", rate("tiercel_requests_total", "outcome")),
            ("HTTP {{status}}", rate("tiercel_http_requests_total", "status", ANSWERS)),
        ),
        "reqps",
    ),
    Panel(
        "Queue", "Requests that wait for the engine and those it answers (tiercel serve).",
        (
            ("waiting", now(WAITING)), ("running", now(RUNNING)),
            ("may wait", now("tiercel_http_queue_limit_requests")),
        ),
    ),
    Panel(
        "Time to first token, waiting included", "From arrival, by the slowest place that gave KV.",
        (
            ("{{place}} p50", quantile(0.5, HTTP_TTFT, "place")),
            ("{{place}} p95", quantile(0.95, HTTP_TTFT, "place")),
        ),
        "s",
    ),
    Panel(
        "Wait for the engine", "p95 (tiercel serve).",
        (("p95", quantile(0.95, "tiercel_http_queue_wait_seconds", "")),), "s",
    ),
    Panel(
        "Not told", "Reports of engines that never arrived or made no sense; reuse that could not be priced.",
        (
            ("lost", rate("tiercel_lost_reports_total")), ("bad", rate("tiercel_bad_reports_total")),
            ("unpriced", rate("tiercel_unpriced_requests_total")),
        ),
        "reqps",
    ),
)  # fmt: skip

TIERS = (
    Panel(
        "Occupancy", "Share of each tier's limit. Full is normal.",
        (
            (
                "{{tier}}",
                f"{now('tiercel_tier_used_bytes', OF_TIER, 'tier')} / "
                f"{now('tiercel_tier_limit_bytes', OF_TIER, 'tier')}",
            ),
            ("ram", f"1 - {now('tiercel_store_free_slots')} / {now('tiercel_store_slots')}"),
        ),
        "percentunit", limits=(0, 1),
    ),
    Panel(
        "Held", "Bytes in each tier.",
        (("{{tier}}", now("tiercel_tier_used_bytes", OF_TIER, "tier")),), "bytes", stacked=True,
    ),
    Panel(
        "Flow", "Read from tiers, and below zero written to them.",
        (
            ("{{tier}} read", rate("tiercel_tier_read_bytes_total", "tier", OF_TIER)),
            ("{{tier}} written", rate("tiercel_tier_written_bytes_total", "tier", OF_TIER)),
        ),
        "Bps", upside_down="/written/",
    ),
    Panel(
        "Read latency", "One block, checked.",
        tuple(
            (f"{{{{tier}}}} p{share * 100:g}", quantile(share, "tiercel_tier_read_seconds", "tier", OF_TIER))
            for share in (0.5, 0.95)
        ),
        "s",
    ),
    Panel(
        "Write latency", "Up to 8 MiB of blocks at once.",
        tuple(
            (f"{{{{tier}}}} p{share * 100:g}", quantile(share, "tiercel_tier_write_seconds", "tier", OF_TIER))
            for share in (0.5, 0.95)
        ),
        "s",
    ),
    Panel(
        "Queues", "Blocks to be read and to be written.",
        (
            ("{{tier}} reads", now("tiercel_tier_pending_reads", OF_TIER, "tier")),
            ("{{tier}} writes", now("tiercel_tier_pending_writes", OF_TIER, "tier")),
        ),
    ),
    Panel(
        "Removed blocks", "What left each place, and why.",
        (("{{place}} {{reason}}", rate("tiercel_removed_blocks_total", "place, reason")),), "ops",
    ),
    Panel(
        "Not written, not read", "Blocks that a tier did not take or give: slow, broken or used up.",
        (
            ("{{tier}} dropped writes", rate("tiercel_tier_dropped_writes_total", "tier", OF_TIER)),
            ("{{tier}} over budget", rate("tiercel_tier_over_budget_blocks_total", "tier", OF_TIER)),
            ("{{tier}} refused reads", rate("tiercel_tier_refused_reads_total", "tier", OF_TIER)),
        ),
        "ops",
    ),
    Panel(
        "Found, and computed all the same", "Blocks that are faster to compute than to load.",
        (
            ("priced out", rate("tiercel_store_priced_out_blocks_total")),
            ("tried again", rate("tiercel_store_tries_total")),
        ),
        "ops",
    ),
)  # fmt: skip

MEMORY = (
    Panel(
        "Slots of RAM", "Those that hold a block, and those that hold nothing.",
        (
            ("in use", f"{now('tiercel_store_slots')} - {now('tiercel_store_free_slots')}"),
            ("free", now("tiercel_store_free_slots")),
        ),
        stacked=True,
    ),
    Panel(
        "Leases and pins", "What may not be evicted now.",
        (("leases", now("tiercel_store_leases")), ("pinned blocks", now("tiercel_store_pinned_blocks"))),
    ),
    Panel(
        "Blocks stored, and not", "Skipped: no room in time. Not admitted: seen for the first time.",
        (
            ("stored", rate("tiercel_store_stored_blocks_total")),
            ("skipped", rate("tiercel_store_skipped_blocks_total")),
            ("not admitted", rate("tiercel_store_not_admitted_blocks_total")),
            ("waits for a slot", rate("tiercel_store_slot_waits_total")),
            ("staged loads", rate("tiercel_store_staged_loads_total")),
        ),
        "ops",
    ),
)  # fmt: skip

FAULTS = (
    Panel(
        "Faults of tiers", "Each is a miss, and computed.",
        (("{{tier}} {{kind}}", rate("tiercel_tier_faults_total", "tier, kind", OF_TIER)),), "ops",
    ),
    Panel(
        "Breakers", "A tier that fails is left alone, then probed.",
        (("{{tier}}", breaker()),), "short", "state-timeline", limits=(None, None),
        options={"showValue": "never"},
        shown={
            "0": ("closed", "green"), "1": ("probing", "yellow"), "2": ("open", "red"), "3": ("open", "red"),
        },
    ),
    Panel(
        "Loads that failed, and the rest",
        "Loads that failed or were too late, breakers that opened, faults of the HTTP server itself.",
        (
            ("failed loads", rate("tiercel_store_failed_loads_total")),
            ("timed out loads", rate("tiercel_store_timed_out_loads_total")),
            ("breaker openings", rate("tiercel_tier_breaker_openings_total", "", OF_TIER)),
            ("internal faults", rate("tiercel_http_internal_faults_total")),
        ),
        "ops",
    ),
)  # fmt: skip

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Does it help?", HELPS),
    ("Requests", REQUESTS),
    ("Tiers", TIERS),
    ("RAM", MEMORY),
    ("Faults", FAULTS),
)


def built() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(_row(title, len(panels) + 1, y))
        y += 1
        x = tallest = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "title": "Tiercel",
        "uid": "tiercel",
        "description": "Does the KV cache help, what does it cost, what is wrong.",
        "tags": ["llm", "tiercel"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus",
        "current": {}, "hide": 0,
    }  # fmt: skip
    return [
        source,
        _query("job", "Job", "label_values(tiercel_store_slots, job)"),
        _query("instance", "Instance", 'label_values(tiercel_store_slots{job=~"$job"}, instance)'),
        _query("tier", "Tier", f"label_values(tiercel_tier_used_bytes{{{OF}}}, tier)"),
    ]


def _query(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE,
        "query": {"query": query, "refId": name}, "definition": query, "refresh": 2, "sort": 1,
        "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all", "selected": True},
    }  # fmt: skip


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    low, high = panel.limits
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {}}
    defaults |= {} if low is None else {"min": low}
    defaults |= {} if high is None else {"max": high}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "showPoints": "never",
            "fillOpacity": 30 if panel.stacked else 5,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }  # fmt: skip
    if panel.shown:
        words = {
            value: {"text": text, "color": colour, "index": at}
            for at, (value, (text, colour)) in enumerate(panel.shown.items())
        }
        defaults["mappings"] = [{"type": "value", "options": words}]
    overrides = []
    if panel.upside_down:
        overrides.append(
            {
                "matcher": {"id": "byRegexp", "options": panel.upside_down},
                "properties": [{"id": "custom.transform", "value": "negative-Y"}],
            }
        )
        defaults.pop("min", None)
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression,
            "legendFormat": legend or "__auto", "range": True, "instant": False,
        }
        for at, (legend, expression) in enumerate(panel.lines)
    ]  # fmt: skip
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": _OPTIONS.get(panel.kind, {}) | panel.options,
        "targets": targets,
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"},
    "state-timeline": {"showValue": "never", "mergeValues": True, "legend": {"showLegend": False}},
}


def text() -> str:
    """The file's content."""
    return json.dumps(built(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    sys.stdout.write(f"{TARGET}\n")
