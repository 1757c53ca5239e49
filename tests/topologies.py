"""Server deployments: with TLS, with users, watched by Sentinel, sharded as a Cluster."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from redis.crc import key_slot

from pagemill.producer.wire.schema import keys
from tests.conftest import RedisServer, _free_port, server_binary

PATIENCE_S = 120.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition()` is true; an error reply of a server counts as false."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            if value := condition():
                return value
        except redis.RedisError:
            pass
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.05)


def redis7_binary() -> Path:
    """Debian's Redis 7.0; skips the test if it is not installed."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on this machine: apt-get install redis-server")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if "v=7." not in version:
        pytest.skip(f"the redis-server of this machine is no Redis 7: {version.strip()}")
    return Path(found)


@dataclass
class Certificates:
    """A certificate for 127.0.0.1 and localhost, and the authority that clients trust for it."""

    directory: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.ca_file = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self._leaf = self.ca.issue_cert("127.0.0.1", "localhost")
        self.cert_file, self.key_file = self.directory / "server.pem", self.directory / "server.key"
        self._leaf.private_key_pem.write_to_path(self.key_file)
        for blob in self._leaf.cert_chain_pems:
            blob.write_to_path(self.cert_file, append=True)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._leaf.configure_cert(context)
        return context


@contextmanager
def tls_server(directory: Path, certificates: Certificates) -> Iterator[str]:
    """A Redis 7 with TLS at the port of the URL, which names the trusted authority."""
    port = _free_port()
    options = (
        "--tls-port", str(port), "--tls-cert-file", str(certificates.cert_file),
        "--tls-key-file", str(certificates.key_file), "--tls-ca-cert-file", str(certificates.ca_file),
        "--tls-auth-clients", "no",
    )  # fmt: skip
    server = RedisServer(redis7_binary(), directory / "tls", options)
    server.start()
    try:
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates.ca_file}"
    finally:
        server.stop()


@dataclass
class SentinelSetup:
    """A master, a replica, and Sentinels that promote the replica within about a second."""

    master: RedisServer
    replica: RedisServer
    sentinel_ports: list[int]
    processes: list[subprocess.Popen[bytes]]

    SERVICE = "mymaster"

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/{self.SERVICE}"

    def master_port(self) -> int:
        with redis.Redis(port=self.sentinel_ports[0], socket_timeout=5) as sentinel:
            return int(sentinel.execute_command("SENTINEL", "get-master-addr-by-name", self.SERVICE)[1])

    def wait_synced(self) -> None:
        with redis.Redis(port=self.master.port) as client:
            until(
                lambda: client.info("replication").get("slave0", {}).get("state") == "online",
                "the replica to follow",
            )


@contextmanager
def sentinel_setup(directory: Path, sentinels: int = 1) -> Iterator[SentinelSetup]:
    binary = server_binary("valkey-server")
    quick = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
    master = RedisServer(binary, directory / "master", quick)
    master.start()
    following = ("--replicaof", "127.0.0.1", str(master.port), *quick)
    replica = RedisServer(binary, directory / "replica", following)
    replica.start()
    ports, processes = [], []
    for index in range(sentinels):
        port = _free_port()
        config = directory / f"sentinel-{index}.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor mymaster 127.0.0.1 {master.port} {sentinels // 2 + 1}\n"
            "sentinel down-after-milliseconds mymaster 700\nsentinel failover-timeout mymaster 3000\n"
        )
        with (directory / f"sentinel-{index}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [binary, config, "--sentinel"], stdout=log, stderr=log, start_new_session=True
                )
            )
        ports.append(port)
    setup = SentinelSetup(master, replica, ports, processes)
    try:
        setup.wait_synced()
        with redis.Redis(port=ports[0]) as sentinel:
            until(
                lambda: (
                    sentinel.sentinel_masters()["mymaster"]["num-slaves"] == 1
                    and sentinel.sentinel_masters()["mymaster"]["num-other-sentinels"] == sentinels - 1
                ),
                "the Sentinels to know everybody",
            )
        yield setup
    finally:
        for process in processes:
            process.kill()
            process.wait()
        master.kill()
        replica.kill()


@dataclass
class ClusterSetup:
    """Three masters that share the slots, and no replicas."""

    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def client(self, index: int) -> redis.Redis:
        return redis.Redis(port=self.nodes[index].port, socket_timeout=10)

    def owner(self, queue: str) -> int:
        """The index of the node that owns a queue's slot."""
        slot = key_slot(keys.prefix(queue).encode())
        with self.client(0) as client:
            for first, last, master, *_ in _slots(client):
                if first <= slot <= last:
                    return [node.port for node in self.nodes].index(master[1])
        raise AssertionError(f"nobody owns slot {slot}")

    def queue_of(self, index: int) -> str:
        """The name of a queue that this node owns."""
        return next(name for name in (f"q-{i}" for i in range(10_000)) if self.owner(name) == index)

    def begin_move(self, queue: str, target: int) -> None:
        """Start to migrate the slot: the owner replies ASK for keys that it does not have."""
        slot, source = key_slot(keys.prefix(queue).encode()), self.owner(queue)
        ids = [self.client(i).execute_command("CLUSTER", "MYID").decode() for i in (source, target)]
        self.client(target).execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        self.client(source).execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

    def finish_move(self, queue: str, target: int) -> None:
        """Move the slot's keys and notify all nodes."""
        slot, source = key_slot(keys.prefix(queue).encode()), self.owner(queue)
        target_id = self.client(target).execute_command("CLUSTER", "MYID").decode()
        while names := self.client(source).execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.client(source).execute_command(
                "MIGRATE", "127.0.0.1", self.nodes[target].port, "", 0, 10_000, "KEYS", *names
            )
        for index in (target, source, *range(len(self.nodes))):
            self.client(index).execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def _slots(client: redis.Redis) -> list[Any]:
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("CLUSTER", "SLOTS")
        return list(connection.read_response())
    finally:
        client.connection_pool.release(connection)


@contextmanager
def cluster_setup(directory: Path) -> Iterator[ClusterSetup]:
    nodes = []
    for index in range(3):
        # The bus port is named because the default, 10,000 above, is often above the last valid port.
        options = (
            "--cluster-enabled", "yes", "--cluster-port", str(_free_port()), "--cluster-node-timeout", "3000",
        )  # fmt: skip
        node = RedisServer(server_binary("valkey-server"), directory / f"node-{index}", options)
        node.start()
        nodes.append(node)
    setup = ClusterSetup(nodes)
    try:
        for index, (first, last) in enumerate(((0, 5460), (5461, 10922), (10923, 16383))):
            setup.client(index).execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in nodes[1:]:
            bus = node.options[3]
            setup.client(0).execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for index in range(3):
            until(
                lambda index=index: (
                    b"cluster_state:ok" in _raw(setup.client(index), "CLUSTER", "INFO")
                    and len(_slots(setup.client(index))) == 3
                ),
                "the nodes to know each other",
            )
        yield setup
    finally:
        for node in nodes:
            node.kill()


def _raw(client: redis.Redis, *command: str) -> bytes:
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        return bytes(connection.read_response())
    finally:
        client.connection_pool.release(connection)


KINDS = ("one server", "TLS", "Sentinel", "Cluster")


@contextmanager
def any_server(kind: str, directory: Path) -> Iterator[str]:
    """The URL of a new deployment of one of the `KINDS`."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        match kind:
            case "TLS":
                yield stack.enter_context(tls_server(directory, Certificates(directory / "certificates")))
            case "Sentinel":
                yield stack.enter_context(sentinel_setup(directory)).url
            case "Cluster":
                yield stack.enter_context(cluster_setup(directory)).url
            case _:
                one = RedisServer(server_binary("valkey-server"), directory / "valkey")
                one.start()
                stack.callback(one.stop)
                yield one.url
