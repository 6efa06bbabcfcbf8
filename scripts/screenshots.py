"""Take the documentation's pictures of the site in a real Chromium.

`python -m scripts.screenshots [live|plan]`. Those of the live page show the demo traffic, as with
`tiercel dashboard --demo`, after it ran for a while. Needs the `playwright` package and a Chromium
(`$CHROMIUM`, or one on the PATH); downloads nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, sync_playwright

from scripts.browser import FLAGS, chromium
from tiercel.demo.traffic import demo_store, traffic
from tiercel.web.listening import bind
from tiercel.web.serving import served
from tiercel.web.watch.app import make_planner
from tiercel.web.watch.beside import beside
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import StoreSource
from tiercel.web.watch.token import make_token

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PLAN = "/plan?gpu-price=3.50@2026-05&ram-price=2.00@2026-05&disk-price=0.20@2026-05&host-ram=256GiB"
TRAFFIC_S = 200.0
_SETTLE_MS = 2500


class Shot(NamedTuple):
    """One picture. `where` is what to scroll to, empty for the top."""

    name: str
    width: int
    height: int
    colours: str
    where: str = ""


PLAN_SHOTS = (
    Shot("planner-desktop-light", 1280, 900, "light"),
    Shot("planner-desktop-dark", 1280, 900, "dark"),
    Shot("planner-phone-results-light", 390, 844, "light", "#tiles"),
    Shot("planner-phone-results-dark", 390, 844, "dark", "#chart"),
)
LIVE_SHOTS = (
    Shot("dashboard-light", 1280, 800, "light"),
    Shot("dashboard-dark", 1280, 800, "dark"),
    Shot("dashboard-prefixes", 1280, 620, "light", "[aria-labelledby=prefixes-title]"),
    Shot("dashboard-requests", 1280, 620, "light", "[aria-labelledby=decisions-title]"),
    Shot("dashboard-phone-light", 375, 812, "light"),
    Shot("dashboard-phone-dark", 375, 812, "dark", "[aria-labelledby=time-title]"),
)


@contextmanager
def planner() -> Iterator[str]:
    """The planner's address."""
    with served(bind("127.0.0.1", 0), make_planner()) as url:
        yield f"{url}{PLAN}"


@contextmanager
def live() -> Iterator[str]:
    """The live page's address, once there is something to see."""
    with demo_store() as store, traffic(store):
        source = StoreSource(lambda: store, "demo", "made-up traffic")
        with beside(source, bind("127.0.0.1", 0), Guard(make_token())) as url:
            time.sleep(TRAFFIC_S)
            yield url


def shoot(browser: Browser, address: str, folder: Path, shots: tuple[Shot, ...]) -> None:
    """Save one picture per row of `shots`."""
    for name, width, height, colours, where in shots:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
        page.goto(address)
        page.wait_for_selector("body[data-state=ready], body[data-state=live]")
        page.wait_for_timeout(_SETTLE_MS)
        if where:
            page.evaluate(
                "(at) => scrollTo(0, document.querySelector(at).getBoundingClientRect().top - 14)", where
            )
        page.screenshot(path=folder / f"{name}.png")
        page.close()
        sys.stdout.write(f"{folder / name}.png\n")


def main() -> None:
    """Pictures of the served pages."""
    wanted = sys.argv[1:] or ["live", "plan"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        if "plan" in wanted:
            with planner() as address:
                shoot(browser, address, IMAGES, PLAN_SHOTS)
        if "live" in wanted:
            with live() as address:
                shoot(browser, address, IMAGES, LIVE_SHOTS)
        browser.close()


if __name__ == "__main__":
    main()
