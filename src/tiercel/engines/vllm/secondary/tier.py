"""`TiercelTier`: vLLM's interface of a secondary tier, spread over lookups, transfers and events.

vLLM makes one in its scheduler's process and calls it from its scheduler's thread, so nothing here waits:
all that takes time goes to the daemon, by threads. This module only translates and decides nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiercel.config import Config, human_bytes
from tiercel.engines.options import read_options
from tiercel.engines.vllm.hints import read_hints
from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.opening import check_room, mark_for
from tiercel.engines.vllm.secondary.events import Residence
from tiercel.engines.vllm.secondary.lookups import Lookups, Question
from tiercel.engines.vllm.secondary.naming import (
    apart,
    chunk_tokens,
    identity_of_chunks,
    making_engine,
    windowed_groups,
)
from tiercel.engines.vllm.secondary.pace import Pace
from tiercel.engines.vllm.secondary.prefixes import KEY_BYTES, Run
from tiercel.engines.vllm.secondary.transfers import Transfers
from tiercel.engines.vllm.stats import Tally, timed
from tiercel.engines.vllm.support import check_engine, check_version
from tiercel.errors import ConfigError, EngineError
from tiercel.service import RemoteStore, connect
from tiercel.store import Prompt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

log = logging.getLogger("tiercel")

COUNTERS = {
    "loaded_chunks": "Chunks loaded into vLLM's CPU tier",
    "loaded_bytes": "Bytes loaded into vLLM's CPU tier",
    "load_seconds": "Time of loads, summed over loads",
    "loads_failed": "Loads that ended early; what was missing was computed",
    "stored_chunks": "Chunks stored that were not there before",
    "stored_bytes": "Bytes stored",
    "store_seconds": "Time of stores, summed over stores",
    "stores_skipped": "Stores dropped because too many waited or the deadline passed",
    "lookups_timed_out": "Lookups that did not answer in time",
    "hints_ignored": "Hints of requests that were none, and were left out",
    "scheduler_calls": "Calls from vLLM's scheduler, lookups of single chunks apart",
    "scheduler_calls_slow": "Calls from vLLM's scheduler that took more than 0.5 ms",
    "scheduler_seconds": "Time spent in calls from vLLM's scheduler",
}
_PREFIX = "vllm:tiercel_secondary_"


class TiercelTier(SecondaryTierManager):
    """Tiercel's tiers below vLLM's CPU tier: bounded, verified, lasting, shared, also on other hosts.

    Options are Tiercel's settings, and of vLLM's own `enable_kv_events` and `locality`. Raises TiercelError,
    one line, for what cannot be; once made, no fault of ours is more than a miss.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **options: object,
    ) -> None:
        check_version(vllm.__version__)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = _locality(locality)
        engine = making_engine()
        check_engine(engine.config)
        config = read_options(options, f"secondary_tiers: {tier_type}")
        row_bytes = self.block_size_bytes
        identity = identity_of_chunks(engine, offloading_spec, row_bytes)
        private = re.sub(r"_dp\d+$", "", offloading_spec.config.engine_id)
        self._tally = Tally(COUNTERS)
        self._store = store = _open(config, row_bytes, private)
        self._identity = mark_for(identity, store, (), row_bytes)
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._residence = Residence(store, self.locality) if events else None
        noted = None if self._residence is None else self._residence.note
        self._names = Names(self._identity, KEY_BYTES)
        windowed = windowed_groups(engine, offloading_spec)
        self._chunk_tokens = chunk_tokens(offloading_spec)
        self._prices = len(offloading_spec.config.groups) == 1 and not windowed
        self._pace = Pace()
        self._lookups = Lookups(store, self._names, windowed, self._tally, noted)
        self._transfers = Transfers(store, primary_kv_view, self._tally, config.store.load_deadline_s, noted)
        log.info("tiercel: %d tokens per chunk, %s", self._chunk_tokens, human_bytes(row_bytes))

    # Requests.

    @timed
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read what the request says to us."""
        self._pace.began(req_context.req_id)
        self._lookups.request(req_context, read_hints(req_context.kv_transfer_params, self._tally))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget it; what is under way for it goes on."""
        self._lookups.forget(req_context.req_id)
        self._pace.over(req_context.req_id)

    # Finding.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS when it is known, RETRY until then."""
        return self._lookups.look(self._lookups.request(req_context), key)

    @timed
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let chunks count as used."""
        self._lookups.touch(self._lookups.request(req_context), keys)

    @timed
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask what the step wanted to know."""
        self._pace.scheduled(context.new_req_ids)
        self._lookups.send(self._priced)

    # Moving.

    @timed
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fill rows of the CPU tier."""
        request = self._lookups.request(job_metadata.req_context)
        self._transfers.load(job_metadata, request.prefixes.runs(job_metadata.keys), self._names)

    @timed
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Keep rows of the CPU tier."""
        request = self._lookups.request(job_metadata.req_context)
        if request.stale or not request.hints.store:
            self._transfers.decline(job_metadata)
            return
        runs = request.prefixes.runs(job_metadata.keys)
        self._watch(job_metadata, runs)
        self._transfers.store(job_metadata, runs, self._names, request.hints)

    def _watch(self, job: TransferJob, runs: Sequence[Run]) -> None:
        if self._prices and len(runs) == 1:
            self._pace.came_down(job.req_context.req_id, runs[0].start, runs[0].stop, self._chunk_tokens)

    def _priced(self, question: Question) -> Prompt | None:
        if not self._prices or len(question.runs) != 1:
            return None
        return self._pace.prompt(question.runs[0].stop, self._chunk_tokens)

    @timed
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over since the last time."""
        ended = self._transfers.ended()
        for one in ended:
            if one.lost:
                self._lookups.lost(one.job.req_context.req_id, one.lost)
        return [one.result for one in ended]

    def drain_jobs(self) -> None:
        """Wait for all jobs, then begin anew under other names.

        vLLM calls this when it forgets its CPU tier: it sleeps, or its weights change, which it cannot tell
        apart. What was stored stays as it is, for engines with the weights of the files.
        """
        self._transfers.drain()
        self._names = Names(apart(self._identity, "reset"), KEY_BYTES)
        self._lookups.restart(self._names)
        if self._residence is not None:
            self._residence.restart()

    # Telling.

    def has_pending_work(self) -> bool:
        """Whether a step is needed to publish events."""
        return self._residence is not None and self._residence.waiting()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that came to and left our tiers."""
        return () if self._residence is None else self._residence.take()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Our counters."""
        return {_PREFIX + name: OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last time."""
        counts = self._tally.take_counts()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, amount in counts.items():
            stats.increase_counter(_PREFIX + name, amount)
        return stats

    def shutdown(self) -> None:
        """End the threads and leave the store; what it holds stays there."""
        self._lookups.close()
        self._transfers.close()
        if self._residence is not None:
            self._residence.close()
        self._store.close()


def _open(config: Config, row_bytes: int, private: str) -> RemoteStore:
    store = connect(config, row_bytes, private=private)
    try:
        check_room(store, row_bytes)
    except EngineError:
        store.close()
        raise
    return store


def _locality(given: object) -> Locality | None:
    if given is None:
        return None
    try:
        return Locality(given)
    except ValueError:
        accepted = ", ".join(one.value for one in Locality)
        raise ConfigError(f"secondary_tiers: locality is {given!r}; accepted are {accepted}") from None
