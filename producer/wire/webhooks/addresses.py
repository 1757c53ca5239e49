"""Tables of the addresses that are not on the open internet, independent of the interpreter's `ipaddress`.

From IANA's special-purpose address registries (RFC 6890). All entries count, even the globally reachable ones, since
they never have webhook receivers.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_V4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network, RFC 791
        "10.0.0.0/8",  # private, RFC 1918
        "100.64.0.0/10",  # shared by a provider's customers, RFC 6598
        "127.0.0.0/8",  # loopback, RFC 1122
        "168.63.129.16/32",  # not IANA's: every Azure host's own service, like 169.254.169.254 on other platforms
        "169.254.0.0/16",  # link-local, RFC 3927
        "172.16.0.0/12",  # private, RFC 1918
        "192.0.0.0/24",  # IETF protocol assignments, RFC 6890
        "192.0.2.0/24",  # documentation, RFC 5737
        "192.31.196.0/24",  # AS112, RFC 7535
        "192.52.193.0/24",  # automatic multicast tunnels, RFC 7450
        "192.88.99.0/24",  # 6to4 relays, RFC 7526
        "192.168.0.0/16",  # private, RFC 1918
        "192.175.48.0/24",  # AS112, RFC 7534
        "198.18.0.0/15",  # benchmarks, RFC 2544
        "198.51.100.0/24",  # documentation, RFC 5737
        "203.0.113.0/24",  # documentation, RFC 5737
        "224.0.0.0/4",  # multicast, RFC 5771
        "240.0.0.0/4",  # reserved, and broadcast, RFC 1112, RFC 919
    )
]
_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")  # RFC 4291; nothing else is allocated
_SPECIAL_V6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # IETF protocol assignments, RFC 2928: Teredo, benchmarks, ORCHID and more
        "2001:db8::/32",  # documentation, RFC 3849
        "2620:4f:8000::/48",  # AS112, RFC 7534
        "3fff::/20",  # documentation, RFC 9637
    )
]
_MAPPED = IPv6Network("::ffff:0:0/96")  # RFC 4291: the socket API's notation of an IPv4 address
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052
_6TO4 = IPv6Network("2002::/16")  # RFC 3056
_ISATAP = (
    0x0000_5EFE,
    0x0200_5EFE,
)  # RFC 5214: the upper half of the interface identifier, under any prefix


def is_public(address: str) -> bool:
    """Return True for an address on the open internet. If it embeds an IPv4 address, both must be.

    Raises ValueError for an invalid address.
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in _SPECIAL_V4)
    carried = _carried_v4(ip)
    if carried is not None and not is_public(str(carried)):
        return False
    if ip in _MAPPED or ip in _NAT64:
        return True
    return ip in _GLOBAL_UNICAST_V6 and not any(ip in network for network in _SPECIAL_V6)


def _carried_v4(ip: IPv6Address) -> IPv4Address | None:
    """Return the embedded IPv4 address at which packets for `ip` arrive, if its form has one."""
    number = int(ip)
    if ip in _6TO4:
        return IPv4Address(number >> 80 & 0xFFFF_FFFF)
    if ip in _MAPPED or ip in _NAT64 or (number >> 32 & 0xFFFF_FFFF) in _ISATAP:
        return IPv4Address(number & 0xFFFF_FFFF)
    return None
