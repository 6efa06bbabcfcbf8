"""Both engines over one throttled tier, each with the ways to answer that `benchmarks.harm` compares.

Times are those of one request alone in its engine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.core import forget_ram
from benchmarks.throttle import Throttled
from benchmarks.ttft import first_token, prompts
from tiercel.blocks import record_bytes
from tiercel.config import Config
from tiercel.engines.transformers import TransformersEngine
from tiercel.memory import Arena, ArenaKind
from tiercel.models import demo_model_dir
from tiercel.service import Daemon
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import FilesTier

COMPUTE, LOAD, OURS = "always compute", "always load", "tiercel"
_OPTIONS = LaneOptions(cap_bytes=8 << 30, deadline_s=60.0)
_SLOTS, _RESERVED = 200, 8
# A block of the demo model under vLLM, with room to spare: 128 tokens of 23 KB.
_VLLM_PAYLOAD_BYTES = 3 << 20
_WRITTEN_S = 120.0


class Arms(Protocol):
    """One engine, one store whose RAM is emptied before every request, one tier behind a link."""

    name: str
    tier: Throttled

    def prompt(self, tokens: int) -> list[int]: ...

    def ttft(self, arm: str, tokens: list[int]) -> float:
        """Seconds to the first token of an answer that neither the engine nor RAM knows anything of."""

    def written(self) -> None:
        """Wait until all is in the tier."""

    def together(self, arm: str, texts: list[list[int]]) -> list[float]:
        """Seconds to the first token of each of many requests at once; none for an engine that takes one."""


@contextmanager
def transformers_arms(folder: Path) -> Iterator[Arms]:
    """Our own engine, with the store in its process."""
    tier = Throttled(FilesTier(folder / "transformers"))
    engine = TransformersEngine(demo_model_dir(os.environ), block_tokens=256)
    arena = Arena(record_bytes(engine.layout.payload_bytes), _SLOTS, reserved=_RESERVED)
    with TieredStore(arena, [(tier, _OPTIONS)]) as store:
        engine.attach(store)
        yield _Transformers(engine, store, tier)


class _Transformers:
    name = "transformers"

    def __init__(self, engine: TransformersEngine, store: TieredStore, tier: Throttled) -> None:
        self._engine, self._store, self.tier = engine, store, tier

    def prompt(self, tokens: int) -> list[int]:
        return prompts(self._engine, tokens)[0]

    def ttft(self, arm: str, tokens: list[int]) -> float:
        forget_ram(self._store)
        self._store._load_always = arm == LOAD
        return first_token(self._engine, tokens, use_cache=arm != COMPUTE).timing.ttft_s

    def written(self) -> None:
        assert self._store.flush(_WRITTEN_S)

    def together(self, arm: str, texts: list[list[int]]) -> list[float]:
        return []


@contextmanager
def vllm_arms(folder: Path) -> Iterator[Arms]:
    """vLLM in a process of its own, and a daemon's store in this one, where its tier can be slowed down."""
    from benchmarks.vllm.arms import ENVIRONMENT, Setup
    from benchmarks.vllm.driver import EngineProcess

    tier = Throttled(FilesTier(folder / "vllm"))
    arena = Arena(record_bytes(_VLLM_PAYLOAD_BYTES), _SLOTS, reserved=_RESERVED, kind=ArenaKind.SHARED)
    socket = folder / "s"
    daemon = Daemon(Config.load(None, {}, {"daemon.socket": str(socket)}), socket)
    daemon._store = store = TieredStore(arena, [(tier, _OPTIONS)])
    serving = threading.Thread(target=daemon.run, daemon=True)
    serving.start()
    connector = {
        "kv_connector": "TiercelConnector",
        "kv_connector_module_path": "tiercel.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"daemon.socket": str(socket), "store.load_deadline": "60s"},
    }
    setup = Setup(folder=folder, model=demo_model_dir(os.environ), lmcache=None, ram_gib=0, small_ram_mib=0)
    options = setup.engine_options(connector)
    engine = EngineProcess("vllm", Path(sys.executable), options, ENVIRONMENT, folder / "vllm.log")
    try:
        engine.wait_ready()
        yield _Vllm(engine, store, tier)
    finally:
        engine.stop()
        daemon.stop()
        serving.join(10.0)
        daemon.close()


class _Vllm:
    name = "vLLM"

    def __init__(self, engine: object, store: TieredStore, tier: Throttled) -> None:
        from benchmarks.vllm.driver import EngineProcess

        assert isinstance(engine, EngineProcess)
        self._engine, self._store, self.tier = engine, store, tier

    def prompt(self, tokens: int) -> list[int]:
        from benchmarks.vllm.measure import prompt_of

        return prompt_of(tokens, 0)

    def ttft(self, arm: str, tokens: list[int]) -> float:
        return float(self._engine.ask("ttft", tokens=tokens, hints=self._begin(arm))["seconds"])

    def together(self, arm: str, texts: list[list[int]]) -> list[float]:
        hints = self._begin(arm)
        answer = self._engine.ask("together", prompts=texts, max_tokens=1, hints=hints)
        return [float(seconds) for seconds in answer["first_s"]]

    def _begin(self, arm: str) -> dict[str, bool]:
        self._engine.ask("reset")
        forget_ram(self._store)
        self._store._load_always = arm == LOAD
        return {"no_load": True, "no_store": True} if arm == COMPUTE else {}

    def written(self) -> None:
        self._engine.ask("reset")
        assert self._store.flush(_WRITTEN_S)


ENGINES = {"transformers": transformers_arms, "vllm": vllm_arms}
