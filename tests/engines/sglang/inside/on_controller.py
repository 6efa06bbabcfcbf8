"""SGLang's own cache controller with its prefetch and backup threads, on the backend it loads by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from tests.engines.sglang.inside.support import mha
from tests.service.running import Running
from tests.store.support import eventually

PAGE = 4
WAIT_S = 30.0


class Prompt(list[int]):
    """Token ids with the namespace of their request, as SGLang's keys have them."""

    def __init__(self, tokens: Any, extra_key: str | None = None, cache_salt: str | None = None) -> None:
        super().__init__(tokens)
        self.extra_key, self.cache_salt = extra_key, cache_salt


class Controlled:
    """A controller, and what its tree would do: hand out pages, wait for acknowledgements."""

    def __init__(self, socket: Path, **extra: Any) -> None:
        device = MHATokenToKVPool(
            size=64, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=64, layer_num=2, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.host = mha("page_first", torch.bfloat16, PAGE, 2)
        self.host.kv_buffer.view(torch.int16).random_()
        options = {
            "backend_name": "tiercel", "module_path": "tiercel.engines.sglang",
            "class_name": "TiercelHiCache", "revision": "1", "daemon.socket": str(socket), **extra,
        }  # fmt: skip
        allocator = PagedTokenToKVPoolAllocator(64, PAGE, torch.bfloat16, "cpu", device, False)
        self.controller = HiCacheController(
            allocator,
            self.host,
            PAGE,
            None,
            threading.Event(),
            io_backend="kernel",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="org/model",
            storage_backend_extra_config=options,
        )

    def backed_up(self, prompt: Prompt) -> int:
        """Tokens backed up from the first host pages."""
        names = get_storage_hash_str(prompt, None, page_size=PAGE)
        self.controller.write_storage(torch.arange(len(prompt)), prompt, names)
        return int(self.controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)

    def prefetched(self, prompt: Prompt) -> tuple[int, int]:
        """Tokens found and tokens loaded into the last host pages."""
        self.controller.prefetch("request", prompt)
        operation = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        operation.host_indices = torch.arange(16, 16 + operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            loaded = max(loaded, ack.completed_tokens or 0)
            if ack.completed_req:
                return int(operation.storage_hit_count), loaded

    def page(self, number: int) -> bytes:
        """One host page."""
        return self.host.get_data_page(number * PAGE).contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def controlled(socket: Path, **extra: Any) -> Iterator[Controlled]:
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**alone):
        one = Controlled(socket, **extra)
        try:
            yield one
        finally:
            one.controller.detach_storage_backend()


@pytest.mark.parametrize("extra", [{"interface_v1": 1}, {}], ids=["places", "tensors"])
def test_what_was_backed_up_is_prefetched_by_another_engine(tmp_path: Path, extra: dict[str, Any]) -> None:
    with Running(tmp_path / "s", "ram.size=16MiB") as daemon:
        with controlled(daemon.path, **extra) as one:
            assert one.backed_up(Prompt(range(16))) == 16
            source = [one.page(number) for number in range(4)]
        with controlled(daemon.path, **extra) as other:
            assert other.prefetched(Prompt([*range(16), 7, 7, 7, 7])) == (16, 16)
            assert [other.page(4 + number) for number in range(4)] == source
            assert other.prefetched(Prompt([9, *range(1, 16)])) == (0, 0), "another first token"


def test_salts_and_adapters_never_meet(tmp_path: Path) -> None:
    """D02, D04, D05: by SGLang's own names of pages, seeded with the namespace of a request."""
    namespaces: list[dict[str, str]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "aa"},
        {"extra_key": "a", "cache_salt": "a"},
    ]  # fmt: skip
    with Running(tmp_path / "s", "ram.size=16MiB") as daemon, controlled(daemon.path, interface_v1=1) as one:
        for number, namespace in enumerate(namespaces):
            assert one.backed_up(Prompt(range(16), **namespace)) == 16
            for other in namespaces[number + 1 :]:
                assert one.prefetched(Prompt(range(16), **other)) == (0, 0)
            assert one.prefetched(Prompt(range(16), **namespace)) == (16, 16)


def test_its_threads_outlive_a_daemon(tmp_path: Path) -> None:
    """An exception or a None would end them, and reuse with them, for the life of the engine."""
    with Running(tmp_path / "s", "ram.size=16MiB") as daemon, controlled(daemon.path, interface_v1=1) as one:
        assert one.backed_up(Prompt(range(16))) == 16
        daemon.kill()
        assert one.prefetched(Prompt(range(16))) == (0, 0)
        assert one.backed_up(Prompt(range(16))) == 0
        with Running(tmp_path / "s", "ram.size=16MiB"):
            assert eventually(lambda: one.backed_up(Prompt(range(16))) == 16, WAIT_S)
            assert one.prefetched(Prompt(range(16))) == (16, 16)
        assert all(thread.is_alive() for thread in vars(one.controller).values() if is_thread(thread))


def is_thread(value: object) -> bool:
    return isinstance(value, threading.Thread)


def test_a_mistake_ends_the_attachment(tmp_path: Path) -> None:
    with (
        pytest.raises(Exception, match=r"did you mean 'ram\.size'"),
        controlled(tmp_path / "s", **{"ram.sise": "1GiB"}),
    ):
        pass
