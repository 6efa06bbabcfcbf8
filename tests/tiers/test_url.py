"""URLs of tiers: what is read, what is refused in one line, and that no secret is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.config.values import show
from tiercel.errors import TierError
from tiercel.tiers.url import TierUrl


def test_every_part_of_a_url_is_read_and_decoded() -> None:
    url = TierUrl.parse("Valkey://me:p%40ss%2Fw%3A@host:6379/0?cluster=yes&tls_ca=/a+b%20c&ttl=1d")
    assert (url.scheme, url.host, url.port) == ("valkey", "host", 6379)
    assert (url.user, url.password, url.path) == ("me", "p@ss/w:", "/0")
    assert url.flag("cluster", False) is True
    assert url.text("tls_ca", None) == "/a+b c"
    assert url.duration("ttl", None) == 86400.0
    url.done()


def test_a_socket_a_bucket_and_an_ipv6_address_are_urls() -> None:
    assert TierUrl.parse("valkey+unix:///run/v.sock").path == "/run/v.sock"
    bucket = TierUrl.parse("s3://Bucket_1/a/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1")
    assert (bucket.host, bucket.path) == ("Bucket_1", "/a/prefix")
    assert bucket.text("endpoint", None) == "http://127.0.0.1:9000"
    six = TierUrl.parse("valkey://[::1]:6379")
    assert (six.host, six.port) == ("::1", 6379)


def test_an_absent_parameter_is_its_default() -> None:
    url = TierUrl.parse("s3://b")
    assert url.text("a", "x") == "x"
    assert url.flag("b", True) is True
    assert url.integer("c", 7) == 7
    assert url.size("d", None) is None
    assert url.duration("e", 1.5) == 1.5
    assert url.choice("f", ("x", "y"), "y") == "y"
    assert (url.user, url.password, url.port, url.path) == (None, None, None, "")
    url.done()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host:6379", "is not the URL of a tier; accepted: scheme://"),
        ("valkey://host:99999", "a port from 1 to 65535"),
        ("valkey://host:port", "a port from 1 to 65535"),
        ("valkey://host/#0", "is not the URL of a tier"),
        ("valkey://ho st", "is not the URL of a tier"),
        ("valkey://host\n", "is not the URL of a tier"),
        ("valkey://host?a=1&a=2", "'a' is given twice"),
        ("valkey://host?a", "'a' has no value"),
        ("valkey://host?a=", "'a' has no value"),
    ],
)
def test_what_is_no_url_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(TierError, match=says.replace("(", r"\(")) as error:
        TierUrl.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("query", "read", "says"),
    [
        ("n=x", lambda url: url.integer("n", 1, 1, 9), "an integer from 1 to 9"),
        ("n=10", lambda url: url.integer("n", 1, 1, 9), "an integer from 1 to 9"),
        ("n=5", lambda url: url.size("n", None), "did you mean '5GiB'"),
        ("n=5MiB", lambda url: url.size("n", None, high=2**20), "from 0B to 1MiB"),
        ("n=5", lambda url: url.duration("n", None), "did you mean '5s'"),
        ("n=5s", lambda url: url.duration("n", None, high=1.0), "from 0s to 1s"),
        ("n=maybe", lambda url: url.flag("n", False), "yes or no"),
        ("n=c", lambda url: url.choice("n", ("a", "b"), "a"), "one of a, b"),
    ],
)
def test_a_value_that_is_not_accepted_names_the_parameter(query: str, read, says: str) -> None:
    with pytest.raises(TierError, match=says) as error:
        read(TierUrl.parse(f"valkey://host?{query}"))
    assert str(error.value).startswith(f"valkey://host?{query}: parameter 'n': ")


def test_an_unknown_parameter_is_refused_with_the_nearest() -> None:
    url = TierUrl.parse("valkey://host?clutser=yes")
    url.flag("cluster", False)
    with pytest.raises(TierError, match=r"'clutser' is unknown; did you mean 'cluster'\?"):
        url.done()
    with pytest.raises(TierError, match="'clutser' is unknown; accepted: none"):
        TierUrl.parse("valkey://host?clutser=yes").done()


SECRET = "Hunter2"


@given(before=st.text("ab/@:?#%& ", max_size=4), after=st.text("ab/@:?#%& ", max_size=4), query=st.booleans())
def test_no_secret_is_shown_however_it_is_escaped(before: str, after: str, query: bool) -> None:
    secret = f"{before}{SECRET}{after}"
    text = f"valkey://me:{secret}@host:6379/0?x=1"
    if query and not set(secret) & set("&#@"):
        text = f"s3://bucket?secret_access_key={secret}"
    shown = [show(text)]
    try:
        url = TierUrl.parse(text)
        shown += [repr(url), str(url), str(url.refuse("x", "bad"))]
        url.done()
    except TierError as error:
        shown.append(str(error))
    assert [one for one in shown if SECRET in one] == []
