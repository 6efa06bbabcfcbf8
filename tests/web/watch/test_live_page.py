"""The live page in a real Chromium: the store's own figures, buttons by clicks, daemons that come and go."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.service.running import Running
from tests.store.support import branch, chain, drop_ram, eventually, put

from tiercel.blocks import Identity, Scope
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import DaemonSource, StoreSource

from .running import TOKEN, Site, request, served, site_over_a_store, some_requests

ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'


def opened(browser: Any, url: str, width: int = 1280, **more: Any) -> Any:
    """The page, once it shows figures; every error of the browser is kept in `page.faults`."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **more)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda told: page.faults.append(told.text) if told.type == "error" else None)
    page.goto(url)
    return page


def until(page: Any, condition: str) -> None:
    """Wait until `condition` holds in the page; asked from here, as the page's policy forbids eval there."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never became true: {condition}; page says {page.inner_text('body')[:2000]}")


def says(page: Any, selector: str, words: str) -> None:
    """Wait until an element has these words in it."""
    found = f"(document.querySelector({selector!r}) || {{textContent: ''}}).textContent.includes({words!r})"
    until(page, found)


def test_the_pages_numbers_are_the_stores(browser: Any, site: Site) -> None:
    some_requests(site.store)
    assert site.store.flush(10)
    page = opened(browser, site.url)
    says(page, "#tile-reused", "5 requests")
    told = site.overview()["stats"]
    assert told["requests"]["saved_s"] == pytest.approx(1.1)
    assert page.inner_text("#tile-saved b") == "1.1 s"
    assert page.inner_text("#tile-spent b") == "0.005 s"
    share = round(100 * told["requests"]["hit_rate"])
    assert page.inner_text("#tile-reused b") == f"{share} %"
    assert "56 of 132" in page.inner_text("#tile-reused")
    # Means of 0.1 and 0.2 s with reuse, of 0.8, 0.5 and 0.6 s without.
    assert page.inner_text("#tile-ttft b") == "150 ms"
    assert "630 ms when nothing" in page.inner_text("#tile-ttft")
    places = page.inner_text("#places")
    assert "19 blocks of 8 KiB" in places
    assert "152 KiB of 1 MiB" in places
    assert page.locator("#scopes .row.scope[data-key]").count() == 2
    assert page.locator("#prefixes .row.prefix[data-key]").count() == 3
    decisions = page.locator("#decisions .row.decision[data-key]")
    assert decisions.count() == 5
    assert "as the test wanted it" in decisions.first.inner_text()
    assert "a secret salt" not in page.content()
    assert not page.faults
    # One more, and all of it follows by itself.
    request(site.store, chain(8, seed=1), ttft_s=0.3, saved_s=0.9)
    says(page, "#tile-reused", "6 requests")
    assert page.inner_text("#tile-saved b") == "2 s"
    assert decisions.count() == 6
    page.close()


def test_shared_prefixes_are_a_tree(browser: Any, site: Site) -> None:
    for seed in (1, 2, 3):
        put(site.store, branch(3, 2, seed), 0 if seed == 1 else 3)
    page = opened(browser, site.url)
    until(page, "document.querySelectorAll('#prefixes .row.prefix[data-key]').length === 4")
    rows = page.locator("#prefixes .row.prefix[data-key]")
    assert "3 go on" in rows.nth(0).inner_text()
    levels = [rows.nth(at).evaluate("(row) => row.style.getPropertyValue('--level')") for at in range(4)]
    assert levels == ["0", "1", "1", "1"]
    page.close()


def test_buttons_ask_for_the_token_and_do_what_they_say(browser: Any, site: Site) -> None:
    of = chain(6)
    put(site.store, of)
    assert site.store.flush(10)
    page = opened(browser, site.url)
    page.click("#prefixes .row.prefix[data-key] >> text=Pin")
    page.fill("#ask-token-input", "the wrong token")
    page.click("#ask-yes")
    says(page, "#ask-wrong", "not the right one")
    assert site.store.stats().pins == 0
    page.fill("#ask-token-input", TOKEN)
    page.click("#ask-yes")
    says(page, "#said", "6 of 6 blocks pinned")
    assert site.store.stats().pins == 6
    says(page, "#places", "6 pinned")
    # It is known now; what can be lost is asked about first.
    page.click("#prefixes .row.prefix[data-key] >> text=More…")
    page.check("input[value=unpin]")
    page.click("#ask-yes")
    says(page, "#said", "no longer pinned")
    assert site.store.stats().pins == 0
    drop_ram(site.store)
    page.click("#prefixes .row.prefix[data-key] >> text=Prefetch")
    says(page, "#said", "6 of 6 blocks in RAM")
    assert site.store.stats().ram_blocks == 6
    page.click("#scopes >> text=Clear…")
    page.click("#ask-no")
    assert site.store.stats().ram_blocks == 6
    page.click("#scopes >> text=Clear…")
    page.click("#ask-yes")
    says(page, "#said", "6 blocks forgotten")
    assert site.store.stats().ram_blocks == 0
    says(page, "#scopes", "Nothing is stored")
    assert [fault for fault in page.faults if "401" not in fault] == []
    page.close()


def test_dropping_is_by_keyboard_too_and_escape_is_no(browser: Any, site: Site) -> None:
    put(site.store, chain(4))
    page = opened(browser, site.url)
    page.evaluate(f"sessionStorage.setItem('tiercel-token', '{TOKEN}')")
    page.wait_for_selector("#prefixes .row.prefix[data-key]")
    page.focus("#prefixes .row.prefix[data-key] button:nth-child(3)")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('ask').open")
    page.keyboard.press("Escape")
    until(page, "!document.getElementById('ask').open")
    assert site.store.stats().ram_blocks == 4
    page.keyboard.press("Enter")
    until(page, "document.getElementById('ask').open")
    page.focus("input[value=unpin]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    says(page, "#said", "4 blocks forgotten")
    assert site.store.stats().ram_blocks == 0
    page.close()


def test_a_name_that_is_code_stays_text(browser: Any, site: Site) -> None:
    evil = Scope(Identity(ATTACK, "1", "bf16", b"g", "layout/1", 4), adapter=ATTACK.encode())
    of = evil.chain(list(range(16)))
    put(site.store, of)
    site.store._faults.note(f"{ATTACK}.{ATTACK}", ATTACK)
    decision = request(site.store, chain(2), ttft_s=0.1, saved_s=0.0)
    site.store.reports.add(
        type(decision)(prompt_tokens=8, block_tokens=4, reason=ATTACK, engine=ATTACK, done=True)
    )
    page = opened(browser, site.url)
    for place in ("#scopes", "#prefixes", "#faults", "#decisions"):
        says(page, place, "<img src=x onerror")
    assert page.evaluate("window.hit === undefined")
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0
    assert not page.faults
    page.close()


def test_a_daemon_that_is_killed_and_comes_back(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    source = DaemonSource(path)
    with served(source) as (url, _):
        with Running(path, disk=tmp_path / "disk") as daemon:
            page = opened(browser, url)
            says(page, "#engines-now", "none has opened the store yet")
            store = daemon.connect()
            for _ in range(2):
                request(store, chain(4), ttft_s=0.5, saved_s=0.2)  # type: ignore[arg-type]
            says(page, "#tile-reused", "2 requests")
            store.close()
            daemon.kill()
            until(page, "document.body.dataset.state === 'away'")
            says(page, "#away", "does not answer")
            says(page, "#away", "Figures are from")
            assert "2 requests" in page.inner_text("#tile-reused")
        with Running(path, disk=tmp_path / "disk") as daemon:
            until(page, "document.body.dataset.state === 'live'")
            assert page.is_hidden("#away")
            store = daemon.connect()
            request(store, chain(4), ttft_s=0.2, saved_s=0.1)  # type: ignore[arg-type]
            says(page, "#tile-reused", "1 request")
            store.close()
        page.close()
    source.close()


def test_a_server_that_ends_is_told_and_found_again(browser: Any, tmp_path: Path) -> None:
    with site_over_a_store(tmp_path / "a") as site:
        page = opened(browser, site.url)
        until(page, "document.body.dataset.state === 'live'")
        port = int(site.url.rpartition(":")[2])
    until(page, "document.body.dataset.state === 'away'")
    says(page, "#away", "No answer")
    from tiercel.web import serving
    from tiercel.web.listening import bind
    from tiercel.web.watch.app import make_site
    from tiercel.web.watch.watch import Watch

    watch = Watch(StoreSource(lambda: None, "daemon", "back again"))
    with serving.served(bind("127.0.0.1", port), make_site(watch, Guard(TOKEN)), watch.end_streams):
        watch.start()
        until(page, "document.body.dataset.state === 'live'")
        says(page, "#link-text", "back again")
    watch.close()
    page.close()


def test_where_reading_needs_the_token_the_page_asks_for_it(browser: Any, tmp_path: Path) -> None:
    with site_over_a_store(tmp_path, Guard(TOKEN, reads=True)) as site:
        some_requests(site.store)
        page = opened(browser, site.url)
        page.fill("#ask-token-input", "wrong")
        page.click("#ask-yes")
        says(page, "#ask-wrong", "not the right one")
        assert "5 requests" not in page.inner_text("main")
        page.fill("#ask-token-input", TOKEN)
        page.click("#ask-yes")
        says(page, "#tile-reused", "5 requests")
        page.close()


@pytest.mark.parametrize("width", [375, 768, 1280])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(browser: Any, site: Site, width: int, colours: str) -> None:
    some_requests(site.store)
    page = opened(browser, site.url, width=width, color_scheme=colours)
    says(page, "#tile-reused", "5 requests")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") == (colours == "dark")
    nameless = page.evaluate(
        "[...document.querySelectorAll('main button, main input')].filter((one) =>"
        " !(one.labels && one.labels.length) && !one.textContent.trim()).length"
    )
    assert nameless == 0
    page.close()


def test_the_charts_follow_and_can_be_pointed_at(browser: Any, site: Site) -> None:
    page = opened(browser, site.url)
    until(page, "document.body.dataset.state === 'live'")
    some_requests(site.store)
    until(page, "document.querySelectorAll('#charts circle, #charts polyline').length > 0")
    assert page.locator("#charts .chart").count() == 3
    page.click("#range >> text=1 h")
    assert page.get_attribute("#range button:last-child", "aria-pressed") == "true"
    page.hover("#charts .chart:first-child svg")
    until(page, "document.querySelectorAll('#charts .cross').length === 1")
    assert not page.faults
    page.close()


def test_both_pages_are_one_site(browser: Any, site: Site) -> None:
    page = opened(browser, site.url)
    page.click("nav >> text=Plan")
    page.wait_for_selector("body[data-state=ready]")
    assert page.url == f"{site.url}/plan"
    assert page.is_hidden("#connect")
    page.click("nav >> text=Live")
    until(page, "document.body.dataset.state === 'live'")
    assert not page.faults
    assert eventually(lambda: site.watch._listeners == 1)
    page.close()
    assert eventually(lambda: site.watch._listeners == 0)


CONTRASTS = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number).map((one, at) =>
    (text.startsWith('color(') && at < 3 ? one * 255 : one));
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = parts(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((all, one, at) => all + one * [0.2126, 0.7152, 0.0722][at], 0);
  const all = [...document.querySelectorAll('main *, header *')].filter((node) =>
    node.getClientRects().length && [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim())
    && !node.closest('svg') && !node.matches('.branch'));
  return all.map((node) => {
    const pair = [light(parts(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    return [(pair[0] + 0.05) / (pair[1] + 0.05), node.className, node.textContent.slice(0, 40)];
  });
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_word_has_contrast(browser: Any, site: Site, colours: str) -> None:
    """WCAG AA, 4.5 to 1, of all that is written on the page, badges and faults included."""
    some_requests(site.store)
    site.store._faults.note("disk.read", "a fault of this test")
    report = request(site.store, chain(2, seed=9), ttft_s=0.1, saved_s=0.0)
    for action, outcome in (("split", "answered"), ("recompute", "answered"), ("load", "failed")):
        site.store.reports.add(dataclasses.replace(report, action=action, outcome=outcome))
    page = opened(browser, site.url, color_scheme=colours)
    says(page, "#tile-reused", "9 requests")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 60
    assert min(found)[0] < 21.0  # or nothing was measured
    assert [one for one in found if one[0] < 4.5] == []
    page.close()
