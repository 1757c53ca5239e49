"""The addresses that count as the open internet."""

from __future__ import annotations

import random
from ipaddress import IPv6Address, ip_address

import pytest

from pagemill.producer.wire.webhooks.addresses import is_public

PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.9.9",
    "192.0.0.1", "192.0.0.170", "192.0.2.1", "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.1.1",
    "192.175.48.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "64:ff9b:1::7f00:1",
    "64:ff9b:1::808:808", "100::1", "100:0:0:1::1", "2001::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:30::1", "2001:db8::1", "2620:4f:8000::1", "3fff::1", "3fff:fff::1", "5f00::1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "1fff::1", "4000::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "198.17.0.1",
    "223.255.255.255", "2606:4700::1111", "2a00:1450:4001:81b::200e", "2001:200::1", "2400::1", "3ffe:ffff::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("prefix", "shift"),
    [
        ("::ffff:0:0", 0), ("64:ff9b::", 0), ("2002::", 80), ("2a00:1::5efe:0:0", 0),
        ("2a00:1::200:5efe:0:0", 0),
    ],
    ids=["mapped", "NAT64", "6to4", "ISATAP", "ISATAP, global"],
)  # fmt: skip
def test_an_ipv4_address_is_judged_by_itself_however_it_is_carried(prefix: str, shift: int) -> None:
    rng = random.Random(0)
    inner = [ip_address(rng.getrandbits(32)) for _ in range(200)]
    inner += [ip_address(address) for address in PRIVATE + PUBLIC if "." in address and ":" not in address]
    assert {is_public(str(address)) for address in inner} == {True, False}
    for address in inner:
        carrier = IPv6Address(int(IPv6Address(prefix)) | int(address) << shift)
        assert is_public(str(carrier)) == is_public(str(address)), carrier


def test_what_is_no_address_is_an_error() -> None:
    for text in ("", "example.com", "127.1", "::g"):
        with pytest.raises(ValueError):
            is_public(text)
