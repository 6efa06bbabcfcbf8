"""Servers and directories that LMCache and vLLM keep KV in, as tiers: URLs with parts put in their places.

Passwords and access keys are never carried over; the note says where they go. Nothing is opened or resolved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, quote, urlsplit

from tiercel.config import format_seconds
from tiercel.migrate.draft import Draft, Fate
from tiercel.migrate.given import Given

PASSWORD_FILE = "/etc/tiercel/valkey-password"
_AWS_HOST = re.compile(r"(?P<bucket>.+?)\.s3(?:[.-](?P<region>[a-z0-9-]+))?\.amazonaws\.com", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?", re.ASCII)
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*", re.ASCII)
_SECRETS_OF_S3 = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,64}", re.ASCII)
_AZURE_ACCOUNT = re.compile(r"https://([a-z0-9]{3,24})\.blob\.core\.windows\.net/?", re.ASCII)
_WORKERS_MAX, _CONCURRENCY_MAX = 64, 128
_SEGMENT_MIN = 16 << 20
# What LMCache hands on to Mooncake, with `mooncake_` in front or without.
_MOONCAKE = (
    "master_server_address", "protocol", "device_name", "metadata_server", "local_hostname",
    "global_segment_size",
)  # fmt: skip
# Schemes of servers that Tiercel has no tier for.
_NO_TIER = {
    "lm": "LMCache's own server; engines of a host share `tiercel daemon`, hosts share a tier",
    "infinistore": "no tier of this kind",
    "hf3fs": "mount it and name the directory as a tier",
    "hfbucket": "no tier of this kind",
    "eic": "no tier of this kind",
    "bigtable": "no tier of this kind",
    "sagemaker-hyperpod": "no tier of this kind",
    "redis-sentinel": "name the server itself, or a cluster",
    "external": "write a tier of your own (docs/tiers.md)",
    "audit": "a wrapper for tests",
    "mock": "for tests",
    "blackhole": "for tests",
}


def split(given: Given) -> SplitResult:
    """The parts of a URL, of several hosts the first. Raises ConfigError."""
    text = given.text()
    try:
        parts = urlsplit(text.split(",")[0])
        _ = parts.port
    except ValueError:
        raise given.fail("a URL") from None
    if not parts.scheme or "://" not in text:
        raise given.fail("a URL, such as valkey://host:6379")
    return parts


def remote(draft: Draft, given: Given, extra: dict[str, Given]) -> None:
    """A tier from LMCache's `remote_url`; what it uses of `extra_config` is taken out of `extra`."""
    parts = split(given)
    scheme = parts.scheme.lower()
    if scheme in ("redis", "rediss", "unix", "valkey", "resp", "redis-cluster"):
        _redis(draft, given, parts, extra)
    elif scheme == "s3":
        if parts.path.strip("/"):
            draft.note(
                given,
                Fate.DECIDE,
                "what follows the host is not carried over; a prefix follows the bucket here",
            )
        objects(draft, given, parts.netloc, taken(extra, "s3_region", "s3_num_io_threads", "disable_tls"))
        aws_keys(draft, extra)
    elif scheme == "azure":
        azure(draft, given, parts.netloc, extra)
    elif scheme == "fs":
        directory(draft, given, urlsplit(given.text()).path)
    elif scheme == "mooncakestore":
        mooncake(draft, given, parts.netloc, extra)
    else:
        why = _NO_TIER.get(scheme, "unknown kind of server; write a tier of your own (docs/tiers.md)")
        draft.note(given, Fate.NOT_HERE, why)


def directory(draft: Draft, given: Given, paths: str, size: str | None = None, **more: object) -> None:
    """A `files` tier; of several directories the first, as here one belongs to all ranks."""
    first, *others = [path.strip() for path in paths.split(",") if path.strip()] or [""]
    if not first:
        raise given.fail("a directory")
    if others:
        draft.note(
            given,
            Fate.DECIDE,
            "one directory for all ranks here: join the disks (LVM, RAID 0) or leave the others",
        )
    draft.add_files(
        given, first.removeprefix("file://"), size, "one directory, whatever number of ranks", **more
    )


def _redis(draft: Draft, given: Given, parts: SplitResult, extra: dict[str, Given]) -> None:
    used = taken(extra, "valkey_username", "username", "valkey_password", "password", "tls_enable")
    used |= taken(extra, "valkey_database", "valkey_enable_ttl", "valkey_ttl_sec", "valkey_num_workers")
    used |= taken(extra, "valkey_sync_num_workers", "resp_num_threads", "request_timeout", "valkey_mode")
    named = {
        "user": used.get("valkey_username") or used.get("username"),
        "password": used.get("valkey_password") or used.get("password"),
        "db": used.get("valkey_database"),
        "ttl": used.get("valkey_ttl_sec"),
        "workers": used.get("valkey_num_workers")
        or used.get("valkey_sync_num_workers")
        or used.get("resp_num_threads"),
        "timeout": used.get("request_timeout"),
    }
    if (switch := used.get("valkey_enable_ttl")) is None or not switch.flag():
        named["ttl"] = None
    tls = parts.scheme.lower() == "rediss" or ("tls_enable" in used and used["tls_enable"].flag())
    place = parts.path if parts.scheme.lower() == "unix" else parts.netloc.rpartition("@")[2]
    if parts.username and named["user"] is None:
        named["user"] = given.inner("user", parts.username)
    if parts.password and named["password"] is None:
        named["password"] = given.inner("password", parts.password)
    if parts.scheme.lower() != "unix" and named["db"] is None and parts.path.strip("/"):
        named["db"] = given.inner("database", parts.path.strip("/"))
    if parts.query:
        draft.note(
            given.inner("?", "..."), Fate.DECIDE, "its parameters are not carried over (docs/tiers.md#valkey)"
        )
    valkey(
        draft,
        given,
        place,
        tls,
        {name: one for name, one in named.items() if one is not None and not one.off},
    )
    for one in used.values():
        if one is not named["password"] or one.off:
            draft.note(one, Fate.TAKEN, "in the tier's settings")


def valkey(draft: Draft, given: Given, place: str, tls: bool, named: Mapping[str, Given]) -> None:
    """A `valkey` tier. `place`: host:port, or the path of a socket. `named`: user, password, db, ttl, ..."""
    more = workers(named.get("workers"))
    if (timeout := named.get("timeout")) is not None and 0.001 <= timeout.number() <= 3600:
        more["deadline"] = format_seconds(timeout.number())
    parameters = []
    if "password" in named:
        parameters.append(f"password_file={PASSWORD_FILE}")
        draft.note(
            named["password"],
            Fate.DECIDE,
            f"not written: put it into {PASSWORD_FILE}, readable by the daemon's user only",
        )
    if (ttl := named.get("ttl")) is not None and 1 <= ttl.number() <= 3e9:
        parameters.append(f"ttl={format_seconds(round(ttl.number()))}")
    if (prefix := named.get("prefix")) is not None:
        if _NAME.fullmatch(str(prefix.value)):
            parameters.append(f"prefix={prefix.value}")
        else:
            draft.note(prefix, Fate.DECIDE, "not written: accepted are 64 letters, digits and . _ : / -")
    user = f"{quote(_user(named['user']), safe='')}@" if "user" in named else ""
    if place.startswith("/"):
        url = f"valkey://{user}{quote(place, safe='/')}"
        database = named.get("db")
        if database is not None and database.number():
            parameters.append(f"db={int(database.number())}")
    else:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", place, re.ASCII):
            raise given.fail("a server, as host:port")
        database = named.get("db")
        path = f"/{int(database.number())}" if database is not None and database.number() else ""
        url = f"{'valkeys' if tls else 'valkey'}://{user}{place}{path}"
    why = "one node; it tells the others of its cluster" if given.shown.startswith("redis-cluster") else ""
    draft.add_place(given, "valkey", _url(url, parameters), why, **more)


def _user(given: Given) -> str:
    if not re.fullmatch(r"[^:/@?#\s]{1,256}", given.text()):
        raise given.fail("a user's name")
    return given.text()


def objects(
    draft: Draft, given: Given, host: str, named: Mapping[str, Given], size: str | None = None
) -> None:
    """An `objects` tier on S3. `host`: the bucket in front of the server's name, or the bucket alone."""
    host = host.removeprefix("s3://").strip("/")
    parameters = []
    region = named.get("s3_region")
    amazon = _AWS_HOST.fullmatch(host)
    if amazon:
        bucket = amazon["bucket"]
        if amazon["region"] and region is None:
            parameters.append(f"region={amazon['region']}")
    elif "." in host or ":" in host:
        bucket = host.partition(".")[0]
        secure = "disable_tls" not in named or not named["disable_tls"].flag()
        parameters += [f"endpoint={'https' if secure else 'http'}://{host}", "virtual_host=yes"]
    else:
        bucket = host
    if not _BUCKET.fullmatch(bucket) or not _HOST.fullmatch(host):
        for one in (given, *named.values()):
            draft.note(one, Fate.DECIDE, "no bucket to be seen: write the tier by hand (docs/tiers.md)")
        return
    if region is not None and not region.off:
        parameters.append(f"region={quote(region.text(), safe='')}")
    if (threads := named.get("s3_num_io_threads")) is not None and threads.number() >= 1:
        parameters.append(f"concurrency={min(int(threads.number()), _CONCURRENCY_MAX)}")
    draft.add_place(
        given, "objects", _url(f"s3://{bucket}", parameters), **({} if size is None else {"size": size})
    )
    for one in named.values():
        draft.note(one, Fate.TAKEN, "in the tier's URL")


def native_objects(draft: Draft, given: Given, config: dict[str, Given], options: dict[str, Given]) -> None:
    """An `objects` tier from vLLM's `obj`: its `store_config`; `prefix` and `io_threads` from `options`."""
    bucket, endpoint = config.pop("bucket", None), config.pop("endpoint_override", None)
    if bucket is None or not _BUCKET.fullmatch(str(bucket.value)):
        raise (bucket or given).fail("a tier with the name of a bucket")
    used, parameters = [bucket], []
    scheme = config.pop("scheme", given.inner("scheme", "http"))
    if endpoint is not None and not endpoint.off:
        address = endpoint.text() if "://" in endpoint.text() else f"{scheme.text()}://{endpoint.text()}"
        if not _ENDPOINT.fullmatch(address):
            raise endpoint.fail("http://host:port or https://host")
        parameters.append(f"endpoint={address}")
        used.append(endpoint)
    for theirs, ours in (("region", "region"), ("ca_bundle", "ca")):
        if (one := config.pop(theirs, None)) is not None and not one.off:
            parameters.append(f"{ours}={quote(one.text(), safe='/')}")
            used.append(one)
    if (threads := options.pop("io_threads", None)) is not None and threads.number() >= 1:
        parameters.append(f"concurrency={min(int(threads.number()), _CONCURRENCY_MAX)}")
        used.append(threads)
    path = ""
    if (prefix := options.pop("prefix", None)) is not None and not prefix.off:
        path = prefix.text().strip("/")
        if not _PREFIX.fullmatch(path):
            raise prefix.fail("letters, digits and - _ . = between single slashes")
        used.append(prefix)
    draft.add_place(given, "objects", _url(f"s3://{bucket.value}/{path}".rstrip("/"), parameters))
    for one in used:
        draft.note(one, Fate.TAKEN, "in the tier's URL")
    for name, variable in _SECRETS_OF_S3.items():
        if (secret := config.pop(name, None)) is not None and not secret.off:
            draft.note(secret, Fate.DECIDE, f"not written: set {variable} for the process that has the tiers")
    for one in config.values():
        draft.note(one, Fate.UNKNOWN, "has no equal")


def aws_keys(draft: Draft, extra: dict[str, Given]) -> None:
    for one in taken(extra, "aws_access_key_id", "aws_secret_access_key").values():
        variable = one.name.rpartition(".")[2].upper()
        draft.note(one, Fate.DECIDE, f"not written: set {variable} for the process that has the tiers")


def azure(draft: Draft, given: Given, container: str, extra: dict[str, Given]) -> None:
    """An `objects` tier on Azure Blob Storage."""
    for one in taken(extra, "azure_account_key", "azure_sas_token", "azure_connection_string").values():
        draft.note(
            one,
            Fate.DECIDE,
            "not written: set AZURE_STORAGE_ACCOUNT_KEY (or _SAS_KEY) for the process that has the tiers",
        )
    account = extra.pop("azure_account_url", None)
    found = _AZURE_ACCOUNT.fullmatch(account.text()) if account is not None else None
    if not _BUCKET.fullmatch(container):
        raise given.fail("azure://CONTAINER")
    if account is not None:
        text = "in the tier's URL" if found else "no account to be seen: set AZURE_STORAGE_ACCOUNT_NAME"
        draft.note(account, Fate.TAKEN if found else Fate.DECIDE, text)
    draft.add_place(given, "objects", _url(f"az://{container}", [f"account={found[1]}"] if found else []))


def mooncake(draft: Draft, given: Given, place: str, extra: dict[str, Given]) -> None:
    """A `mooncake` tier; the master that `extra_config` names goes before the URL's."""
    used: dict[str, Given] = {}
    for name in _MOONCAKE:
        for spelt in (name, f"mooncake_{name}"):
            if spelt in extra:
                used[name] = extra.pop(spelt)
    for one in taken(extra, "local_buffer_size", "mooncake_local_buffer_size", "transfer_timeout").values():
        draft.note(
            one, Fate.NEEDLESS, "records go between slots and the pool; the tier's deadline bounds a call"
        )
    if (master := used.get("master_server_address")) is not None and not master.off:
        place = master.text()
    if not _HOST.fullmatch(place):
        for one in (given, *used.values()):
            draft.note(one, Fate.DECIDE, "no master to be seen: write the tier by hand (docs/tiers.md)")
        return
    parameters = []
    if (protocol := used.get("protocol")) is not None and protocol.value in ("tcp", "rdma"):
        parameters.append(f"protocol={protocol.value}")
    for name, ours in (
        ("device_name", "devices"),
        ("metadata_server", "metadata"),
        ("local_hostname", "local"),
    ):
        if name in used and not used[name].off:
            parameters.append(f"{ours}={quote(used[name].text(), safe=':/,.')}")
    if (segment := used.get("global_segment_size")) is not None and segment.number() >= _SEGMENT_MIN:
        parameters.append(f"segment={int(segment.number())}B")
    draft.add_place(given, "mooncake", _url(f"mooncake://{place}", parameters))
    for one in used.values():
        draft.note(one, Fate.TAKEN, "in the tier's URL")


def workers(given: Given | None) -> dict[str, object]:
    if given is None or given.number() < 1:
        return {}
    number = min(int(given.number()), _WORKERS_MAX)
    return {"read_workers": number, "write_workers": number}


def _url(place: str, parameters: list[str]) -> str:
    return f"{place}?{'&'.join(parameters)}" if parameters else place


def taken(extra: dict[str, Given], *names: str) -> dict[str, Given]:
    """Take these out of `extra`, those that are there."""
    return {name: extra.pop(name) for name in names if name in extra}
