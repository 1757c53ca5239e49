"""Engines behind each host, and the outputs that they deliver."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from pagemill.engine.config import EngineConfig
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.engine_host.process import EngineProcess
from pagemill.worker.engine_host.thread import EngineThread
from tests.worker.harness import PATIENCE_S

HOSTS: dict[str, type[EngineThread] | type[EngineProcess]] = {
    "thread": EngineThread,
    "process": EngineProcess,
}


class Outputs:
    """The engine's outputs, until a request's last one."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self.seen: list[RequestOutput] = []

    def until_finished(self, request_id: str) -> list[RequestOutput]:
        while not any(o.request_id == request_id and o.finished for o in self.seen):
            self.seen += self.queue.get(timeout=PATIENCE_S)
        return [output for output in self.seen if output.request_id == request_id]


Start = Callable[..., tuple[EngineHost, Outputs]]


def make(kind: str, **options: object) -> tuple[EngineHost, Outputs]:
    outputs = Outputs()
    config = EngineConfig(**({"model": "echo"} | options))  # type: ignore[arg-type]
    return HOSTS[kind](config, outputs.queue.put), outputs


def request(request_id: str, length: int = 10) -> AddRequest:
    params = SamplingParams(max_tokens=length, seed=1)
    return AddRequest(request_id=request_id, prompt_token_ids=[97] * length, params=params)
