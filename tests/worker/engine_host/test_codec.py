"""Reports as bytes: decoding returns every possible report of an engine unchanged."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.outputs import Capacity, CompletionDelta, PooledRows, RequestOutput, Usage
from pagemill.engine.plan import TokenLogprobs
from pagemill.worker.engine_host.codec import decode_report, encode_report
from pagemill.worker.engine_host.messages import EngineState, Report

IDS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False)
LOGPROBS = st.builds(TokenLogprobs, IDS, st.none() | FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=3))
DELTAS = st.builds(
    CompletionDelta,
    index=st.integers(0, 9),
    token_ids=st.lists(IDS, max_size=3),
    text=st.text(max_size=5),
    offset=IDS,
    logprobs=st.none() | st.lists(LOGPROBS, max_size=3),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | IDS | st.text(max_size=3),
    cumulative_logprob=st.none() | FLOATS,
    label_probs=st.none() | st.tuples(FLOATS, FLOATS),
    label=st.none() | st.integers(0, 3),
)
OUTPUTS = st.builds(
    RequestOutput,
    request_id=st.text(max_size=5),
    phase=st.sampled_from(["waiting", "prefill", "decode"]),
    prompt_tokens_done=IDS,
    prompt_tokens=IDS,
    deltas=st.lists(DELTAS, max_size=2),
    finished=st.booleans(),
    usage=st.none() | st.builds(Usage, IDS, IDS, IDS),
    error=st.none() | st.text(max_size=3),
    error_code=st.none() | st.just("never_fits"),
    ttft_s=st.none() | FLOATS,
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
    pooled=st.none() | st.just(PooledRows(2, bytes(16))),
    device_s=FLOATS,
    let_go=st.sampled_from([None, "released", "lapsed"]),
)
REPORTS = st.builds(
    Report,
    state=st.sampled_from(EngineState),
    progress_at=FLOATS,
    num_taken=IDS,
    capacity=st.none() | st.just(Capacity(1, 2, 16, 3, (None, 4))),
    outputs=st.lists(OUTPUTS, max_size=4),
)


def there_and_back(report: Report) -> Report:
    flat: tuple[Any, ...] = pickle.loads(encode_report(report))
    return decode_report(flat)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(REPORTS)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    assert there_and_back(report) == report


def test_a_step_of_many_rows_is_small() -> None:
    outputs = [
        RequestOutput(f"{n:032x}#1", "decode", 100, 100, [CompletionDelta(0, [n], " word", n)])
        for n in range(256)
    ]
    data = encode_report(Report(EngineState.RUNNING, 1.0, 256, None, None, outputs))
    assert len(data) < 256 * 80
    assert len(pickle.dumps(outputs)) > 256 * 140
