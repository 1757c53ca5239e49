"""Reports of a relay for requests that were interrupted before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_host.endpoint.connection import BadAnswer
from pagemill.worker.engine_host.endpoint.dialect import Dialect
from pagemill.worker.engine_host.endpoint.relay import Relay
from pagemill.worker.engine_host.messages import AddRequest

MODEL = SimpleNamespace(
    identity=SimpleNamespace(model="m", dialect=Dialect()),
    tokenizer=None,
    limits=SimpleNamespace(max_model_len=4096),
)


def relay(reported: list[RequestOutput], *resume: SampleState) -> Relay:
    params = SamplingParams(n=len(resume), max_tokens=3)
    request = AddRequest(request_id="r", prompt_token_ids=[7], params=params, resume=list(resume))
    return Relay(request, cast(Any, MODEL), reported.append, lambda event: None)


def test_all_tokens_were_committed_but_not_the_end() -> None:
    """The endpoint was killed between the last token and the end: no more tokens can be requested from it."""
    reported: list[RequestOutput] = []
    resumed = relay(reported, SampleState(0, [1, 2, 3], text="abc"), SampleState(1, [1], "stop", "a"))
    asyncio.run(resumed.run(cast(Any, None), stall_s=1.0))
    ends = [(delta.index, delta.offset, delta.finish_reason) for out in reported for delta in out.deltas]
    assert ends == [(0, 3, "length")]
    last = resumed.last_output()
    assert last.finished
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


def test_more_tokens_than_asked_for_were_committed() -> None:
    with pytest.raises(BadAnswer, match="more tokens"):
        asyncio.run(relay([], SampleState(0, [1, 2, 3, 4], text="abcd")).run(cast(Any, None), stall_s=1.0))
