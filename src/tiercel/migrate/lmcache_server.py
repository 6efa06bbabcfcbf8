"""The flags of `lmcache server` (LMCache as a process of its own) as a draft. Written after LMCache 0.5.6."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.config import format_bytes
from tiercel.migrate import places
from tiercel.migrate.draft import GIB, Draft, Fate
from tiercel.migrate.given import Given

EQUAL = frozenset(("--l1-size-gb", "--l2-adapter"))
_SOCKET = "engines reach the daemon by its Unix socket"
_FIGURES = "`tiercel daemon --http` has metrics and a dashboard; spans come from `tiercel serve`"
_WITHOUT: tuple[tuple[str, Fate, str], ...] = (
    ("--host --port --transport --grpc-server-workers --isolated-ipc --shm-name --supported-transfer-mode",
     Fate.NEEDLESS, f"{_SOCKET}, and copy into its memory"),
    ("--http-host --http-port --disable-grpc-metrics --disable-logging --disable-metrics "
     "--disable-observability "
     "--enable-extra-logging --enable-gc-monitor --enable-tracing --event-bus-queue-size "
     "--extra-logging-interval --gc-monitor-min-pause-ms --gc-monitor-top-objects --lookup-hash-log-dir "
     "--lookup-hash-log-max-files --lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size "
     "--metrics-sample-rate --otlp-endpoint --prometheus-port --trace-level --trace-output",
     Fate.NEEDLESS, _FIGURES),
    ("--chunk-size --hash-algorithm --null-block-id --separate-object-groups", Fate.NEEDLESS,
     "1 MiB of vLLM's blocks, under vLLM's own hashes and what they leave out"),
    ("--eviction-policy --eviction-ratio --eviction-trigger-watermark", Fate.NEEDLESS,
     "one block goes when one slot is needed; an equal share for each salt"),
    ("--l1-use-lazy --no-l1-use-lazy --l1-init-size-gb --l1-use-hugepages --no-l1-use-hugepages "
     "--l1-align-bytes", Fate.NEEDLESS, "all of it is taken and touched at the start"),
    ("--l1-read-ttl-seconds --l1-write-ttl-seconds --session-ttl-seconds --worker-reap-timeout-seconds "
     "--worker-registration-grace-seconds", Fate.NEEDLESS, "a lease ends with its process, not by a clock"),
    ("--l2-store-policy", Fate.NEEDLESS, "write of each tier: through, on-evict or off"),
    ("--l2-prefetch-policy --l2-prefetch-max-in-flight --periodic-notifier-interval-ms", Fate.NEEDLESS,
     "what is loaded from a tier stays in RAM; read_workers of each tier"),
    ("--max-workers --max-gpu-workers --max-cpu-workers --instance-id --enable --kv-event-log-size",
     Fate.NEEDLESS, "of LMCache's inside"),
    ("--l1-manager", Fate.DECIDE, "one RAM tier here: give the sum of the sizes as ram.size"),
    ("--gds-l1-path --gds-l1-backend --gds-l1-use-direct-io --no-gds-l1-use-direct-io --l1-devdax-path",
     Fate.NOT_HERE, "blocks go through host memory; no GDS, NIXL or CXL"),
    ("--engine-type --enable-blend-reorder --enable-dedup-content --enable-segmented-prefix", Fate.NOT_HERE,
     "reuse of text that is not a prefix is not here"),
    ("--p2p-advertise-url --p2p-listen-url --p2p-load-timeout --p2p-lookup-timeout --p2p-transfer-engine",
     Fate.NOT_HERE, "hosts share a tier (a directory, Valkey, objects, Mooncake)"),
    ("--coordinator-url --coordinator-advertise-ip --coordinator-heartbeat-interval "
     "--coordinator-event-reporting --coordinator-event-flush-interval --coordinator-event-transport "
     "--coordinator-kafka-bootstrap-servers --coordinator-kafka-delivery-timeout --coordinator-kafka-topic "
     "--coordinator-blend-timeout --coordinator-blend-match-concurrency --coordinator-l2-event-reporting "
     "--coordinator-l2-event-flush-interval", Fate.NOT_HERE, "no coordinator: hosts share a tier"),
    ("--server-module --runtime-plugin-locations --runtime-plugin-config --script-allowed-imports "
     "--run-script-api-enabled --no-run-script-api-enabled", Fate.NOT_HERE, "nobody's code is run"),
)  # fmt: skip
WITHOUT = {name: (fate, why) for names, fate, why in _WITHOUT for name in names.split()}
_ADAPTER = {
    "use_odirect": "direct I/O where the file system allows it",
    "read_ahead_size": "a record is one read",
    "relative_tmp_dir": "temporary files lie beside what they replace",
    "eviction": "least recently used, ends of prompts first",
    "connection_timeout": "the tier's deadline bounds it",
    "s3_prefer_http2": "chosen by the client",
    "num_workers": "read_workers and write_workers of the tier",
}
_SERDE = "codec of a tier (lossless; int8, fp8, int4 with consent) or encrypt"


def translate(draft: Draft, flags: Sequence[Given]) -> None:
    """Put the flags into the draft. The server's sizes are the host's, in GiB whatever their names say."""
    for one in flags:
        if one.name == "--l1-size-gb":
            draft.set_size(one, "ram.size", one.number() * GIB, "LMCache's GB are GiB")
        elif one.name == "--l2-adapter":
            _adapter(draft, one)
        else:
            fate, why = WITHOUT.get(one.name, (Fate.UNKNOWN, "no flag of `lmcache server` 0.5.6"))
            off = fate is Fate.NOT_HERE and (one.off or one.value == "default")
            draft.note(one, *((Fate.NEEDLESS, "off there as well") if off else (fate, why)))


def _adapter(draft: Draft, given: Given) -> None:
    """One --l2-adapter: a tier."""
    options = given.mapping()
    kind = options.pop("type", None)
    if kind is None:
        raise given.fail('an object with "type"')
    for name in ("serde", "serde_config"):
        if (serde := options.pop(name, None)) is not None:
            draft.note(serde, Fate.DECIDE, _SERDE)
    name = str(kind.value)
    if name in ("fs", "fs_native"):
        _directory(draft, kind, options)
    elif name in ("resp", "valkey"):
        _valkey(draft, kind, options)
    elif name == "s3":
        _s3(draft, kind, options)
    elif name == "mooncake_store":
        places.mooncake(draft, kind, "", options)
    else:
        draft.note(kind, Fate.NOT_HERE, "write a tier of your own (docs/tiers.md)")
    for key, one in options.items():
        known = key in _ADAPTER
        draft.note(one, *((Fate.NEEDLESS, _ADAPTER[key]) if known else (Fate.UNKNOWN, "has no equal")))


def _capacity(draft: Draft, options: dict[str, Given]) -> str | None:
    """`max_capacity_gb` as a size; 0 is no limit there."""
    size = options.pop("max_capacity_gb", None)
    if size is None or size.number() == 0:
        return None
    draft.note(size, Fate.TAKEN, "size of that tier; LMCache's GB are GiB")
    return format_bytes(max(int(size.number() * GIB), 2**20))


def _directory(draft: Draft, kind: Given, options: dict[str, Given]) -> None:
    path, workers = options.pop("base_path", None), options.pop("num_workers", None)
    if path is None:
        raise kind.fail("an adapter with base_path")
    more = places.workers(workers)
    if workers is not None:
        draft.note(workers, Fate.TAKEN, "read_workers and write_workers of that tier")
    places.directory(draft, path, path.text(), _capacity(draft, options), **more)


def _valkey(draft: Draft, kind: Given, options: dict[str, Given]) -> None:
    names = {
        "user": "username", "password": "password", "db": "database_id", "ttl": "ttl_seconds",
        "workers": "num_workers", "timeout": "request_timeout", "prefix": "key_prefix",
    }  # fmt: skip
    named = {ours: options.pop(theirs) for ours, theirs in names.items() if theirs in options}
    named = {name: one for name, one in named.items() if not one.off or name == "prefix"}
    host, port, nodes = (options.pop(name, None) for name in ("host", "port", "startup_nodes"))
    tls, cluster = options.pop("tls_enable", None), options.pop("cluster_mode", None)
    place = f"{host.text() if host else 'localhost'}:{int(port.number()) if port else 6379}"
    if nodes is not None:
        first = nodes.items()[0] if isinstance(nodes.value, list) and nodes.value else nodes
        inner = first.mapping()
        if "host" not in inner:
            raise nodes.fail("a list of objects with host and port")
        place = f"{inner['host'].text()}:{int(inner['port'].number()) if 'port' in inner else 6379}"
        draft.note(nodes, Fate.TAKEN, "the first node; it tells the others")
    if (size := _capacity(draft, options)) is not None:
        draft.note(
            kind, Fate.DECIDE, f"the server limits itself (maxmemory); or add size = {size} to the tier"
        )
    places.valkey(draft, kind, place, tls is not None and tls.flag(), named)
    for one in (host, port, tls, cluster, *named.values()):
        if one is not None and one is not named.get("password"):
            draft.note(one, Fate.TAKEN, "in the tier's settings")


def _s3(draft: Draft, kind: Given, options: dict[str, Given]) -> None:
    endpoint = options.pop("s3_endpoint", None)
    if endpoint is None:
        raise kind.fail("an adapter with s3_endpoint")
    named = places.taken(options, "s3_region", "s3_num_io_threads", "disable_tls")
    size = _capacity(draft, options)
    places.objects(draft, endpoint, endpoint.text(), named, size)
    places.aws_keys(draft, options)
