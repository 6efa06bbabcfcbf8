"""LMCache's in-process settings (a YAML file, `LMCACHE_...` variables) as a draft. After LMCache 0.5.6.

Every name that LMCache defines stands below (a test compares with the installed package); any other is told
as unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.config import format_bytes
from tiercel.errors import ConfigError
from tiercel.migrate import places
from tiercel.migrate.draft import GIB, Draft, Fate
from tiercel.migrate.given import Given, printable

PREFIX = "LMCACHE_"
CONFIG_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_FILE_BYTES_MAX = 1 << 20
_DEPTH_MAX = 32
DEFAULT_CPU_GB = 5.0  # LMCache's own

# Names that LMCache still knows, and what they are called today.
ALIASES = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "nixl_peer_port": "pd_peer_init_port",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
# What has an equal, or needs a look at its value.
EQUAL = frozenset(
    "local_cpu max_local_cpu_size local_disk max_local_disk_size local_disk_path_sharding remote_url "
    "remote_serde remote_storage_plugins storage_plugins extra_config blocking_timeout_secs".split()
)
_PD = "disaggregated prefill is not here; stay with LMCache if you live by it"
_P2P = "hosts share a tier (a directory, Valkey, objects, Mooncake); engines do not send to each other"
_BLEND = "reuse of text that is not a prefix is not here; stay with LMCache if you live by it"
_DIRECT = "blocks go through host memory; no GDS, NIXL or CXL"
_HIDDEN = "only KV is kept, no hidden states"
_CONTROLLER = "no controller: `tiercel cache`, the dashboard and the daemon's socket"
_API = "the daemon's socket, and `tiercel daemon --http`"
_WITHOUT: tuple[tuple[str, Fate, str], ...] = (
    ("chunk_size save_unfull_chunk", Fate.NEEDLESS, "full blocks only, 1 MiB or more of vLLM's blocks"),
    ("save_decode_cache", Fate.NEEDLESS, "full blocks of answers are kept always"),
    ("cache_policy", Fate.NEEDLESS, "least recently used, ends of prompts first, equal shares of tenants"),
    ("pre_caching_hash_algorithm", Fate.NEEDLESS, "names come from vLLM's block hashes; no PYTHONHASHSEED"),
    ("use_layerwise enable_async_loading", Fate.NEEDLESS, "loads overlap with other requests"),
    ("lookup_timeout_ms", Fate.NEEDLESS, "a lookup has a second, then it is a miss"),
    ("min_retrieve_tokens hit_miss_ratio", Fate.NEEDLESS, "store.load = when-faster decides by measuring"),
    ("priority_limit", Fate.NEEDLESS, "a request says no_store or priority low (docs/vllm.md)"),
    ("pin_timeout_sec pin_check_interval_sec", Fate.NEEDLESS, "a lease ends with its process, by no clock"),
    ("local_cpu_use_hugepages reserve_local_cpu_size numa_mode enable_lazy_memory_allocator "
     "lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio "
     "lazy_memory_safe_size",
     Fate.NEEDLESS, "the daemon takes and touches all of ram.size at its start"),
    ("enable_kv_events", Fate.NEEDLESS, "vLLM's --kv-events-config; events name the tier"),
    ("enable_chunk_statistics chunk_statistics_auto_start_statistics "
     "chunk_statistics_auto_exit_timeout_hours "
     "chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy",
     Fate.NEEDLESS, "figures are always there (docs/metrics.md)"),
    ("internal_api_server_enabled internal_api_server_host internal_api_server_port_start "
     "internal_api_server_include_index_list internal_api_server_socket_path_prefix", Fate.NEEDLESS, _API),
    ("run_script_api_enabled script_allowed_imports", Fate.NOT_HERE, "no script is run for anybody"),
    ("py_enable_gc use_gpu_connector_v3 enable_scheduler_bypass_lookup lookup_server_worker_ids "
     "lmcache_instance_id lmcache_worker_ids", Fate.NEEDLESS, "of LMCache's inside"),
    ("mp_host mp_port", Fate.NEEDLESS, "daemon.socket, a Unix socket of the host"),
    ("retrieve_locations store_location", Fate.NEEDLESS, "the order of [[tiers]], and `write` of each"),
    ("runtime_plugin_locations", Fate.NOT_HERE, "no programs are started beside"),
    ("external_lookup_client", Fate.NOT_HERE, "tiers are asked themselves"),
    ("audit_actual_remote_url", Fate.NOT_HERE, "`tiercel cache verify` checks every byte"),
    ("remote_config_url app_id", Fate.NOT_HERE, "settings: the file, TIERCEL_... variables and flags"),
    ("enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens "
     "blend_special_str", Fate.NOT_HERE, _BLEND),
    ("enable_p2p p2p_host p2p_init_ports p2p_lookup_ports transfer_channel", Fate.NOT_HERE, _P2P),
    ("enable_controller controller_pull_url controller_reply_url lmcache_worker_ports "
     "lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time", Fate.NOT_HERE, _CONTROLLER),
    ("enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port "
     "pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec "
     "pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification "
     "pd_bidirectional", Fate.NOT_HERE, _PD),
    ("nixl_backends nixl_buffer_size nixl_buffer_device gds_path gds_path_sharding gds_buffer_size use_gds "
     "gds_backend maru_path maru_pool_size", Fate.NOT_HERE, _DIRECT),
    ("enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode",
     Fate.NOT_HERE, _HIDDEN),
)  # fmt: skip
WITHOUT = {name: (fate, why) for names, fate, why in _WITHOUT for name in names.split()}
# Variables that are no settings of the table above.
_VARIABLES: dict[str, tuple[Fate, str]] = {
    "TRACK_USAGE": (Fate.NEEDLESS, "nothing is sent anywhere"),
    "USAGE_TRACK_URL": (Fate.NEEDLESS, "nothing is sent anywhere"),
    "USAGE_TRACK_INTERVAL": (Fate.NEEDLESS, "nothing is sent anywhere"),
    "LOG_LEVEL": (Fate.NEEDLESS, "--log-format; faults are told once a minute"),
    "USE_EXPERIMENTAL": (Fate.NEEDLESS, "of LMCache's past"),
    "FORCE_SKIP_SAVE": (Fate.NEEDLESS, "the hint no_store, or write = off of each tier"),
    "RESP_USERNAME": (Fate.DECIDE, "as the user of the tier's URL"),
    "RESP_PASSWORD": (Fate.DECIDE, f"not written: put it into {places.PASSWORD_FILE}"),
    "RESP_HOST": (Fate.DECIDE, "as the host of the tier's URL"),
    "RESP_PORT": (Fate.DECIDE, "as the port of the tier's URL"),
}
_EXTRA: dict[str, tuple[Fate, str]] = {
    "save_only_first_rank": (Fate.NEEDLESS, "ranks with equal KV store it once"),
    "first_rank_max_local_cpu_size": (Fate.NEEDLESS, "ram.size is for the host, not per rank"),
    "save_chunk_meta": (Fate.NEEDLESS, "each record carries its header"),
    "use_odirect": (Fate.NEEDLESS, "direct I/O where the file system allows it"),
    "fs_connector_use_odirect": (Fate.NEEDLESS, "direct I/O where the file system allows it"),
    "fs_connector_relative_tmp_dir": (Fate.NEEDLESS, "temporary files lie beside what they replace"),
    "fs_connector_read_ahead_size": (Fate.NEEDLESS, "a record is one read"),
    "s3_prefer_http2": (Fate.NEEDLESS, "chosen by the client"),
    "s3_enable_s3express": (Fate.NOT_HERE, "not tried; any S3 endpoint may be named"),
    "connection_timeout": (Fate.NEEDLESS, "the tier's deadline bounds it"),
}


def from_yaml(path: Path) -> list[Given]:
    """The options of a YAML file. Raises ConfigError for a file that is none, or says a name twice."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.strerror}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"file {path}: {len(data)} bytes; accepted: at most 1MiB")
    try:
        _check_plain(path, yaml, data)
        tree = yaml.compose(data, yaml.SafeLoader)
        document = yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ConfigError(f"file {path}: not valid YAML: {_fault(error)}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"file {path}: not valid YAML: {printable(str(error))[:80]}") from None
    if document is None:
        return []
    if not isinstance(document, dict):
        raise ConfigError(f"file {path}: is no LMCache configuration; accepted: `name: value`, line by line")
    names = [str(key.value) for key, _ in tree.value]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"file {path}: {printable(name)}: stands there {names.count(name)} times; accepted: once"
            )
    return [Given(str(name), value, f"file {path}") for name, value in document.items()]


def _check_plain(path: Path, yaml: Any, data: bytes) -> None:
    """Refuse what would take for ever: a few lines of aliases can stand for gigabytes."""
    depth = 0
    for event in yaml.parse(data, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _DEPTH_MAX:
            what = (
                f"is nested more than {_DEPTH_MAX} deep" if depth > _DEPTH_MAX else "has a YAML alias (*name)"
            )
            raise ConfigError(f"file {path}: {what}; accepted: `name: value`, line by line")


def _fault(error: Any) -> str:
    """What is wrong with a YAML text, and in which line."""
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1})" if mark is not None else ""
    return printable(str(getattr(error, "problem", None) or error))[:120] + where


def from_environ(environ: Mapping[str, str]) -> list[Given]:
    """The `LMCACHE_...` variables; one that is empty counts as not set."""
    return [
        Given(name, value, "environment")
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and name != CONFIG_FILE_VARIABLE and value
    ]


def translate(draft: Draft, given: list[Given], ranks: int = 1) -> None:
    """Put LMCache's options into the draft; of one that is given twice the later counts, as it does there.

    LMCache's sizes are per rank and in GiB, whatever their names say; `ranks` makes them the host's.
    """
    found: dict[str, Given] = {}
    for one in given:
        name = _canonical(one)
        if name in found:
            draft.note(found[name], Fate.NEEDLESS, f"{one.name} ({one.origin}) goes before it")
        found[name] = one
    extra = found.pop("extra_config").mapping() if "extra_config" in found else {}
    _ram(draft, found, ranks)
    _disk(draft, found, ranks)
    _remote(draft, found, extra)
    if (timeout := found.pop("blocking_timeout_secs", None)) is not None:
        seconds = timeout.number()
        if 0.001 <= seconds <= 3600:
            draft.set(timeout, "store.load_deadline", f"{seconds:g}s")
        else:
            draft.note(
                timeout, Fate.DECIDE, "store.load_deadline stays as it is by default; accepted: 1ms to 1h"
            )
    for name, one in found.items():
        _without(draft, one, *_known(name, one))
    for name, one in extra.items():
        _without(
            draft, one, *_EXTRA.get(name, (Fate.UNKNOWN, "has no equal: of a plugin, or of LMCache's inside"))
        )


def _canonical(given: Given) -> str:
    name = given.name.removeprefix("lmcache.")
    if given.origin == "environment":
        name = name.removeprefix(PREFIX)
        name = name.lower() if name.lower() in WITHOUT.keys() | EQUAL | ALIASES.keys() else name
    return ALIASES.get(name, name)


def _known(name: str, given: Given) -> tuple[Fate, str]:
    if name in WITHOUT:
        return WITHOUT[name]
    if given.origin == "environment" and name in _VARIABLES:
        return _VARIABLES[name]
    if name.lower() == "ec" or name.lower().startswith("ec_"):
        return Fate.NOT_HERE, "only KV is kept, no encoder outputs"
    return Fate.UNKNOWN, "no setting of LMCache 0.5.6"


def _without(draft: Draft, given: Given, fate: Fate, why: str) -> None:
    """An option without an equal; one that is off there has nothing to lose."""
    if fate is Fate.NOT_HERE and given.off:
        fate, why = Fate.NEEDLESS, "off there as well"
    draft.note(given, fate, why)


def _ram(draft: Draft, found: dict[str, Given], ranks: int) -> None:
    size = found.pop("max_local_cpu_size", None)
    told = "LMCache's GB are GiB"
    if size is None:
        size, told = (
            Given("max_local_cpu_size", DEFAULT_CPU_GB, "default"),
            "LMCache's default, which is in GiB",
        )
    why = f"{told}, and per rank: times {ranks}" if ranks > 1 else f"{told}; with several ranks say --ranks"
    draft.set_size(size, "ram.size", size.number() * GIB * ranks, why)
    if (used := found.pop("local_cpu", None)) is not None:
        kept = "blocks are kept in RAM here too" if used.flag() else "RAM is always a tier here"
        draft.note(used, Fate.NEEDLESS, kept)


def _disk(draft: Draft, found: dict[str, Given], ranks: int) -> None:
    path, size = found.pop("local_disk", None), found.pop("max_local_disk_size", None)
    sharding = found.pop("local_disk_path_sharding", None)
    if sharding is not None:
        draft.note(sharding, Fate.NEEDLESS, "one directory for all ranks")
    if path is None or path.off:
        for one in (path, size):
            if one is not None:
                draft.note(one, Fate.NEEDLESS, "no disk tier there either")
        return
    gigabytes = 0.0 if size is None else size.number()
    if gigabytes == 0:
        for one in filter(None, (path, size)):
            draft.note(one, Fate.DECIDE, "without max_local_disk_size LMCache used no disk: no tier written")
        return
    assert size is not None
    size_bytes = max(int(gigabytes * GIB * ranks), 2**20)
    places.directory(draft, path, path.text(), format_bytes(size_bytes))
    draft.note(size, Fate.TAKEN, f"size of that tier; LMCache's GB are GiB, per rank: times {ranks}")


def _remote(draft: Draft, found: dict[str, Given], extra: dict[str, Given]) -> None:
    url, serde = found.pop("remote_url", None), found.pop("remote_serde", None)
    if url is not None and not url.off:
        places.remote(draft, url, extra)
    elif url is not None:
        draft.note(url, Fate.NEEDLESS, "no remote tier there either")
    if (plugins := found.pop("remote_storage_plugins", None)) is not None:
        draft.note(plugins, Fate.NEEDLESS, "no remote tier there either" if plugins.off else "each is a tier")
        for name in [] if plugins.off else plugins.texts():
            _plugin(draft, plugins, name, extra)
    if (local := found.pop("storage_plugins", None)) is not None:
        _without(draft, local, Fate.NOT_HERE, "write a tier of your own (docs/tiers.md)")
    if serde is not None:
        plain = serde.off or serde.value == "naive"
        draft.note(
            serde,
            Fate.NEEDLESS if plain else Fate.DECIDE,
            "blocks are kept as they are"
            if plain
            else "codec of a tier: lossless, or int8, fp8, int4 with consent",
        )


def _plugin(draft: Draft, plugins: Given, name: str, extra: dict[str, Given]) -> None:
    """One of LMCache's named remote plugins: a directory, Redis or Mooncake, placed by `extra_config`."""
    kind, prefix = name.partition(".")[0], f"remote_storage_plugin.{name}."
    own = {key.removeprefix(prefix): extra.pop(key) for key in list(extra) if key.startswith(prefix)}
    if kind == "fs" and (path := own.pop("base_path", None) or extra.pop("fs_base_path", None)) is not None:
        places.directory(draft, path, path.text())
    elif kind == "redis" and (url := own.pop("redis_url", None) or extra.pop("redis_url", None)) is not None:
        places.remote(draft, url, extra)
    elif kind == "mooncakestore" and any(key.endswith("master_server_address") for key in (*own, *extra)):
        extra.update(own)
        own = {}
        places.mooncake(draft, plugins, "", extra)
    else:
        draft.note(plugins.inner(name, "on"), Fate.NOT_HERE, "write a tier of your own (docs/tiers.md)")
    for one in own.values():
        draft.note(one, Fate.UNKNOWN, "has no equal")
