"""Commands on their way to an engine's process, and changes of adapters that wait for its reply."""

from __future__ import annotations

import pickle
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.errors import AdapterError, EngineError, UnknownAdapter
from pagemill.worker.engine_host.messages import AbortRequest, AdaptersChanged, ChangeAdapter
from pagemill.worker.engine_host.remote_adapters import RemoteAdapters
from pagemill.worker.engine_host.sender import Sender
from tests.worker.engine_host.carriers import request
from tests.worker.harness import PATIENCE_S, eventually

RED = Adapter("red", Path("/red"), "1", 8, 100)


def test_requests_wait_for_room_and_an_abort_waits_for_nothing() -> None:
    ours, theirs = Pipe()
    sender = Sender(ours, max_unsent_bytes=10_000)
    sender.put(request("first", length=5000), waits=True)
    waiting = threading.Thread(
        target=sender.put, args=(request("second", length=5000),), kwargs={"waits": True}
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "there is no room for it"
    sender.put(AbortRequest("first"))
    sender.start()
    received = [pickle.loads(theirs.recv_bytes()) for _ in range(3)]
    waiting.join(PATIENCE_S)
    assert [one.request_id for one in received] == ["first", "first", "second"]
    sender.close()
    theirs.close()


def test_who_waits_for_room_is_let_go_when_the_other_side_has_ended() -> None:
    ours, theirs = Pipe()
    sender = Sender(ours, max_unsent_bytes=10_000)
    sender.put(request("first", length=5000), waits=True)
    waiting = threading.Thread(
        target=sender.put, args=(request("second", length=5000),), kwargs={"waits": True}
    )
    waiting.start()
    theirs.close()
    sender.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_adapters_change_when_the_engine_says_so() -> None:
    sent: list[ChangeAdapter] = []
    adapters: RemoteAdapters = pickle.loads(pickle.dumps(RemoteAdapters([RED])))
    assert adapters.find("red") == RED
    adapters.connect(sent.append)
    failures: list[BaseException] = []

    def add() -> None:
        try:
            adapters.add("blue", Path("/blue"))
        except EngineError as error:
            failures.append(error)

    for answer in (None, AdapterError("no such folder")):
        adding = threading.Thread(target=add)
        adding.start()
        change = eventually(lambda: sent and sent.pop(), "the change to be asked for")
        blue = Adapter("blue", change.directory, "2", 8, 100)
        adapters.take(AdaptersChanged(change.number, answer, [RED] if answer else [blue, RED]))
        adding.join(PATIENCE_S)
        assert [one.name for one in adapters.registered()] == (["red"] if answer else ["blue", "red"])
    assert [str(one) for one in failures] == ["no such folder"]
    with pytest.raises(UnknownAdapter, match="unknown adapter 'blue'; known: red"):
        adapters.find("blue")

    adding = threading.Thread(target=add)
    adding.start()
    eventually(lambda: sent, "the change to be asked for")
    adapters.give_up()
    adding.join(PATIENCE_S)
    assert "has ended" in str(failures[-1])
    with pytest.raises(EngineError, match="has ended"):
        adapters.remove("red")
