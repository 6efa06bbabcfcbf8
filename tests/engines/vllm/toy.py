"""vLLM's own scheduler, block pool and connector hooks around a model that is arithmetic.

A token's KV is a number that follows from all tokens up to it, so that every step can check every byte it
attends to: whatever a load, a save or a race gets wrong fails the step that reads it. Starts in a blink.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tiercel.engines.vllm import TiercelConnector, naming, opening
from tiercel.engines.vllm.jobs import Shard
from tiercel.engines.vllm.layout import register
from tiercel.engines.vllm.mover import CpuMover, Mover
from tiercel.engines.vllm.opening import WorkerParts
from tiercel.engines.vllm.worker import WorkerSide
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import Tier

HEADS, SIZE, BLOCK = 2, 4, 16
MODULUS = 1 << 19


class Embedded:
    """A store in this process, with what a daemon's client has besides."""

    slab = None

    def __init__(self, store: Any) -> None:
        self.inner = store

    @property
    def slot_payload_bytes(self) -> int:
        return int(self.inner.arena.slot_bytes) - 4096

    def on_new_slab(self, tell: object) -> None: ...

    def close(self, deadline_s: float = 0.0) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def toy_store(*tiers: tuple[Tier, LaneOptions], slots: int = 256, payload: int = 8192) -> TieredStore:
    """A store whose slots hold `payload` bytes."""
    store = TieredStore(Arena(4096 + payload, slots, reserved=4), tiers)
    assert store.scanned(10)
    return store


def numbers(tokens: Sequence[int], seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number each position's KV is made of: follows from all tokens up to it."""
    found, state = np.empty(len(tokens), np.int64), seed + 1
    for at, token in enumerate(tokens):
        state = (state * 31 + token + 7) % MODULUS
        found[at] = state
    return found


def answer(tokens: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The tokens that a toy model generates after `tokens`."""
    whole = list(tokens)
    for _ in range(count):
        whole.append(int(numbers(whole, seed)[-1]) % 997)
    return whole[len(tokens) :]


@dataclass
class Rank:
    """One worker: its memory and its connector."""

    views: dict[str, torch.Tensor]
    connector: Any
    number: int
    sent: int = 0


@dataclass
class Toy:
    """Settings of a toy engine; `start` makes it."""

    folder: Path
    store: Any
    blocks: int = 65
    layers: int = 2
    window: int | None = None
    ranks: int = 1
    shards: int = 1
    layout: str = "LBHNC"
    units: int = 1
    seed: int = 0
    mover: Callable[[], Mover] = CpuMover
    queue: Callable[[Callable[[], None]], object] = lambda work: work()
    token_s: float = 0.0
    stores: Sequence[Any] = ()
    extra: dict[str, object] = field(default_factory=dict)
    events: bool = False
    prices: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def start(self) -> ToyEngine:
        return ToyEngine(self)


def toy_config(toy: Toy, transfer: dict[str, Any] | None = None) -> Any:
    folder = toy.folder / "toy-model"
    folder.mkdir(exist_ok=True)
    content = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 1000,
        "intermediate_size": 128, "num_hidden_layers": toy.layers, "num_attention_heads": 4,
        "num_key_value_heads": HEADS, "max_position_embeddings": 4096, "rope_theta": 10000.0 + toy.seed,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    settings: dict[str, Any] = {
        "max_model_len": 1024, "max_num_batched_tokens": 128, "max_num_seqs": 16, "block_size": BLOCK,
        **toy.options,
    }  # fmt: skip
    if toy.events:
        settings["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    transfer = transfer or {
        "kv_connector": "TiercelConnector", "kv_connector_module_path": "tiercel.engines.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": toy.extra,
    }  # fmt: skip
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
        kv_transfer_config=transfer, **settings,
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.parallel_config.world_size = toy.ranks
    return config


def toy_cache(toy: Toy) -> KVCacheConfig:
    """One group of full attention, and one with a window over the same memory if the toy has one."""
    shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.float32}
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if toy.window is not None:
        specs.append(SlidingWindowSpec(**shape, sliding_window=toy.window))
    groups, tensors = [], []
    strides = compute_layout_strides(specs[0], toy.blocks, toy.layers, KVCacheLayout[toy.layout])
    for number, spec in enumerate(specs):
        names = [f"group{number}.layer{layer}" for layer in range(toy.layers)]
        groups.append(KVCacheGroupSpec(names, spec))
        total = spec.page_size_bytes * toy.layers * toy.blocks
        tensors.append(KVCacheTensor(total, names, layer_stride=strides[0], block_stride=strides[1]))
    return KVCacheConfig(
        toy.blocks, tensors, groups, kv_cache_layout=toy.layout, hash_block_size=BLOCK,
        kv_tp_replicas=toy.ranks // toy.shards,
    )  # fmt: skip


def toy_views(toy: Toy, cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    raw = torch.empty(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    raw.view(torch.float32).fill_(float("nan"))  # reading what was never written must be noticed
    views: dict[str, torch.Tensor] = {}
    for tensor, group in zip(cache.kv_cache_tensors, cache.kv_cache_groups, strict=True):
        made = create_kv_cache_views(raw, group.kv_cache_spec, toy.blocks, KVCacheLayout[toy.layout], tensor)
        views.update(zip(tensor.layers, made, strict=True))
    return views


class ToyEngine:
    """Scheduler, workers and the loop between them, one step at a time."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.cache = toy_cache(toy)
        self.config = self._config()
        self.config.cache_config.num_gpu_blocks = toy.blocks
        self.stores = list(toy.stores) or [toy.store] * toy.ranks
        init_none_hash(sha256)
        with self._patched(toy.store):
            unit, hashes = resolve_kv_cache_block_sizes(self.cache, self.config)
            self.hasher = get_request_block_hasher(hashes, sha256)
            self.scheduler = Scheduler(
                self.config, self.cache, StructuredOutputManager(self.config), block_size=unit,
                hash_block_size=hashes, log_stats=True,
            )  # fmt: skip
            self.connector: Any = self.scheduler.connector
            self.ranks = [self._rank(number, unit) for number in range(toy.ranks)]
            self._introduce()
        self.aggregator = KVOutputAggregator(toy.ranks)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.outputs: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.stats: dict[str, float] = {}
        self.preemptions = 0
        self.external: dict[str, int] = {}
        self.told: dict[str, Any] = {}
        self.steps = 0

    def _patched(self, store: Any) -> Any:
        page = HEADS * BLOCK * SIZE * 2 * 4 * self.toy.layers * len(self.cache.kv_cache_groups)
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.object(opening, "connect", return_value=Embedded(store)))
        stack.enter_context(mock.patch.object(naming, "PAYLOAD_BYTES_MIN", page * self.toy.units))
        return stack

    def _config(self) -> Any:
        return toy_config(self.toy)

    def _introduce(self) -> None:
        """Tell the scheduler's connector what the workers registered."""
        told = {(0, rank.number): rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        if not self.toy.prices:
            # Arithmetic is faster than any load: left to itself the engine would compute everything.
            self.connector._scheduler.side._pace.prompt = lambda *_: None

    def _rank(self, number: int, unit: int) -> Rank:
        toy, views = self.toy, toy_views(self.toy, self.cache)
        connector = TiercelConnector(self.config, KVConnectorRole.WORKER, self.cache)
        layout = register(self.cache, views)
        replicas = toy.ranks // toy.shards
        shard = Shard(
            number // replicas, toy.shards, number % replicas == 0, layout.digest,
            layout.unit_bytes(unit), "toy",
        )  # fmt: skip
        store = Embedded(self.stores[number])
        side = WorkerSide(
            store, layout, shard, toy.mover(), connector._tally, connector._options.store.load_deadline_s
        )
        connector._worker = WorkerParts(side, shard, store)  # type: ignore[arg-type]
        return Rank(views, connector, number)

    # Requests.

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        generate: int = 1,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        **sampling: Any,
    ) -> Request:
        params = SamplingParams(max_tokens=generate, temperature=0, ignore_eos=True, **sampling)
        request = Request(
            name, list(tokens), params, None, cache_salt=salt, lora_request=lora, block_hasher=self.hasher
        )
        self.prompts[name] = list(tokens)
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "aborted"

    def run(self, name: str, tokens: Sequence[int], generate: int = 1, **options: Any) -> Request:
        """One request from start to end, its answer checked. Returns the request, finished."""
        request = self.add(name, tokens, generate, **options)
        self.drain()
        self.check(name)
        return request

    def begin(self, name: str, tokens: Sequence[int], generate: int = 1) -> None:
        """A request of which something has been computed, however long its lookup took."""
        request = self.add(name, tokens, generate)
        while not request.num_computed_tokens:
            self.step()

    def check(self, name: str) -> None:
        expected = answer(self.prompts[name], len(self.outputs[name]), self.toy.seed)
        assert self.outputs[name] == expected, name

    def drain(self, within_s: float = 30.0) -> None:
        """Steps until nothing is left to do."""
        until_s = time.monotonic() + within_s
        while self.scheduler.has_requests():
            assert time.monotonic() < until_s, "the engine hangs"
            self.step()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.drain()
        assert self.scheduler.reset_prefix_cache()

    def cached(self, request: Request) -> int:
        """Tokens of a request that came from our store."""
        return self.external.get(request.request_id, 0)

    # Steps.

    def step(self) -> None:
        self.steps += 1
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        told = [self._execute(rank, output) for rank in self.ranks]
        result = self.aggregator.aggregate(told)
        outputs = self.scheduler.update_from_output(output, result)
        for batch in outputs.values():
            for one in batch.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    self.external[one.request_id] = one.prefill_stats.num_external_cached_tokens
                if one.kv_transfer_params is not None:
                    self.told[one.request_id] = one.kv_transfer_params
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
            if batch.scheduler_stats is not None and batch.scheduler_stats.kv_connector_stats:
                self._count(batch.scheduler_stats.kv_connector_stats)

    def _count(self, told: dict[str, Any]) -> None:
        for name, amount in told.items():
            self.stats[name] = self.stats.get(name, 0) + amount

    def _execute(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        connector = rank.connector
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.handle_preemptions(output.kv_connector_metadata)
        names, sampled = [], []
        time.sleep(output.total_num_scheduled_tokens * self.toy.token_s)
        for name, count in output.num_scheduled_tokens.items():
            names.append(name)
            sampled.append(self._compute(rank, self.scheduler.requests[name], count))
        told = KVConnectorOutput()
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        told.finished_sending, told.finished_recving = results.finished_sending, results.finished_recving
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told
        )

    def _compute(self, rank: Rank, request: Request, count: int) -> list[int]:
        """Check the KV that the new tokens attend to, write theirs, sample."""
        done = request.num_computed_tokens - count
        tokens = request.all_token_ids[: done + count]
        values = numbers(tokens, self.toy.seed)
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, (table, spec) in enumerate(zip(tables, self.cache.kv_cache_groups, strict=True)):
            window = getattr(spec.kv_cache_spec, "sliding_window", None)
            first = 0 if window is None else max(0, done - window + 1)
            for layer in range(self.toy.layers):
                view = rank.views[f"group{group}.layer{layer}"]
                expected = self._kv(values, group, layer, rank)
                name = request.request_id
                self.toy.queue(partial(self._verify, view, table, expected, first, done, name))
                self.toy.queue(partial(self._write, view, table, expected, done, done + count))
        if done + count < request.num_tokens:
            return []
        return [int(values[-1]) % 997]

    def _kv(self, values: Any, group: int, layer: int, rank: Rank) -> torch.Tensor:
        shard = rank.number // (self.toy.ranks // self.toy.shards)
        return torch.from_numpy((values * 16 + group * 8 + layer * 2 + shard) % (1 << 23)).to(torch.float32)

    def _verify(self, view: Any, table: Any, expected: Any, first: int, stop: int, name: str) -> None:
        if first >= stop:
            return
        at = torch.arange(first, stop)
        blocks = torch.tensor(table)[at // BLOCK]
        assert int(blocks.min()) > 0, f"{name}: attends to the null block"
        found = view[blocks, :, at % BLOCK, :]
        assert torch.equal(found, expected[first:stop, None, None].expand_as(found)), f"{name}: wrong KV"

    def _write(self, view: Any, table: Any, expected: Any, first: int, stop: int) -> None:
        at = torch.arange(first, stop)
        blocks = torch.tensor(table)[at // BLOCK]
        view[blocks, :, at % BLOCK, :] = expected[first:stop, None, None].expand(-1, HEADS, 2 * SIZE)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> ToyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settled(self) -> None:
        """Nothing is held any more: vLLM's blocks, the store's leases and slots."""
        self.drain()
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert not self.scheduler.requests
        for store in {id(one): one for one in self.stores}.values():
            until_s = time.monotonic() + 10
            while store.stats().leases and time.monotonic() < until_s:
                time.sleep(0.01)
            assert store.stats().leases == 0


def prompt(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Tokens of a prompt; the first `shared` are the same for every seed."""
    rng = np.random.default_rng(seed)
    head = np.random.default_rng(12345).integers(1, 990, shared).tolist()
    return (head + rng.integers(1, 990, length).tolist())[:length]
