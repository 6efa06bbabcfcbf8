"""Real engines on a real daemon that is killed, hangs and comes back: no request fails, hangs or is wrong."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.engines.vllm.driver import Answer, Engine
from tests.service.running import Running
from tests.service.test_faults import settled
from tests.store.support import eventually

# 1 MiB of this model's KV, so that a block of ours is one of vLLM's.
BLOCK = 128
LOAD_DEADLINE_S = 2.0
# One round of all prompts may take a lookup's and a load's deadline longer, and what two busy cores add.
LIMIT_S = LOAD_DEADLINE_S + 30.0
FULL = [(length - 1) // BLOCK * BLOCK for length in (700, 700, 450, 300, 513, 129, 128, 33)]


def prompts(seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 500, 700).tolist()
    made = [shared, shared[:384] + rng.integers(1, 500, 316).tolist()]
    return made + [rng.integers(1, 500, length).tolist() for length in (450, 300, 513, 129, 128, 33)]


def save_llama(folder: Path, seed: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # Wide for its KV: loading must be worth it, or the connector rightly computes.
    config = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=2048,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), 0)


@pytest.fixture(scope="module")
def reference(model: Path) -> list[Answer]:
    """What vLLM without a connector answers."""
    engine = Engine(model, None, block_size=BLOCK, skip_tokenizer_init=True)
    answers = engine.ask(prompts())
    engine.close()
    return answers


class Host:
    """A host's daemon, always at the same socket and directory, and the engines that name it."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.disk = folder / "s", folder / "kv"
        self.daemon = self.start()

    def start(self) -> Running:
        self.daemon = Running(self.socket, "ram.size=200MiB", disk=self.disk, disk_size="500MiB")
        return self.daemon

    def kill(self) -> None:
        with self.daemon:
            self.daemon.kill()

    def engine(self, model: Path, **settings: object) -> Engine:
        # However busy the host is: these are tests of faults, not of what loading is worth.
        load = {"store.load_deadline": f"{LOAD_DEADLINE_S}s", "store.load": "always"}
        extra = {"daemon.socket": str(self.socket), **load}
        return Engine(model, extra, block_size=BLOCK, skip_tokenizer_init=True, **settings)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    one = Host(tmp_path_factory.mktemp("d"))
    yield one
    one.kill()


@pytest.fixture(scope="module")
def engine(host: Host, model: Path, reference: object) -> Iterator[Engine]:
    one = host.engine(model)
    yield one
    one.close()


@pytest.fixture(scope="module")
def other(host: Host, model: Path, engine: object) -> Iterator[Engine]:
    one = host.engine(model)
    yield one
    if one.process.poll() is None:
        one.close()


def warm(engine: Engine) -> list[int]:
    """Tokens that were not computed, once vLLM's own cache is empty."""
    engine.forget()
    return [one.cached for one in engine.ask(prompts())]


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [one.tokens for one in answers]


def test_two_engines_on_one_host_share(
    host: Host, engine: Engine, other: Engine, reference: list[Answer]
) -> None:
    assert tokens(engine.ask(prompts())) == tokens(reference)
    assert eventually(lambda: warm(engine) == FULL)
    found = other.ask(prompts())
    assert tokens(found) == tokens(reference)
    assert [one.cached for one in found] == FULL, "its first request, and nothing of it was computed here"
    assert host.daemon.status()["clients"] >= 4


def test_killed_again_and_again_with_requests_running(
    host: Host, engine: Engine, other: Engine, reference: list[Answer]
) -> None:
    """Before, during and after loads and stores."""
    stop = threading.Event()
    took: list[float] = []
    wrong: list[object] = []
    running = [0, 0]
    caught_running = 0

    def traffic(number: int, one: Engine) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            try:
                if turn % 2:
                    one.forget()  # so that everything comes from us
                started_s = time.monotonic()
                running[number] = 1
                known = tokens(one.ask(prompts()))
                one.ask(prompts(seed=100 * number + turn), 1)  # so that there is something to store
                running[number] = 0
                took.append(time.monotonic() - started_s)
                if known != tokens(reference):
                    wrong.append(turn)
            except (AssertionError, OSError, ValueError) as fault:
                wrong.append(fault)
                return

    chance = random.Random(3)
    threads = [threading.Thread(target=traffic, args=pair) for pair in enumerate((engine, other))]
    for thread in threads:
        thread.start()
    for _ in range(6):
        time.sleep(chance.uniform(0.2, 1.5))
        caught_running += sum(running)
        host.kill()
        time.sleep(chance.uniform(0.0, 1.0))
        host.start()
    stop.set()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert wrong == []
    assert caught_running >= 3, "the fault fired with requests running"
    assert max(took) < LIMIT_S
    assert eventually(lambda: warm(engine) == FULL, 60), "reuse is back"
    assert eventually(lambda: warm(other) == FULL, 60)
    assert tokens(other.ask(prompts())) == tokens(reference)
    assert eventually(settled(host.daemon)), host.daemon.status()


def test_without_a_daemon_everything_is_computed_and_right(
    host: Host, engine: Engine, reference: list[Answer]
) -> None:
    host.kill()
    engine.forget()
    started_s = time.monotonic()
    found = engine.ask(prompts())
    assert time.monotonic() - started_s < LIMIT_S
    assert tokens(found) == tokens(reference)
    assert max(one.cached for one in found[2:]) == 0
    host.start()
    assert eventually(lambda: warm(engine) == FULL)


def test_a_daemon_that_hangs_costs_no_more_than_a_deadline(
    host: Host, engine: Engine, reference: list[Answer]
) -> None:
    assert eventually(lambda: warm(engine) == FULL)
    engine.forget()
    host.daemon.signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        found = engine.ask(prompts())
        assert time.monotonic() - started_s < LIMIT_S
        assert tokens(found) == tokens(reference)
    finally:
        host.daemon.signal(signal.SIGCONT)
    assert eventually(lambda: warm(engine) == FULL)
    assert tokens(engine.ask(prompts())) == tokens(reference)


@pytest.mark.parametrize(("seed", "dtype"), [(1, "float32"), (0, "bfloat16")])
def test_other_weights_and_other_dtypes_share_nothing(
    host: Host, engine: Engine, model: Path, tmp_path: Path, seed: int, dtype: str
) -> None:
    assert eventually(lambda: warm(engine) == FULL), "the control: it is all there for the one who stored it"
    folder = model if seed == 0 else save_llama(tmp_path, seed)
    stranger = host.engine(folder, dtype=dtype, served_model_name=str(model))
    try:
        found = stranger.ask(prompts())
        assert max(one.cached for one in found[2:]) == 0
        # Half as many bytes in bf16: two of vLLM's blocks make one.
        assert eventually(lambda: warm(stranger)[0] >= 512), "the control: its own it finds"
        again = stranger.ask(prompts())
        assert tokens(again) == tokens(found)
    finally:
        stranger.close()


def test_an_engine_that_is_killed_leaves_no_lease_and_the_next_one_hits(
    host: Host, engine: Engine, other: Engine, reference: list[Answer]
) -> None:
    fresh = prompts(seed=77)

    def ask() -> None:
        with pytest.raises(AssertionError, match="vLLM ended with"):
            other.ask(fresh * 4, 200)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.7)
    whole = psutil.Process(other.process.pid)
    for one in [*whole.children(recursive=True), whole]:
        one.kill()
    asking.join(30)
    assert other.process.wait(30) < 0
    other.process.stdin.close()  # type: ignore[union-attr]
    other.process.stdout.close()  # type: ignore[union-attr]
    assert eventually(settled(host.daemon)), host.daemon.status()
    assert eventually(lambda: warm(engine) == FULL)
    assert tokens(engine.ask(prompts())) == tokens(reference)
    found = engine.ask(fresh)
    engine.forget()
    assert tokens(engine.ask(fresh)) == tokens(found)
