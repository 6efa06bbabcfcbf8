"""The page in a real Chromium: the same numbers as Python, by mouse and by keyboard, at every width."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tiercel.errors import TiercelError
from tiercel.plan.planner import as_json, make_plan
from tiercel.plan.planner_formulas import SHEET
from tiercel.plan.planner_options import request_from
from tiercel.plan.planner_sheet import JAVASCRIPT_PRELUDE
from tiercel.web.planner import page as page_module

SEED = 20_260_530
OFFLINE = """(options) => {
  try {
    const plan = offlinePlan(options);
    const values = Object.entries(plan.figures).map(([name, figure]) => [name, figure.value]);
    return {figures: Object.fromEntries(values), even: plan.break_even};
  } catch (error) {
    return {error: error.message};
  }
}"""


def opened(browser: Any, address: str, width: int = 1280, height: int = 900, **context: Any) -> Any:
    """A page that has its first plan, and keeps every error of the browser in `page.faults`."""
    page = browser.new_page(viewport={"width": width, "height": height}, **context)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("body[data-state=ready]")
    return page


def until(page: Any, condition: str) -> None:
    """Wait until `condition` holds in the page; asked from here, as the page's policy forbids eval there."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never became true: {condition}")


def change(page: Any, field: str, text: str) -> None:
    """Type into a field and wait for the plan that follows."""
    before = page.evaluate("asked")
    page.fill(f"#f-{field}", text)
    until(page, f"asked > {before} && lastAsked === asked")


def figures_of(page: Any) -> dict[str, float | None]:
    found: dict[str, float | None] = page.evaluate(
        "Object.fromEntries(Object.entries(lastPlan.figures).map(([n, f]) => [n, f.value]))"
    )
    return found


def python_plan(model: str, options: dict[str, str]) -> dict[str, Any]:
    """The plan as its JSON, or `{"error": ...}` for a request that is refused."""
    try:
        return dict(json.loads(json.dumps(as_json(make_plan(request_from(model, options))))))
    except TiercelError as error:
        return {"error": str(error)}


def python_figures(options: dict[str, str]) -> dict[str, float | None]:
    plan = python_plan(options.pop("model"), options)
    return {name: figure["value"] for name, figure in plan["figures"].items()}


def random_options(dice: random.Random) -> dict[str, str]:
    context = dice.choice([1, 300, 4096, 8192, 32768, 131072])
    options = {
        "model": dice.choice(page_module.plannable()).name,
        "gpu": dice.choice(["a100", "h100", "h200", "b200", "gb300", "l4"]),
        "gpus": str(dice.choice([16, 64])),
        "tp": dice.choice(["1", "2", "4", "8"]),
        "pp": dice.choice(["1", "2", "4"]),
        "weights-dtype": dice.choice(page_module.WEIGHTS),
        "kv-dtype": dice.choice(page_module.KV_DTYPES),
        "mfu": str(dice.choice([0.1, 0.37, 0.5, 1])),
        "sessions": str(dice.randint(1, 5000)),
        "context": str(context),
        "new": str(dice.randint(1, context)),
        "output": str(dice.randint(0, 2000)),
        "turns": str(dice.randint(1, 30)),
        "idle": f"{dice.uniform(0.5, 9000):.3f}s",
        "shared": str(dice.randint(0, context - 1)),
        "disk": dice.choice(["nvme", "10gbe", "s3", "100gbe"]),
    }
    if dice.random() < 0.5:
        options |= {
            "host-ram": f"{dice.randint(0, 9000)}GiB",
            "disk-rate": f"{dice.choice([0.5, 12, 56.25])}GB/s",
        }
    if dice.random() < 0.5:
        options |= {"gpu-price": "3.5@2026-05", "ram-price": "2@2026-05", "disk-price": "0.2@2026-05"}
    return options


def test_the_exported_page_computes_what_python_computes(browser: Any, exported: Path) -> None:
    """Both are IEEE doubles and the same operations, so nothing less than equality will do."""
    page = opened(browser, (exported / "index.html").as_uri())
    dice = random.Random(SEED)
    compared = 0
    while compared < 150:
        options = random_options(dice)
        told = page.evaluate(
            OFFLINE,
            options,
        )
        model = options.pop("model")
        plan = python_plan(model, options)
        assert ("error" in told) == ("error" in plan), (SEED, model, options, told)
        if "error" in plan:
            continue
        expected = {name: figure["value"] for name, figure in plan["figures"].items()}
        assert told["figures"] == expected, (SEED, model, options)
        for key in ("prefix_tokens", "needed_bytes_per_s", "compute_s"):
            assert told["even"][key] == plan["break_even"][key], (SEED, model, options)
        assert told["even"]["tiers"] == [
            tier | {"assumption": here["assumption"]}
            for tier, here in zip(plan["break_even"]["tiers"], told["even"]["tiers"], strict=True)
        ]
        compared += 1
    assert not page.faults
    page.close()


def test_the_sheet_agrees_on_wild_inputs(browser: Any) -> None:
    """Zeros, infinities, NaN and huge numbers too; compared as strings, so NaN equals NaN."""
    page = browser.new_page()
    page.add_script_tag(content=JAVASCRIPT_PRELUDE + SHEET.to_javascript("sheet"))
    dice = random.Random(SEED)
    cells = [cell.name for cell in SHEET.cells.values() if not cell.params]
    for _ in range(300):
        wild = [0.0, 1.0, 1e18, 0.5, 3.0, float("inf"), float("nan"), -1.0]
        inputs = {
            n: dice.choice(wild) if dice.random() < 0.2 else 10 ** dice.uniform(-3, 14) for n in SHEET.inputs
        }
        scope = SHEET.bind(inputs)
        texts = {name: repr(value) for name, value in inputs.items()}
        found = page.evaluate(
            "([texts, cells]) => { const read = {inf: Infinity, nan: NaN};"
            "const value = ([n, t]) => [n, t in read ? read[t] : Number(t)];"
            "const all = sheet(Object.fromEntries(Object.entries(texts).map(value)));"
            "return cells.map((name) => String(all[name])); }",
            [texts, cells],
        )
        for name, text in zip(cells, found, strict=True):
            value = scope[name]
            there = float(text.replace("Infinity", "inf"))
            assert there == value or (there != there and value != value), (SEED, name, texts, text)
    page.close()


@pytest.mark.parametrize("kind", ["served", "exported"])
def test_typing_gives_pythons_numbers_and_a_link_that_gives_them_again(
    kind: str, browser: Any, address: str, exported: Path
) -> None:
    start = address if kind == "served" else (exported / "index.html").as_uri()
    page = opened(browser, start)
    change(page, "sessions", "321")
    change(page, "context", "16384")
    page.select_option("#f-gpu", "h200")
    until(page, "lastAsked === asked && location.href.includes('h200')")
    until(page, "lastPlan.figures.hbm_sessions.value > 0")
    options = page.evaluate("options()")
    assert options["sessions"] == "321"
    assert figures_of(page) == python_figures(dict(options))
    again = opened(browser, page.url)
    assert again.evaluate("options()") == options
    assert figures_of(again) == figures_of(page)
    assert not page.faults
    assert not again.faults
    page.close()
    again.close()


@pytest.mark.parametrize("kind", ["served", "exported"])
def test_a_mistake_is_told_in_place_and_mended(kind: str, browser: Any, address: str, exported: Path) -> None:
    page = opened(browser, address if kind == "served" else (exported / "index.html").as_uri())
    change(page, "gpus", "-2")
    page.wait_for_selector("#error:not([hidden])")
    assert "gpus" in page.inner_text("#error")
    assert page.get_attribute("#error", "role") == "alert"
    change(page, "gpus", "4")
    page.wait_for_selector("#error", state="hidden")
    assert page.evaluate("document.body.dataset.state") == "ready"
    page.close()


def test_the_keyboard_reaches_every_control_and_moves_the_sliders(browser: Any, address: str) -> None:
    page = opened(browser, address)
    wanted = set(
        page.evaluate(
            "[...document.querySelectorAll('#form input, #form select, #form button')]"
            ".map((n) => n.id || n.textContent)"
        )
    )
    reached = set()
    for _ in range(3 * len(wanted)):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert wanted <= reached
    page.focus("#f-context-range")
    before = page.input_value("#f-context")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    after = page.input_value("#f-context")
    assert int(after) > int(before)
    assert page.get_attribute("#f-context-range", "aria-valuetext") == f"{after} tokens"
    until(page, f"lastPlan.figures.session_tokens.value === {int(after) + 256}")
    page.close()


def test_every_control_has_a_name(browser: Any, address: str) -> None:
    page = opened(browser, address)
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter((n) =>"
        " !(n.labels && n.labels.length) && !n.getAttribute('aria-label') && !n.textContent.trim()).length"
    )
    assert nameless == 0
    assert page.get_attribute("#status", "aria-live") == "polite"
    assert page.evaluate("document.querySelector('#chart svg title').textContent").startswith(
        "Bandwidth needed"
    )
    page.close()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(browser: Any, address: str, width: int, colours: str) -> None:
    page = opened(browser, address, width=width, height=844, color_scheme=colours)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 23, 27)") == (colours == "dark")
    page.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_text_has_contrast(browser: Any, address: str, colours: str) -> None:
    """WCAG AA, 4.5 to 1, for ink, soft ink, accent on card, and the warning."""
    page = opened(browser, address, color_scheme=colours)
    pairs = [("--ink", "--ground"), ("--soft", "--card"), ("--soft", "--ground"), ("--accent", "--card"),
             ("--accent-ink", "--accent"), ("--warn", "--warn-ground")]  # fmt: skip
    for ink, ground in pairs:
        luminances = [_luminance(page, name) for name in (ink, ground)]
        high, low = max(luminances), min(luminances)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground, colours)
    page.close()


def _luminance(page: Any, name: str) -> float:
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
    parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_exported_page_asks_nobody(browser: Any, exported: Path) -> None:
    context = browser.new_context(offline=True)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((exported / "index.html").as_uri())
    page.wait_for_selector("body[data-state=ready]")
    assert asked
    assert all(url.startswith(("file:", "data:")) for url in asked)
    context.close()


def test_a_server_that_is_gone_is_told(browser: Any, address: str) -> None:
    page = opened(browser, address)
    page.route("**/api/plan*", lambda route: route.abort())
    change(page, "sessions", "7")
    page.wait_for_selector("#error:not([hidden])")
    assert "does not answer" in page.inner_text("#error")
    page.close()
