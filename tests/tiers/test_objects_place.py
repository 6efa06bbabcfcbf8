"""What a URL of an object store may say: everything else is refused in one line that shows no secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from tiercel.errors import TierError
from tiercel.tiers.objects_place import CONCURRENCY, Place, place_of
from tiercel.tiers.url import TierUrl

SECRET = "s3cr3t-of-the-user"


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)


def place(text: str) -> Place:
    return place_of(TierUrl.parse(text))


def refusal(text: str) -> str:
    with pytest.raises(TierError) as caught:
        place(text)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_bucket_is_enough() -> None:
    one = place("s3://bucket")
    assert (one.prefix, one.concurrency, one.bulk, one.tells_missing) == ("", CONCURRENCY, 1000, False)
    assert place("s3://bucket?bulk_delete=no").bulk == 1
    client = one.client(2.5)
    assert isinstance(client, S3Store)
    assert client.config["bucket"] == "bucket"
    assert client.config["unsigned_payload"]


def test_every_setting_reaches_the_client() -> None:
    text = "s3://b-1.x/team/kv/?endpoint=http://127.0.0.1:9000&region=eu-1&anonymous=yes&virtual_host=yes&concurrency=3"
    one = place(text)
    assert (one.prefix, one.concurrency) == ("team/kv", 3)
    client = one.client(2.5)
    assert isinstance(client, S3Store)
    config = client.config
    assert (config["endpoint"], config["region"]) == ("http://127.0.0.1:9000", "eu-1")
    assert config["skip_signature"]
    assert config["virtual_hosted_style_request"]


def test_the_other_clouds() -> None:
    google = place("gs://bucket/p?anonymous=yes")
    assert isinstance(google.client(1), GCSStore)
    azure = place("az://container/p?account=name&anonymous=yes")
    assert isinstance(azure.client(1), AzureStore)
    # They say themselves what was not there.
    assert google.tells_missing
    assert azure.tells_missing
    assert (google.prefix, azure.prefix) == ("p", "p")


def test_the_account_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "account=NAME" in refusal("az://container")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
    assert isinstance(place("az://container?anonymous=yes").client(1), AzureStore)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://bucket", "scheme 'http' is no object store; accepted: s3, gs, az"),
        (f"s3://key:{SECRET}@bucket", "credentials do not belong in the URL"),
        ("s3://", "'' is no bucket"),
        ("s3://bucket:9000", "is no bucket"),
        ("s3://b", "'b' is no bucket"),
        ("s3://bucket/a//b", "prefix 'a//b' is not accepted"),
        ("s3://bucket/../b", "prefix '../b' is not accepted"),
        ("s3://bucket/a/./b", "is not accepted"),
        ("s3://bucket/%2e%2e/b", "is not accepted"),
        ("s3://bucket/a%20b", "is not accepted"),
        ("s3://bucket/" + "a" * 513, "is not accepted"),
        ("s3://bucket?endpoint=nonsense", "'nonsense' is no address"),
        ("s3://bucket?endpoint=ftp://host", "is no address"),
        ("s3://bucket?endpoint=http://", "is no address"),
        ("s3://bucket?endpoint=http://host:x", "is no address"),
        ("s3://bucket?endpoint=http://ho%20st", "is no address"),
        ("s3://bucket?concurrency=0", "accepted: an integer from 1 to 128"),
        ("s3://bucket?anonymous=maybe", "accepted: yes or no"),
        ("s3://bucket?regoin=eu", "did you mean 'region'?"),
        ("s3://bucket?account=a", "parameter 'account' is unknown"),
        (f"s3://bucket?secret_access_key={SECRET}", "parameter 'secret_access_key' is unknown"),
        ("s3://bucket?ca=/no/such/file", "No such file"),
    ],
)
def test_what_is_not_accepted_is_said_in_one_line(text: str, said: str) -> None:
    assert said in refusal(text)


def test_an_endpoint_of_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    assert "AWS_ENDPOINT_URL is no address" in refusal("s3://bucket")


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    one = place(f"s3://bucket?ca={tmp_path / 'ca.pem'}")
    with pytest.raises(TierError, match="cannot be used as configured"):
        one.client(1)


def test_a_profile_without_boto3_says_what_is_missing() -> None:
    """In a process where it cannot be imported, as it may well be installed here."""
    script = (
        "import sys; sys.modules['boto3'] = None\n"
        "from tiercel.errors import TierError\n"
        "from tiercel.tiers.objects_place import place_of\n"
        "from tiercel.tiers.url import TierUrl\n"
        "try: place_of(TierUrl.parse('s3://bucket?profile=work'))\n"
        "except TierError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "profile 'work' needs the package boto3; accepted: pip install boto3" in done.stdout
