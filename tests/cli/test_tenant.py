"""`pagemill tenant purge`."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from pagemill.cli.tenant import tenant_app
from tests.producer.driving import Queue


def purge(queue: Queue, *options: str, code: int = 0) -> Result:
    arguments = ["purge", "acme", "--redis-url", queue.url, "--queue", queue.name, *options]
    result = CliRunner().invoke(tenant_app, arguments)
    assert result.exit_code == code, result.output
    return result


def test_purge(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("a", "b", tenant="acme", batch_id="both")
    queue.submit("c", tenant="other")
    purge(queue, code=2)  # there is no terminal to ask
    counted = json.loads(purge(queue, "--dry-run", "--json").stdout)
    assert counted["jobs"] == {"queued": 2}
    assert not counted["proven"]
    assert queue.state("a") == "queued"
    purged = json.loads(purge(queue, "--yes", "--json").stdout)
    assert (purged["jobs"], purged["batches"], purged["proven"]) == ({"queued": 2}, 1, True)
    assert queue.state("c") == "queued"
    assert "everything is removed" in purge(queue, "--yes").output
    purge(queue, "--yes", "--also", "nothing", code=2)


def test_what_is_left_is_an_exit_code(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.client.set(f"{queue.prefix}by_hand", "for acme, by hand")
    result = purge(queue, "--yes", code=1)
    assert "left: acme in the content of by_hand" in result.output
