"""Demo traffic: really stored and loaded blocks, reports that add up, nothing left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.store.support import eventually

from tiercel.config.paths import CACHE_DIR_VARIABLE
from tiercel.demo import traffic as module
from tiercel.demo.traffic import BLOCK_TOKENS, Engine, content, demo_store, traffic


def test_what_is_reported_is_what_happened(tmp_path: Path) -> None:
    with demo_store(tmp_path / "blocks") as store:
        with traffic(store):
            assert eventually(lambda: store.stats().requests.requests >= 12)
        told, counters = store.stats().requests, store.stats().counters
        decisions = store.overview(256).decisions
        assert len(decisions) == told.requests
        assert told.prompt_tokens == sum(one.prompt_tokens for one in decisions)
        assert told.prompt_tokens == told.computed_tokens + sum(told.reused_tokens.values())
        assert sum(told.reused_tokens.values()) > 0
        assert told.reused_tokens.keys() <= {"ram", "disk"}
        assert sum(told.reused_tokens.values()) <= counters.hit * BLOCK_TOKENS
        assert told.actions["miss"] > 0
        assert told.actions["load"] + told.actions["split"] > 0
        assert told.bad == told.lost == 0
        assert len(store.overview().scopes) > 1
        assert any(node.branches > 1 for node in store.overview().prefixes)
        assert store.flush(10)
        assert store.stats().tiers[0].blocks > 0
    assert list((tmp_path / "blocks").rglob("*.kv"))


def test_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    with demo_store() as store, traffic(store):
        assert eventually(lambda: store.stats().requests.requests >= 1)
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in threading.enumerate() if one.name.startswith("tiercel-demo")]


def test_wrong_bytes_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with demo_store(tmp_path) as store:
        engine = Engine(store, threading.Event())
        scope, tokens = module._Talks(1).prompt()
        chain = scope.chain(tokens)
        first = engine.answer(chain, len(tokens))
        second = engine.answer(chain, len(tokens))
        assert first is not None
        assert second is not None
        assert (first.action, second.action) == ("miss", "load")
        assert second.reused_tokens == {"ram": len(chain) * BLOCK_TOKENS}
        monkeypatch.setattr(module, "content", lambda key: content(key)[::-1])
        with pytest.raises(AssertionError, match="other bytes"):
            engine.answer(chain, len(tokens))
