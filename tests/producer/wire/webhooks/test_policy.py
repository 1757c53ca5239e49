"""The permitted destinations of webhooks."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy

POLICY = WebhookPolicy(["hooks.example.com", "*.example.org", "localhost"])


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/", "https://user:pw@hooks.example.com/", "https://@hooks.example.com/",
        "https://hooks.example.com/#x", "https://hooks.example.com:0/", "https://hooks.example.com:port/",
        "https:///path", "https://hooks.example.com/a b", "https://hooks.example.com\\@evil.example/",
        "https://hooks.example.com/\r\nHost: x", "https://hooks.example.com/" + "a" * 2048,
        "https://hooks.example.com./", "https://hooks..example.org/", "https://-hooks.example.org/",
        "https://hooks.example.com%00.example.org/", "https://" + "a" * 64 + ".example.org/",
        "https://" + "a." * 124 + "example.org/", "https://2130706433/", "https://0x7f000001/",
        "https://127.1/", "https://0177.0.0.1/", "https://[fe80::1%25eth0]/", "https://[::1/",
        "https://b\u00fccher.example.org/", "ftp://hooks.example.com/", "hooks.example.com", "",
    ],
)  # fmt: skip
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
    assert POLICY.check("https://HOOKS.example.com/p?q=1") == WebhookUrl("hooks.example.com", 443, "/p?q=1")
    assert POLICY.check("https://hooks.example.com:443/").port == 443
    assert POLICY.check("https://a.b.example.org").host == "a.b.example.org"
    assert POLICY.check("https://xn--bcher-kva.example.org/").host == "xn--bcher-kva.example.org"


def test_a_port_other_than_443_is_listed_with_its_host() -> None:
    policy = WebhookPolicy(
        ["hooks.example.com:8443", "*.Example.org:9443", "both.example.com", "[2001:db8::1]:99"]
    )
    for url, port in (
        ("https://hooks.example.com:8443/", 8443),
        ("https://a.example.org:9443/", 9443),
        ("https://both.example.com/", 443),
        ("https://[2001:db8::1]:99/", 99),
    ):
        assert policy.check(url).port == port
    for url in (
        "https://hooks.example.com/",
        "https://hooks.example.com:22/",
        "https://a.example.org:8443/",
        "https://both.example.com:8443/",
        "https://[2001:db8::1]/",
    ):
        with pytest.raises(Refused, match="port"):
            policy.check(url)


@pytest.mark.parametrize("host", ["https://x", "x:0", "x:65536", "x:y", ":443", "x/y", "x:", "[]"])
def test_what_is_no_host_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ValueError, match="neither a host"):
        WebhookPolicy([host])


def test_without_a_list_webhooks_are_off() -> None:
    with pytest.raises(Refused, match="switched off"):
        WebhookPolicy().check("https://hooks.example.com/")


def test_a_name_is_refused_for_its_address_whatever_the_list_says() -> None:
    with pytest.raises(Refused, match="private address"):
        POLICY.resolve("https://localhost/")
    assert WebhookPolicy(["localhost"], allow_private=True).resolve("https://localhost/").port == 443


def test_a_name_without_an_address_may_have_one_later() -> None:
    with pytest.raises(Unresolved):
        WebhookPolicy(["*.invalid"]).resolve("https://nowhere.invalid/")
