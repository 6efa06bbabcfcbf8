"""Take the documentation's pictures of the planner page in a real Chromium: `python -m scripts.screenshots`.

Needs the `playwright` package and a Chromium (`$CHROMIUM`, or one on the PATH); downloads nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from scripts.browser import FLAGS, chromium
from tiercel.web.serving import served

IMAGES = Path(__file__).parents[1] / "docs" / "images"
QUERY = "gpu-price=3.50@2026-05&ram-price=2.00@2026-05&disk-price=0.20@2026-05&host-ram=256GiB"
Shot = tuple[str, int, int, str, str]
# name, width, height, colours, what to scroll to ("" for the top)
SHOTS: tuple[Shot, ...] = (
    ("planner-desktop-light", 1280, 900, "light", ""),
    ("planner-desktop-dark", 1280, 900, "dark", ""),
    ("planner-phone-results-light", 390, 844, "light", "#tiles"),
    ("planner-phone-results-dark", 390, 844, "dark", "#chart"),
)


def shoot(browser: Browser, address: str, folder: Path, shots: tuple[Shot, ...]) -> None:
    """Save one picture per row of `shots`."""
    for name, width, height, colours, where in shots:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
        page.goto(address)
        page.wait_for_selector("body[data-state=ready]")
        if where:
            page.evaluate(
                "(at) => scrollTo(0, document.querySelector(at).getBoundingClientRect().top - 60)", where
            )
        page.screenshot(path=folder / f"{name}.png")
        page.close()
        sys.stdout.write(f"{folder / name}.png\n")


def main() -> None:
    """Pictures of the served page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        with served() as address:
            shoot(browser, f"{address}/?{QUERY}", folder, SHOTS)
        browser.close()


if __name__ == "__main__":
    main()
