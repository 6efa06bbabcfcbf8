"""Grafana's dashboard and Prometheus' alerts: every name and label in them is really exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("promql_parser")
pytest.importorskip("yaml")
pytest.importorskip("starlette")
pytest.importorskip("torch")

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families
from scripts import grafana
from tests.service.running import Running
from tests.web.api.tiny import PROMPT, tiny_server

from tiercel.store import LaneOptions
from tiercel.tiers import FilesTier

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "tiercel.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
RULES: list[dict[str, Any]] = ALERTS["groups"][0]["rules"]
PANELS = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
# What Prometheus adds to every series of a job, and the series it makes itself.
SCRAPED = {"job", "instance"}
ITS_OWN: dict[str, dict[str, set[str]]] = {"up": {"job": {"tiercel"}}}

Exported = Mapping[str, Mapping[str, set[str]]]


@dataclass(frozen=True)
class Selected:
    """One selector of an expression: a series' name, and (label, operator, value) of its matchers."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def parsed(expression: str) -> Any:
    filled = expression.replace("$__rate_interval", "5m")
    for name in ("job", "instance", "tier"):
        filled = filled.replace(f"${name}", ".*")
    assert "$" not in filled
    return promql.parse(filled)


def nodes(node: Any) -> Iterator[Any]:
    yield node
    inner = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    inner += list(getattr(node, "args", None) or ())
    for one in inner:
        if one is not None and hasattr(one, "prettify"):
            yield from nodes(one)


def selected(expression: str) -> list[Selected]:
    return [
        Selected(one.name, tuple((m.name, str(m.op), m.value) for m in one.matchers.matchers))
        for one in nodes(parsed(expression))
        if type(one).__name__ == "VectorSelector"
    ]


def grouped(expression: str) -> set[str]:
    """Labels that an expression groups by."""
    return {
        label
        for one in nodes(parsed(expression))
        if type(one).__name__ == "AggregateExpr" and one.modifier is not None
        for label in one.modifier.labels
    }


def wrong_in(expression: str, exported: Exported) -> list[str]:
    """What an expression names that is not exported."""
    wrong = []
    found = selected(expression)
    known: set[str] = {"le"}
    for one in found:
        labels = ITS_OWN.get(one.name) or exported.get(one.name)
        if labels is None:
            wrong.append(f"{one.name} is not exported")
            continue
        known |= set(labels)
        for label, operator, value in one.matchers:
            if label not in labels and label not in SCRAPED:
                wrong.append(f"{one.name} has no label {label}")
            elif operator.endswith("Equal") and label in labels and value not in labels[label]:
                wrong.append(f"{one.name} never has {label}={value}")
    wrong += [f"nothing has the label {one}" for one in grouped(expression) - known - SCRAPED]
    return wrong if found else ["it asks for nothing"]


def series_of(text: str) -> dict[str, dict[str, set[str]]]:
    """Each series of an exposition: its labels and the values that they have."""
    seen: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = seen.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return seen


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What `tiercel serve` exports after a cold and a warm request."""
    folder = tmp_path_factory.mktemp("exported")
    tier = FilesTier(folder / "disk"), LaneOptions(cap_bytes=1 << 30)
    with tiny_server(folder / "model", [tier]) as (client, store):
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert store.flush(10)
        return series_of(client.get("/metrics").text)


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("what", "expression"), list(expressions()), ids=lambda value: value[:40])
def test_every_name_and_label_is_exported(exported: Exported, what: str, expression: str) -> None:
    assert wrong_in(expression, exported) == [], what


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("rate(tiercel_no_such_total[5m])", "is not exported"),
        ("sum(rate(tiercel_tier_faults_total{kind=\"rust\"}[5m]))", "never has kind=rust"),
        ("tiercel_tier_used_bytes{shelf=\"x\"}", "has no label shelf"),
        ("sum by (shelf) (tiercel_tier_used_bytes)", "nothing has the label shelf"),
        ("1 - 2", "asks for nothing"),
        ("up unless (vector(1) - tiercel_gone)", "tiercel_gone is not exported"),
    ],
)  # fmt: skip
def test_the_check_finds_what_is_wrong(exported: Exported, expression: str, word: str) -> None:
    assert any(word in one for one in wrong_in(expression, exported))


def test_the_alerts_of_a_daemon_are_about_what_a_daemon_exports(exported: Exported, tmp_path: Path) -> None:
    """A daemon has no HTTP clients: all the rest is there, from the moment an engine has come."""
    with Running(tmp_path / "s", disk=tmp_path / "kv", args=("--http", "127.0.0.1:0")) as daemon:
        assert daemon.process.stdout is not None
        url = daemon.process.stdout.readline().decode().split()[-1]
        with daemon.connect():
            text = httpx.get(f"{url}metrics").text
        assert daemon.end() == 0
    there = series_of(text)
    named = {one.name for _, expression in expressions() for one in selected(expression)}
    # Labels of what has happened come with it.
    late = {"tiercel_reused_tokens_total", "tiercel_time_to_first_token_seconds_bucket"}
    missing = {name for name in named - set(there) - set(ITS_OWN) if not name.startswith("tiercel_http_")}
    assert missing <= late
    assert "tiercel_tier_faults_total" in there, "the control"


def test_the_dashboard_is_as_its_script_makes_it() -> None:
    assert (DEPLOY / "grafana" / "tiercel.json").read_text() == grafana.text()


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["uid"] == "tiercel"
    assert len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["type"] in ("timeseries", "stat", "state-timeline")
        assert [one["refId"] for one in panel["targets"]] == list("ABCDEFG")[: len(panel["targets"])]
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_its_choices_are_exported_too(exported: Exported) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            (one,) = selected(match[1])
            assert match[2] in {*exported[one.name], *SCRAPED}


def test_the_alerts_are_well_formed() -> None:
    assert set(ALERTS) == {"groups"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Tiercel[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_an_alert_names_only_labels_that_it_has(exported: Exported) -> None:
    for rule in RULES:
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = grouped(rule["expr"]) or {
            label for one in selected(rule["expr"]) for label in (*exported.get(one.name, ()), *SCRAPED)
        }
        assert used <= kept, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
)
def test_prometheus_takes_them(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()],
        cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
