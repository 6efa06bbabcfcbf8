"""From the URL of an object store to clients of it. Opens no connection and shows no secret.

    s3://bucket/prefix?region=eu-central-1     gs://bucket/prefix     az://container/prefix?account=name

Credentials never stand in the URL: they come from where the cloud's own tools look (environment, a profile,
the identity of the instance).
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from tiercel.errors import TierError
from tiercel.tiers.url import TierUrl

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3CredentialProvider

CONCURRENCY, CONCURRENCY_MAX = 8, 128
_SCHEMES = ("s3", "gs", "az")
_ENDPOINT = re.compile(
    r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?|https?://\[[0-9a-f:]+\](:[0-9]+)?"
)
_ENDPOINT_EXAMPLE = "http://host:port or https://host"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
# A prefix that any store takes as it stands, and that has no empty, `.` or `..` step.
_PREFIX = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")
_PREFIX_BYTES_MAX = 512
_CONNECT_S_MAX = 3.0
_S3_BULK = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """Where records go, and how to make a client of it whose requests take at most so many seconds.

    `tells_missing`: deleting what is not there is an error there; `bulk`: how many one request deletes.
    """

    client: Callable[[float], ObjectStore]
    prefix: str
    concurrency: int
    tells_missing: bool
    bulk: int


def place_of(url: TierUrl) -> Place:
    """Read a URL. Raises `TierError`, one line, for what is not accepted."""
    if url.scheme not in _SCHEMES:
        raise TierError(f"{url}: scheme '{url.scheme}' is no object store; accepted: s3, gs, az")
    if url.user is not None or url.password is not None:
        raise TierError(
            f"{url}: credentials do not belong in the URL; accepted: the environment, a profile or the "
            "identity of the instance"
        )
    if url.port is not None or not _BUCKET.fullmatch(url.host):
        raise TierError(f"{url}: '{url.host}' is no bucket; accepted: {url.scheme}://bucket/prefix")
    prefix = url.path.strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or len(prefix) > _PREFIX_BYTES_MAX):
        raise TierError(
            f"{url}: prefix '{prefix}' is not accepted; accepted: letters, digits and - _ . = between single "
            f"slashes, {_PREFIX_BYTES_MAX} in all"
        )
    concurrency = url.integer("concurrency", CONCURRENCY, 1, CONCURRENCY_MAX)
    certificate = _certificate(url)
    bulk = _S3_BULK if url.scheme == "s3" and url.flag("bulk_delete", True) else 1
    make = {"s3": _s3, "gs": _gs, "az": _az}[url.scheme](url)
    url.done()

    def client(limit_s: float) -> ObjectStore:
        options: ClientConfig = {
            "timeout": timedelta(seconds=limit_s),
            "connect_timeout": timedelta(seconds=min(limit_s / 2, _CONNECT_S_MAX)),
            "allow_http": True,
        }
        if certificate is not None:
            options["root_certificate"] = certificate
        try:
            return make(options, {"max_retries": 0, "retry_timeout": timedelta(seconds=limit_s)})
        except (BaseError, ValueError, OSError):
            raise TierError(
                f"{url}: cannot be used as configured; accepted: the documented settings of this kind of "
                "store, in the URL and the environment"
            ) from None

    return Place(client, prefix, concurrency, tells_missing=url.scheme != "s3", bulk=bulk)


_Make = Callable[["ClientConfig", "RetryConfig"], ObjectStore]


def _s3(url: TierUrl) -> _Make:
    endpoint = _endpoint(url, "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    region = url.text("region", None)
    given = {
        "endpoint": endpoint,
        "region": region,
        # The body goes unhashed: our own checksum tells what came back, and hashing costs the most here.
        "unsigned_payload": True,
        "virtual_hosted_style_request": url.flag("virtual_host", False) or None,
        "skip_signature": url.flag("anonymous", False) or None,
        "disable_bulk_delete": None if url.flag("bulk_delete", True) else True,
    }
    given = {name: value for name, value in given.items() if value is not None}
    profile = url.text("profile", None) or os.environ.get("AWS_PROFILE")
    provider = None if profile is None else _of_profile(url, profile)

    def make(options: ClientConfig, retries: RetryConfig) -> ObjectStore:
        return S3Store(
            url.host,
            client_options=options,
            retry_config=retries,
            credential_provider=provider,
            **given,  # type: ignore[arg-type]  # (optional settings, typed one by one above)
        )

    return make


def _gs(url: TierUrl) -> _Make:
    endpoint = _endpoint(url, "GOOGLE_BASE_URL")
    given = {"base_url": endpoint, "skip_signature": url.flag("anonymous", False) or None}
    given = {name: value for name, value in given.items() if value is not None}

    def make(options: ClientConfig, retries: RetryConfig) -> ObjectStore:
        return GCSStore(url.host, client_options=options, retry_config=retries, **given)  # type: ignore[arg-type]

    return make


def _az(url: TierUrl) -> _Make:
    endpoint = _endpoint(url, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    account = url.text("account", None) or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if account is None:
        raise TierError(f"{url}: no account; accepted: account=NAME here or in AZURE_STORAGE_ACCOUNT_NAME")
    given = {
        "account_name": account,
        "endpoint": endpoint,
        "skip_signature": url.flag("anonymous", False) or None,
    }
    given = {name: value for name, value in given.items() if value is not None}

    def make(options: ClientConfig, retries: RetryConfig) -> ObjectStore:
        return AzureStore(url.host, client_options=options, retry_config=retries, **given)  # type: ignore[arg-type]

    return make


def _endpoint(url: TierUrl, *variables: str) -> str | None:
    """The address to speak to, if one is given. The library does not survive a malformed one."""
    endpoint = url.text("endpoint", None)
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise url.refuse("endpoint", f"'{endpoint}' is no address; accepted: {_ENDPOINT_EXAMPLE}")
    for name in variables if endpoint is None else ():
        value = os.environ.get(name)
        if value and not _ENDPOINT.fullmatch(value):
            raise TierError(f"{url}: {name} is no address; accepted: {_ENDPOINT_EXAMPLE}")
        endpoint = endpoint or value or None
    return endpoint


def _certificate(url: TierUrl) -> bytes | None:
    """The certificates to trust beside the system's."""
    path = url.text("ca", None)
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as fault:
        raise url.refuse(
            "ca", f"'{path}': {fault.strerror}; accepted: a file of certificates (PEM)"
        ) from None


def _of_profile(url: TierUrl, profile: str) -> S3CredentialProvider:
    """The credentials of a profile in the user's AWS configuration, refreshed as they expire."""
    try:
        boto3 = importlib.import_module("boto3")
        faults = importlib.import_module("botocore.exceptions").BotoCoreError
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
    except ImportError:
        raise TierError(
            f"{url}: profile '{profile}' needs the package boto3; accepted: pip install boto3, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY without a profile"
        ) from None
    try:
        return cast("S3CredentialProvider", provider(boto3.Session(profile_name=profile)))
    except (faults, ValueError) as fault:
        raise TierError(f"{url}: profile '{profile}' has no credentials ({type(fault).__name__})") from None
