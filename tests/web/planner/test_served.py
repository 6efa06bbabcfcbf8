"""The page's server and its export, without a browser."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from click.testing import CliRunner

from tiercel.cli.dashboard import command
from tiercel.errors import ConfigError
from tiercel.plan.planner import as_json, make_plan
from tiercel.plan.planner_options import request_from
from tiercel.web import assets
from tiercel.web.planner import page
from tiercel.web.planner.export import export
from tiercel.web.planner.routes import PLANS_MAX

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")


def origin(address: str) -> str:
    return address.removesuffix("/plan")


def test_the_plan_is_the_commands_plan(address: str) -> None:
    given = {"model": "Llama-3.1-8B", "gpu": "l4", "sessions": "12", "context": "4096", "idle": "30s"}
    answer = httpx.get(f"{origin(address)}/api/plan", params=given)
    options = {name: text for name, text in given.items() if name != "model"}
    plan = as_json(make_plan(request_from("Llama-3.1-8B", options)))
    assert answer.json() == json.loads(json.dumps(plan))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "h1000"}, "did you mean 'h100'"),
        ({"model": "nothing"}, "not built in"),
        ({"gpus": "-1"}, "gpus: -1"),
        ({"nonsense": "1"}, "unknown option"),
        ({"model": "x" * 5000}, "query of"),
    ],
)
def test_a_bad_query_is_refused_in_one_line(address: str, given: dict[str, str], words: str) -> None:
    answer = httpx.get(f"{origin(address)}/api/plan", params=given)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_no_file_of_the_machine_is_opened(address: str, tmp_path: Path) -> None:
    """The command opens a path; the server, whose names come from a browser, must not."""
    file = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "vocab_size": 100, "intermediate_size": 128}  # fmt: skip
    file.write_text(json.dumps(llama), encoding="utf-8")
    assert request_from(str(file), {}).model.name == str(file)
    answer = httpx.get(f"{origin(address)}/api/plan", params={"model": str(file)})
    assert answer.status_code == 400
    assert "not built in" in answer.json()["error"]
    for name in (
        "app.py",
        "assets/..%2Fassets.py",
        "assets/../site.py",
        "assets/%2Fetc%2Fpasswd",
        "assets/plan.html",
    ):
        assert httpx.get(f"{origin(address)}/{name}").status_code == 404


def test_files_and_headers(address: str) -> None:
    for name, kind in (
        ("plan", "text/html"),
        ("assets/plan.js", "javascript"),
        ("assets/plan.css", "css"),
        ("assets/site.css", "css"),
        ("assets/data.js", "javascript"),
    ):
        answer = httpx.get(f"{origin(address)}/{name}")
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self';"
            in answer.headers["content-security-policy"]
        )


def test_it_listens_on_loopback(address: str) -> None:
    assert address.startswith("http://127.0.0.1:")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name in (*assets.FILES, *assets.PAGES):
        text = assets.text(name).replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text


def test_export_replaces_its_own_files_only(tmp_path: Path) -> None:
    export(tmp_path / "a")
    export(tmp_path / "a")
    (tmp_path / "a" / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.txt"):
        export(tmp_path / "a")


def test_the_command_exports(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--export", str(tmp_path / "page")], catch_exceptions=False)
    assert "wrote 5 files" in result.output
    assert (tmp_path / "page" / "index.html").exists()


def test_a_taken_port_is_one_line(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--port: cannot listen on 127\.0\.0\.1 .*; accepted is a free port"
    ):
        CliRunner().invoke(command, ["--port", origin(address).rpartition(":")[2]], catch_exceptions=False)


def test_the_list_holds_the_models_that_need_no_parameters_told() -> None:
    names = {model.name for model in page.plannable()}
    assert page.DEFAULT_MODEL in names
    assert len(names) > 60


def test_where_nothing_is_watched_the_site_is_the_planner_and_says_how_to_connect(address: str) -> None:
    answer = httpx.get(f"{origin(address)}/", follow_redirects=False)
    assert answer.status_code == 307
    assert answer.headers["location"] == "plan"
    assert '"live":false' in httpx.get(f"{origin(address)}/assets/data.js").text
    for path in ("/v1/overview", "/v1/cache/clear", "/metrics"):
        assert httpx.get(f"{origin(address)}{path}").status_code == 404


def test_plans_are_made_one_at_a_time_and_too_many_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most, made, go = 0, 0, 0, threading.Event()
    real = page.plan_json

    def slow(given: Mapping[str, str]) -> dict[str, object]:
        nonlocal at_once, most, made
        at_once += 1
        most, made = max(most, at_once), made + 1
        go.wait(10)
        at_once -= 1
        return real(given)

    monkeypatch.setattr(page, "plan_json", slow)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(httpx.get, f"{origin(address)}/api/plan", timeout=20) for _ in range(20)]
        wait(asked, timeout=10, return_when=FIRST_COMPLETED)
        until_s = time.monotonic() + 10
        while sum(one.done() for one in asked) < 20 - PLANS_MAX and time.monotonic() < until_s:
            time.sleep(0.01)
        # Nothing else waits for them.
        assert httpx.get(address).status_code == 200
        go.set()
        answers = [one.result() for one in asked]
    assert sorted(one.status_code for one in answers) == [200] * PLANS_MAX + [429] * (20 - PLANS_MAX)
    refused = next(one for one in answers if one.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert "try again in 1 s" in refused.json()["error"]
    assert (made, most) == (PLANS_MAX, 1)
    assert httpx.get(f"{origin(address)}/api/plan").status_code == 200
