"""vLLM itself on a CPU, with the demo model in fp32 and a private daemon: cold and warm answers are equal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.engines.vllm.driver import Answer, Engine

pytestmark = pytest.mark.model
BLOCK = 32
TIER_BYTES = "512MiB"


def prompts() -> list[list[int]]:
    """Lengths around the edges of blocks and steps; some begin alike."""
    rng = np.random.default_rng(1)
    shared = rng.integers(100, 40000, 700).tolist()
    made = []
    for length in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 600, 1000):
        made.append(rng.integers(100, 40000, length).tolist())
        if length > 60:
            made.append((shared[: length // 2] + made[-1])[:length])
    return made


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> list[Answer]:
    """What vLLM without a connector answers."""
    engine = Engine(model_dir, None, block_size=BLOCK)
    answers = engine.ask(prompts())
    engine.close()
    return answers


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(model_dir: Path, tier: Path, reference: object) -> Iterator[Engine]:
    extra = {"ram.size": "700MiB", "tiers": [{"path": str(tier), "size": TIER_BYTES}]}
    engine = Engine(model_dir, extra, block_size=BLOCK)
    yield engine
    engine.close()


def whole_blocks(asked: Sequence[list[int]]) -> int:
    """Tokens that can come from the store.

    On a host with far more work than cores a question to the daemon may time out and its prompt be computed:
    what every single prompt finds is checked where time plays no part.
    """
    return sum((len(one) - 1) // BLOCK * BLOCK for one in asked)


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_cold_and_warm_equal_vllm_without_connector(engine: Engine, reference: list[Answer]) -> None:
    asked = prompts()
    assert_equal(engine.ask(asked), reference)
    engine.forget()
    warm = engine.ask(asked)
    assert_equal(warm, reference)
    # All at once, so some find the shared part in vLLM's own cache by then.
    assert sum(one.cached for one in warm) > whole_blocks(asked) * 0.9
    assert engine.figure("loaded_tokens") > 5000
    assert engine.figure("loads_failed") == 0
    for number, one in enumerate(asked[:6]):
        engine.forget()
        assert_equal(engine.ask([one]), [reference[number]])


def test_the_engine_s_own_prefix_is_completed(engine: Engine, reference: list[Answer]) -> None:
    asked = prompts()[-2]
    engine.forget()
    engine.ask([asked[:333]], 1)
    (warm,) = engine.ask([asked])
    assert_equal([warm], [reference[-2]])
    assert warm.cached == (len(asked) - 1) // BLOCK * BLOCK


def test_salts_isolate_tenants(engine: Engine) -> None:
    asked = prompts()[-1]
    engine.ask([asked], salts=["a"])
    engine.forget()
    found = [engine.ask([asked], salts=[salt])[0].cached for salt in ("b", "a")]
    assert found == [0, (len(asked) - 1) // BLOCK * BLOCK]


def test_prompt_log_probs_are_computed(engine: Engine, reference: list[Answer]) -> None:
    engine.forget()
    (answer,) = engine.ask([prompts()[-2]], prompt_logprobs=1)
    assert answer.cached == 0
    assert_equal([answer], [reference[-2]])


def test_scheduler_calls_are_short(engine: Engine) -> None:
    """An order of magnitude: a call that waits for anything takes far longer."""
    calls = engine.figure("scheduler_calls")
    assert calls > 100
    assert engine.figure("scheduler_calls_slow") < calls / 5


def test_what_a_restarted_engine_finds_on_disk(
    engine: Engine, model_dir: Path, tier: Path, reference: list[Answer]
) -> None:
    """The private daemon and its RAM end with their engine; what it wrote stays."""
    asked = prompts()
    engine.close()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and len(list(tier.rglob("*.kv"))) < 100:
        time.sleep(0.1)
    # What is found is loaded, however busy the host is, unless a question to the daemon timed out at first.
    extra = {"ram.size": "700MiB", "tiers": [{"path": str(tier), "size": TIER_BYTES}], "store.load": "always"}
    for _ in range(3):
        again = Engine(model_dir, extra, block_size=BLOCK)
        warm = again.ask(asked)
        again.close()
        assert_equal(warm, reference)
        if sum(one.cached for one in warm) > whole_blocks(asked) * 0.5:
            break
    assert sum(one.cached for one in warm) > whole_blocks(asked) * 0.5
