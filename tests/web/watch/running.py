"""Sites over stores: made, filled with requests that really happened, and taken down again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.store.support import TOKENS, chain, disk, get, make_store, put, scope

from tiercel.blocks import Chain
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.policy import Decision
from tiercel.web import serving
from tiercel.web.listening import bind
from tiercel.web.watch.app import make_site
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import Source, StoreSource
from tiercel.web.watch.watch import Watch

TOKEN = "the-right-token-of-this-test"
CAP_BYTES = 1 << 20


@dataclass
class Site:
    """A running site. `ask` and `act` go over HTTP with the right token, unless told otherwise."""

    url: str
    watch: Watch
    store: TieredStore

    def ask(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20, **more)

    def overview(self) -> dict[str, Any]:
        return dict(self.ask("/v1/overview").json())

    def act(self, action: str, body: object, token: str | None = TOKEN, **more: Any) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}/v1/cache/{action}", json=body, headers=headers, timeout=20, **more)

    def prefix_of(self, of: Chain) -> str:
        """How the overview names the run that ends with a chain; a tree is kept for a moment."""
        wanted = of.keys[-1][8:14].hex()
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            if any(one["prefix"] == wanted for one in self.overview()["prefixes"]):
                return wanted
            time.sleep(0.1)
        raise AssertionError(f"{wanted} is never shown")


@contextmanager
def served(source: Source, guard: Guard | None = None) -> Iterator[tuple[str, Watch]]:
    """The site over a source; its address and its watch."""
    watch = Watch(source)
    watch.start()
    app = make_site(watch, guard or Guard(TOKEN))
    with serving.served(bind("127.0.0.1", 0), app, watch.end_streams) as url:
        yield url, watch
    watch.close()


@contextmanager
def site_over_a_store(root: Path, guard: Guard | None = None, slots: int = 40) -> Iterator[Site]:
    with make_store((disk(root), LaneOptions(cap_bytes=CAP_BYTES)), slots=slots) as store:
        source = StoreSource(lambda: store, "server", "a test")
        with served(source, guard) as (url, watch):
            yield Site(url, watch, store)


def request(
    store: TieredStore, of: Chain, *, ttft_s: float, saved_s: float, tokens: int | None = None
) -> Decision:
    """One request as an engine makes it: load what is there, store the rest, report what became of it."""
    sources = get(store, of) if store.lookup(of).blocks else []
    if len(sources) < len(of):
        put(store, of, len(sources))
    prompt = tokens if tokens is not None else len(of) * TOKENS
    places = {place: sources.count(place) for place in dict.fromkeys(sources)}
    return store.report(
        Decision(
            prompt_tokens=prompt,
            block_tokens=TOKENS,
            reason="as the test wanted it",
            found=places,
            loaded=places,
            reused_tokens={place: count * TOKENS for place, count in places.items()},
            computed_tokens=prompt - len(sources) * TOKENS,
            action="load" if sources else "miss",
            engine="test",
            ttft_s=ttft_s,
            saved_s=saved_s,
            spent_s=0.001,
            done=True,
        )
    )


def some_requests(store: TieredStore) -> None:
    """Three prompts, two of which come again; one belongs to a tenant."""
    salted = chain(6, seed=3, of=scope(salt="a secret salt"))
    for of, ttft_s, saved_s in (
        (chain(8, seed=1), 0.8, 0.0), (chain(5, seed=2), 0.5, 0.0), (salted, 0.6, 0.0),
        (chain(8, seed=1), 0.1, 0.7), (salted, 0.2, 0.4),
    ):  # fmt: skip
        request(store, of, ttft_s=ttft_s, saved_s=saved_s)


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The overviews of a stream, as they come."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])
