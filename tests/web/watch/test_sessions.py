"""What a session left, steered over HTTP by its name: an agent's pause under an engine without such calls."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.store.support import RECORD, Served, chain, disk, put, scope

from tiercel.memory import Arena, ArenaKind
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.sessions import tenant_of
from tiercel.web.watch.elsewhere import ServerSource
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import DaemonSource
from tiercel.web.watch.steering import ON_PREFIX, Call, parse_call

from .running import TOKEN, Site, served


def test_a_session_is_put_away_brought_back_kept_and_forgotten(emptied: Site) -> None:
    ours, theirs = chain(5), chain(4, of=scope(salt="u"))
    for salt, of in (("t", ours), ("u", theirs)):
        put(emptied.store, of)
        emptied.store.sessions.note(tenant_of(salt), "agent-7", [of])
    agent = {"session": "agent-7", "cache_salt": "t"}
    assert emptied.act("demote", agent).json() == {
        "object": "cache", "action": "demote", "blocks": 5, "done": 5,
    }  # fmt: skip
    assert emptied.store.stats().ram_blocks == 4, "the other tenant's"
    assert emptied.act("prefetch", agent).json()["done"] == 5
    assert emptied.act("pin", agent | {"ttl": "1m"}).json()["done"] == 5
    assert emptied.store.stats().pins == 5
    assert emptied.act("unpin", agent).json()["done"] == 5
    assert emptied.act("drop", agent).json()["done"] == 5
    assert emptied.store.stats().ram_blocks == 4
    for action in ON_PREFIX:
        for who in (agent, {"session": "agent-7"}, {"session": "other", "cache_salt": "u"}):
            answer = emptied.act(action, who)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert emptied.store.stats().ram_blocks == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session": ""}, "session"),
        ({"session": "a\nb"}, "session"),
        ({"session": "s", "prefix": "f" * 12}, "prefix"),
        ({"session": "s", "cache_salt": ""}, "cache_salt"),
        ({"session": "s", "cache_salt": 7}, "cache_salt"),
        ({"prefix": "f" * 12, "cache_salt": "t"}, "cache_salt"),
        ({"session": "s", "salt": "t"}, "salt"),
    ],
)
def test_wrong_names_are_refused_by_field(emptied: Site, body: object, param: str) -> None:
    answer = emptied.act("demote", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_calls_salt_is_not_shown() -> None:
    call = parse_call("pin", b'{"session": "s", "cache_salt": "secret"}')
    assert call == Call("pin", ttl_s=600.0, session="s", salt="secret")
    assert "secret" not in repr(call)


def test_a_session_of_another_server_and_of_a_daemon_is_steered_through_them(
    emptied: Site, tmp_path: Path
) -> None:
    put(emptied.store, chain(5))
    emptied.store.sessions.note(tenant_of("t"), "agent-7", [chain(5)])
    agent = {"session": "agent-7", "cache_salt": "t"}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with served(ServerSource(emptied.url), Guard(None)) as (url, _):
        told = httpx.post(f"{url}/v1/cache/pin", json=agent | {"ttl": "1m"}, headers=headers, timeout=20)
        assert told.json() == {"object": "cache", "action": "pin", "blocks": 5, "done": 5}
    assert emptied.store.stats().pins == 5
    arena = Arena(RECORD, 16, reserved=4, kind=ArenaKind.SHARED)
    with Served(TieredStore(arena, [(disk(tmp_path / "c"), LaneOptions())])) as store:
        put(store, chain(5))  # type: ignore[arg-type]
        store.sessions.note(tenant_of("t"), "agent-7", [chain(5)])
        source = DaemonSource(store.daemon.path)
        with closing(source), served(source, Guard(TOKEN)) as (url, _):
            told = httpx.post(f"{url}/v1/cache/demote", json=agent, headers=headers, timeout=20)
            assert told.json() == {"object": "cache", "action": "demote", "blocks": 5, "done": 5}
        assert store.stats().ram_blocks == 0
