"""vLLM's own offloading flags as a draft: both native connectors, secondary tiers, and LMCache's connectors.

Written after vLLM 0.32.0; a test compares the names with the installed package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tiercel.config import format_bytes
from tiercel.migrate import places
from tiercel.migrate.draft import GIB, Draft, Fate
from tiercel.migrate.given import Given

CONFIG = "--kv-transfer-config"
SIZE = "--kv-offloading-size"
BACKEND = "--kv-offloading-backend"
NATIVE = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_EVENTS = "vLLM's --kv-events-config; events name the tier"
_DISK_BYTES = 100 * GIB  # SimpleCPUOffloadConnector's own default

# Fields of --kv-transfer-config itself.
TRANSFER: dict[str, tuple[Fate, str]] = {
    "kv_connector_module_path": (Fate.NEEDLESS, "tiercel.engines.vllm"),
    "kv_load_failure_policy": (Fate.NEEDLESS, "recompute, always"),
    "engine_id": (Fate.NEEDLESS, "engines are told apart by what they run"),
    "kv_buffer_device": (Fate.NEEDLESS, "blocks go through host memory"),
    "kv_buffer_size": (Fate.NEEDLESS, "blocks go through slots of the arena"),
    "kv_rank": (Fate.NOT_HERE, "disaggregated prefill is not here"),
    "kv_parallel_size": (Fate.NOT_HERE, "disaggregated prefill is not here"),
    "kv_ip": (Fate.NOT_HERE, "disaggregated prefill is not here"),
    "kv_port": (Fate.NOT_HERE, "disaggregated prefill is not here"),
    "enable_permute_local_kv": (Fate.NOT_HERE, "disaggregated prefill is not here"),
}
# Fields of its kv_connector_extra_config under vLLM's own connectors, without those that have an equal.
EXTRA: dict[str, tuple[Fate, str]] = {
    "spec_name": (Fate.NEEDLESS, "one store; tiers are listed"),
    "spec_module_path": (Fate.NEEDLESS, "one store; tiers are listed"),
    "block_size": (Fate.NEEDLESS, "chosen: the fewest of vLLM's blocks with 1 MiB or more"),
    "blocks_per_chunk": (Fate.NEEDLESS, "chosen: the fewest of vLLM's blocks with 1 MiB or more"),
    "eviction_policy": (
        Fate.NEEDLESS,
        "least recently used, ends of prompts first, an equal share for each tenant",
    ),
    "cache_policy_module_path": (Fate.NEEDLESS, "least recently used, ends of prompts first"),
    "max_tracker_size": (Fate.NEEDLESS, "bounded by itself"),
    "lazy_offload": (
        Fate.NEEDLESS,
        "into RAM blocks are copied as they are computed; write = on-evict is for tiers",
    ),
    "offload_prompt_only": (Fate.NEEDLESS, "full blocks of answers are kept too"),
    "backpressure": (
        Fate.NEEDLESS,
        "measured: what a tier cannot take is dropped, oldest first, and counted",
    ),
    "canonical_layout": (Fate.NOT_HERE, "blocks are shared by engines with the same number of ranks"),
    "self_describing_kv_events": (Fate.NEEDLESS, _EVENTS),
    "enable_kv_events": (Fate.NEEDLESS, _EVENTS),
    "disk_buffer_slots": (Fate.NEEDLESS, "slots of the arena"),
    "use_page_cache": (Fate.NEEDLESS, "direct I/O where the file system allows it"),
}
_TIER: dict[str, tuple[Fate, str]] = {
    "backpressure": EXTRA["backpressure"],
    "enable_kv_events": (Fate.NEEDLESS, _EVENTS),
    "locality": (Fate.NEEDLESS, "events name the tier"),
}
_KINDS = {
    "p2p": "hosts share a tier (a directory, Valkey, objects, Mooncake)",
    "kvcr": "no tier of this kind",
    "example": "for tests",
}


def translate(draft: Draft, flags: Sequence[Given], ranks: int) -> list[Given]:
    """Put the flags that say where KV goes into the draft. Returns LMCache's options among them."""
    transfer = _transfer(flags)
    single = {one.name: one for one in flags}
    size, backend = single.get(SIZE), single.get(BACKEND)
    found: list[Given] = []
    if backend is not None:
        draft.note(backend, Fate.NEEDLESS, "the connector is Tiercel's")
    if size is not None:
        if backend is not None and backend.value == "lmcache":
            draft.note(size, Fate.DECIDE, "the LMCache server has the size: migrate its command line as well")
        else:
            draft.set_size(
                size, "ram.size", size.number() * GIB, "in GiB, of all ranks together, there and here"
            )
    if transfer is not None:
        found = _connector(draft, transfer, ranks, size is None)
    return found


def _transfer(flags: Sequence[Given]) -> Given | None:
    """--kv-transfer-config as one object, with what is given dotted (--kv-transfer-config.kv_role) in it."""
    whole: dict[str, object] = {}
    found = False
    for one in flags:
        head, _, path = one.name.partition(".")
        if head != CONFIG:
            continue
        found = True
        if not path:
            whole.update({name: inner.value for name, inner in one.mapping().items()})
            continue
        *outer, last = path.split(".")
        place = whole
        for name in outer:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                raise one.fail("a field of an object")
            place = inner
        place[last] = _value(one.value)
    return Given(CONFIG, whole, "flag") if found else None


def _value(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _connector(draft: Draft, transfer: Given, ranks: int, size_wanted: bool) -> list[Given]:
    """One connector's configuration; of several (MultiConnector) each."""
    fields = transfer.mapping()
    connector = fields.pop("kv_connector", None)
    extra = fields.pop("kv_connector_extra_config", None)
    options = extra.mapping() if extra is not None and extra.value is not None else {}
    name = connector.value if connector is not None else None
    if (role := fields.pop("kv_role", None)) is not None:
        both = role.value == "kv_both"
        draft.note(
            role,
            Fate.NEEDLESS if both else Fate.DECIDE,
            "kv_both" if both else "only kv_both is accepted here",
        )
    for key, one in fields.items():
        draft.note(one, *TRANSFER.get(key, (Fate.UNKNOWN, "no field of vLLM 0.32")))
    if name == "MultiConnector":
        found = []
        for one in options.pop("connectors", transfer.inner("connectors", [])).items():
            found += _connector(draft, one, ranks, size_wanted)
        _rest(draft, options, {})
        return found
    if connector is not None:
        draft.note(connector, *_fate_of(str(name)))
    if name in NATIVE or name is None:
        _native(draft, options, ranks, size_wanted)
        return []
    if str(name).startswith("LMCache"):
        found = [
            one
            for key, one in options.items()
            if key.startswith("lmcache.") and not key.startswith("lmcache.mp.")
        ]
        rest = {key: one for key, one in options.items() if one not in found}
        for key in list(rest):
            if key.startswith("lmcache.mp."):
                draft.note(rest.pop(key), Fate.NEEDLESS, "daemon.socket, or a daemon of the engine's own")
        _rest(draft, rest, {})
        return [Given(one.name.partition("lmcache.")[2], one.value, "flag") for one in found]
    _rest(draft, options, {})
    return []


def _fate_of(connector: str) -> tuple[Fate, str]:
    if connector in NATIVE:
        return Fate.TAKEN, "TiercelConnector"
    if connector == "LMCacheMPConnector":
        return (
            Fate.DECIDE,
            "TiercelConnector; the sizes are in the server's command line: migrate that as well",
        )
    if connector.startswith("LMCacheConnector"):
        return Fate.TAKEN, "TiercelConnector; what LMCache's file says counts if it is named, too"
    if connector == "TiercelConnector":
        return Fate.NEEDLESS, "is Tiercel's already"
    return (
        Fate.NOT_HERE,
        "no offloading that is known here: keep it beside TiercelConnector under MultiConnector",
    )


def _native(draft: Draft, options: dict[str, Given], ranks: int, size_wanted: bool) -> None:
    """The options of vLLM's own connectors."""
    whole, per_rank = options.pop("cpu_bytes_to_use", None), options.pop("cpu_bytes_to_use_per_rank", None)
    if per_rank is not None:
        draft.set_size(per_rank, "ram.size", per_rank.number() * ranks, f"per rank there: times {ranks}")
        size_wanted = False
    if whole is not None and size_wanted:
        draft.set_size(whole, "ram.size", whole.number(), "in bytes, of all ranks together")
    elif whole is not None:
        draft.note(whole, Fate.NEEDLESS, "another option goes before it")
    if (threshold := options.pop("store_threshold", None)) is not None:
        if threshold.number() >= 2:
            draft.set(threshold, "store.admission", "second-sight", "a threshold of 2 is the only one")
        else:
            draft.note(threshold, Fate.NEEDLESS, "blocks are stored at once")
    _simple_disk(draft, options)
    tiers = options.pop("secondary_tiers", None)
    for one in tiers.items() if tiers is not None else []:
        _tier(draft, one)
    _rest(draft, options, EXTRA)


def _simple_disk(draft: Draft, options: dict[str, Given]) -> None:
    """The disk of SimpleCPUOffloadConnector."""
    backend = options.pop("kv_offload_backend", None)
    path, size = options.pop("disk_path", None), options.pop("disk_capacity_bytes", None)
    on = backend is not None and backend.value == "disk"
    if backend is not None:
        draft.note(backend, Fate.NEEDLESS, "a directory is a tier")
    if path is not None and on:
        size_bytes = max(int(size.number()) if size is not None else _DISK_BYTES, 2**20)
        places.directory(draft, path, path.text(), format_bytes(size_bytes))
        if size is not None:
            draft.note(size, Fate.TAKEN, "size of that tier; what lies there survives a restart")
    elif path is not None or size is not None:
        for one in filter(None, (path, size)):
            draft.note(one, Fate.NEEDLESS, "kv_offload_backend is not disk: no tier there either")


def _tier(draft: Draft, given: Given) -> None:
    options = given.mapping()
    kind = options.pop("type", None)
    name = str(kind.value) if kind is not None else ""
    makers: dict[str, Callable[[Draft, Given, dict[str, Given]], None]] = {"fs": _fs, "obj": _obj}
    if kind is not None and name in makers:
        makers[name](draft, kind, options)
    else:
        why = _KINDS.get(name, "write a tier of your own (docs/tiers.md)")
        draft.note(kind or given, Fate.NOT_HERE, why)
    _rest(draft, options, _TIER)


def _fs(draft: Draft, kind: Given, options: dict[str, Given]) -> None:
    path = options.pop("root_dir", None)
    if path is None:
        raise kind.fail("a tier with root_dir")
    more: dict[str, object] = {}
    for theirs, ours in (("n_read_threads", "read_workers"), ("n_write_threads", "write_workers")):
        if (threads := options.pop(theirs, None)) is not None:
            more[ours] = max(1, min(int(threads.number()), 64))
            draft.note(threads, Fate.TAKEN, f"{ours} = {more[ours]} of that tier")
    places.directory(draft, path, path.text(), None, **more)


def _obj(draft: Draft, kind: Given, options: dict[str, Given]) -> None:
    config = options.pop("store_config", None)
    if config is None:
        raise kind.fail("a tier with store_config")
    places.native_objects(draft, kind, config.mapping(), options)


def _rest(draft: Draft, options: dict[str, Given], known: dict[str, tuple[Fate, str]]) -> None:
    for name, one in options.items():
        draft.note(one, *known.get(name, (Fate.UNKNOWN, "no option that is known here")))
