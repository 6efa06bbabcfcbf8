"""URLs of the `mooncake` tier: what is accepted, and one clear line for the rest. Needs no Mooncake."""

from __future__ import annotations

import pytest

from tiercel.errors import TierError
from tiercel.tiers.mooncake_url import ADMIN_PORT, PORT, MooncakeOptions, read_url
from tiercel.tiers.url import TierUrl


def test_every_parameter() -> None:
    text = (
        "mooncake://master:50052?metadata=http://meta:8080/metadata&protocol=rdma&devices=mlx5_0"
        "&local=10.0.0.7&segment=512MB&replicas=2&soft_pin=yes&admin=9004&prefix=kv:"
    )
    assert read_url(TierUrl.parse(text)) == MooncakeOptions(
        host="master",
        port=50052,
        admin_port=9004,
        metadata="http://meta:8080/metadata",
        protocol="rdma",
        devices="mlx5_0",
        local="10.0.0.7",
        segment_bytes=512_000_000,
        replicas=2,
        soft_pin=True,
        prefix="kv:",
    )


def test_the_defaults_are_mooncakes_own_ports_and_no_memory_of_ours() -> None:
    options = read_url(TierUrl.parse("mooncake://master"))
    assert (options.port, options.admin_port) == (PORT, ADMIN_PORT) == (50051, 9003)
    assert (options.protocol, options.segment_bytes, options.replicas) == ("tcp", 0, 1)
    assert read_url(TierUrl.parse("mooncake://master?admin=no")).admin_port is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mooncake://", "MASTER_HOST"),
        ("mooncake://user:secret@master", "without user"),
        ("mooncake://master/path", "path"),
        ("moon://master", "accepted: mooncake"),
        ("mooncake://master?protocol=udp", "one of tcp, rdma"),
        ("mooncake://master?segment=1MB", "a size from 16MiB"),
        ("mooncake://master?replicas=0", "from 1 to 16"),
        ("mooncake://master?admin=perhaps", "a port from 1 to 65535, or no"),
        ("mooncake://master?prefix=a,b", "1 to 64 of letters"),
        ("mooncake://master?replica=2", "did you mean 'replicas'"),
    ],
)
def test_what_is_not_accepted_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(TierError) as caught:
        read_url(TierUrl.parse(text))
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert "secret" not in message
