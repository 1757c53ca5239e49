"""Where webhooks may go."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.worker.webhooks.policy import Refused, Unresolved, WebhookPolicy, is_public

POLICY = WebhookPolicy(["hooks.example.com", "*.example.org", "localhost"])


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "https://user:pw@hooks.example.com/",
        "https://@hooks.example.com/",
        "https://hooks.example.com/#x",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:port/",
        "https:///path",
        "https://hooks.example.com/a b",
        "https://hooks.example.com\\@evil.example/",
        "https://hooks.example.com/\r\nHost: x",
        "https://hooks.example.com/" + "a" * 2048,
        "ftp://hooks.example.com/",
        "hooks.example.com",
        "",
    ],
)
def test_what_is_no_webhook(url: str) -> None:
    with pytest.raises(ValueError):
        WebhookUrl.parse(url)
    with pytest.raises(Refused):
        POLICY.check(url)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "example.org", "hooks.example.com.evil.example", "xexample.org", "127.0.0.1", "[::1]"],
)
def test_hosts_that_are_not_on_the_list(host: str) -> None:
    with pytest.raises(Refused, match="webhook_hosts"):
        POLICY.check(f"https://{host}/")


def test_hosts_that_are() -> None:
    assert POLICY.check("https://HOOKS.example.com:8443/p?q=1") == WebhookUrl(
        "hooks.example.com", 8443, "/p?q=1"
    )
    assert POLICY.check("https://a.b.example.org").host == "a.b.example.org"


def test_without_a_list_webhooks_are_off() -> None:
    with pytest.raises(Refused, match="switched off"):
        WebhookPolicy().check("https://hooks.example.com/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1",
        "64:ff9b::a00:1", "2002:a00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_a_name_is_refused_for_its_address_whatever_the_list_says() -> None:
    with pytest.raises(Refused, match="private address"):
        POLICY.resolve("https://localhost/")
    assert WebhookPolicy(["localhost"], allow_private=True).resolve("https://localhost/").port == 443


def test_a_name_without_an_address_may_have_one_later() -> None:
    with pytest.raises(Unresolved):
        WebhookPolicy(["*.invalid"]).resolve("https://nowhere.invalid/")
