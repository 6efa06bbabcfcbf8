"""vLLM's tiering as it is, but for the copies between engine and CPU tier, which vLLM makes on GPUs only."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """Everything of vLLM's spec, with a worker that copies by memcpy."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, self.blocks_per_chunk, region)


class CpuWorker(OffloadingWorker):
    """Copies at once; laid out as vLLM's own worker does."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._groups = caches.group_data_refs
        self._per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._engine = [one.tensor.view(torch.int8).view((-1, one.page_size_bytes)) for one in caches.tensors]
        self._host = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk) for one in caches.tensors
        ]
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        self._host = []
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: LoadStoreSpec, *, to_host: bool) -> bool:
        assert isinstance(host, CPULoadStoreSpec)
        block_at = chunk_at = nbytes = 0
        for refs, blocks, index in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            if not blocks:
                continue
            skip = index % self._per_chunk
            chunks = cdiv(blocks + skip, self._per_chunk)
            ids = engine.block_ids[block_at : block_at + blocks]
            rows = host.block_ids[chunk_at : chunk_at + chunks]
            for ref in refs:
                there, here = np.empty(blocks, np.uint64), np.empty(blocks, np.uint64)
                compute_sub_block_ptrs(ids, 1, there, self._engine[ref.tensor_idx])
                compute_sub_block_ptrs(rows, self._per_chunk, here, self._host[ref.tensor_idx], skip)
                for one, other in zip(there.tolist(), here.tolist(), strict=True):
                    pair = (other, one) if to_host else (one, other)
                    self._memcpy(*pair, ref.page_size_bytes)
                nbytes += blocks * ref.page_size_bytes
            block_at += blocks
            chunk_at += chunks
        self._finished.append(TransferResult(job_id, True, nbytes, 1e-6))
        return True
