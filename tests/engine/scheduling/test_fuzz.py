"""Random workloads through the scheduler and the hash model: every output must equal the sequential oracle's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.errors import NeverFits
from pagemill.engine.scheduling.request import Request, SequenceStatus
from tests.engine.scheduling.beam_oracle import beam_search
from tests.engine.scheduling.harness import Harness, ScriptGrammar, make_config, make_request
from tests.engine.scheduling.hash_model import HashOracle

MAX_MODEL_LEN = 64
BAD_TOKEN, NAN_TOKEN = 1000, 2000


@dataclass
class Workload:
    """A schedule of events: requests by step, aborts by step, failing steps."""

    config: SchedulerConfig
    oracle: HashOracle
    requests: list[tuple[int, Request]]
    expected: dict[str, list[tuple[list[int], str]]]
    aborts: dict[int, str] = field(default_factory=dict)
    bad_steps: set[int] = field(default_factory=set)
    bad_launches: set[int] = field(default_factory=set)
    doomed: dict[str, str] = field(default_factory=dict)
    """Request that must fail -> error code."""


def blocks_alone(
    request: Request, block_size: int, windows: tuple[int | None, ...] = (None,), chunk: int = 0
) -> int:
    """The maximum number of KV blocks of a request, computed from the definition."""
    total = min(len(request.prompt_token_ids) + request.max_tokens, MAX_MODEL_LEN) - 1
    num_sequences = request.params.num_sequences
    shared = len(request.prompt_token_ids) // block_size if num_sequences > 1 else 0
    whole = shared + num_sequences * (-(-total // block_size) - shared)
    return sum(
        whole if window is None else min(whole, num_sequences * ((abs(window) + chunk) // block_size + 3))
        for window in windows
    )


def make_workload(
    rng: random.Random, *, with_failures: bool, windows: tuple[int | None, ...] = (None,)
) -> Workload:
    block_size = rng.choice([1, 2, 3, 4, 7, 16])
    is_tight = rng.random() < 0.5  # many short prompts with long outputs, which outgrow the pool
    num_shared, max_output, last_start = (5, 40, 2) if is_tight else (24, 14, 12)
    oracle = HashOracle(rng.choice([4, 8, 40]), () if is_tight else rng.choice([(), (0,), (0, 1)]))
    prefix = [rng.randrange(oracle.vocab_size) for _ in range(num_shared)]
    requests, expected, doomed = [], {}, {}
    for number in range(rng.randint(1, 9)):
        make = make_search if rng.random() < (0.05 if is_tight else 0.25) else make_job
        request, samples = make(rng, oracle, f"r{number}", prefix, max_output)
        if with_failures and rng.random() < 0.2:
            token, code = rng.choice([(BAD_TOKEN, "engine_error"), (NAN_TOKEN, "output_invalid")])
            request.prompt_token_ids[rng.randrange(len(request.prompt_token_ids))] = token
            doomed[request.request_id] = code
        requests.append((rng.randint(0, last_start), request))
        expected[request.request_id] = samples
    has_beams = any(request.params.beam_width is not None for _, request in requests)
    depth = rng.randint(0, 1)
    budget = rng.choice([3, 4, 7, 64] if has_beams else [1, 2, 3, 7, 16, 64])
    threshold = rng.choice([0, 0, 1, 5])
    chunk = min(budget, threshold or budget)
    needed = max(blocks_alone(request, block_size, windows, chunk) for _, request in requests)
    config = make_config(
        block_size=block_size,
        num_kv_blocks=1 + needed + rng.choice([0, 0, 1, 4, 60]),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([3, 4, 8]),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        kv_windows=windows,
        enable_prefix_caching=rng.random() < 0.6,
        depth=depth,
        num_speculative_tokens=0 if depth else rng.choice([0, 1, 3, 8]),
        watermark_ratio=rng.choice([0.0, 0.01, 0.25]),
        eos_token_ids=oracle.eos_token_ids,
        num_host_blocks=rng.choice([0, 2, 5, 100]),
        max_host_copies=rng.choice([1, 3, 1000]),
    )
    aborts = {rng.randint(0, 40): request.request_id for _, request in requests if rng.random() < 0.15}
    bad = {rng.randint(0, 40) for _ in range(rng.choice([0, 1, 3]))} if with_failures else set()
    bad_launches = {step for step in bad if rng.random() < 0.5}
    return Workload(config, oracle, requests, expected, aborts, bad - bad_launches, bad_launches, doomed)


def make_job(
    rng: random.Random, oracle: HashOracle, request_id: str, prefix: list[int], max_output: int = 14
) -> tuple[Request, list[tuple[list[int], str]]]:
    """A random request, possibly a resumed one, and the expected output of its samples."""
    n = rng.choice([1, 1, 1, 2, 3])
    max_tokens = rng.randint(1, max_output)
    script = rng.randint(0, 5) if rng.random() < 0.25 else None

    delay = rng.choice([0, 0, 2, 9])

    def grammar(index: int) -> ScriptGrammar:
        return ScriptGrammar(hash((script, index)), 4, oracle.vocab_size, delay)

    request = make_request(
        request_id,
        prefix[: rng.randint(0, len(prefix))]
        + [rng.randrange(oracle.vocab_size) for _ in range(rng.randint(1, 12))],
        seed=rng.randrange(100),
        priority=rng.randint(-1, 2),
        arrival=float(rng.randint(0, 3)),
        grammar=None if script is None else grammar,
        n=n,
        temperature=1.0 if n > 1 else 0.0,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if script is None else 0,
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=tuple(rng.sample(range(oracle.vocab_size), rng.randint(0, 1)))
        if script is None
        else (),
        logprobs=rng.choice([None, 0]),
    )
    limit = min(len(request.prompt_token_ids) + max_tokens, MAX_MODEL_LEN)
    samples = []
    for sequence in request.sequences:
        constraint = None if script is None else grammar(sequence.index)
        output, reason = oracle.generate(
            request.prompt_token_ids, request.params, request.seed, sequence.index, limit, constraint
        )
        samples.append((output, reason))
    if script is None and rng.random() < 0.3:
        resume(rng, request, samples)
    return request, samples


def make_search(
    rng: random.Random, oracle: HashOracle, request_id: str, prefix: list[int], max_output: int = 14
) -> tuple[Request, list[tuple[list[int], str]]]:
    """A random beam search, and its n best hypotheses."""
    width, max_tokens = rng.randint(1, 3), rng.randint(1, min(max_output, 18) - 4)
    request = make_request(
        request_id,
        prefix[: rng.randint(0, len(prefix))]
        + [rng.randrange(oracle.vocab_size) for _ in range(rng.randint(1, 12))],
        priority=rng.randint(-1, 2),
        arrival=float(rng.randint(0, 3)),
        n=rng.randint(1, width),
        beam_width=width,
        length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
        early_stopping=rng.choice([True, False, "never"]),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=tuple(rng.sample(range(oracle.vocab_size), rng.randint(0, 1))),
        logprobs=rng.choice([None, 0]),
    )
    params, prompt = request.params, request.prompt_token_ids
    found = beam_search(
        lambda output: oracle.scores(prompt + output, len(output), params),
        width=width,
        max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
        stop_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else oracle.eos_token_ids)},
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    samples = [(output.token_ids, output.finish_reason) for output in found[: params.n]]
    return request, samples + [([], "stop")] * (params.n - len(samples))


def resume(rng: random.Random, request: Request, samples: list[tuple[list[int], str]]) -> None:
    """Pretend that a checkpoint had part of each sample; leave at least one unfinished."""
    for sequence, (output, reason) in zip(request.sequences, samples, strict=True):
        num_known = rng.randint(0, len(output))
        if num_known == len(output) and sequence.index == len(samples) - 1:
            num_known -= 1
        sequence.output_token_ids = output[:num_known]
        if num_known == len(output):
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason


def run_workload(workload: Workload) -> Harness:
    harness = Harness(workload.config, workload.oracle, bad_launches=workload.bad_launches)
    harness.model.bad_steps = workload.bad_steps
    harness.model.bad_tokens, harness.model.nan_tokens = frozenset({BAD_TOKEN}), frozenset({NAN_TOKEN})
    arrivals = sorted(workload.requests, key=lambda entry: entry[0])
    for number in range(60):
        while arrivals and arrivals[0][0] <= number:
            harness.add(arrivals.pop(0)[1])
        if number in workload.aborts:
            harness.abort(workload.aborts[number])
        harness.step()
    harness.run()
    return harness


def check_workload(workload: Workload) -> None:
    harness = run_workload(workload)
    has_bad_steps = bool(workload.bad_steps | workload.bad_launches)
    for request_id, samples in workload.expected.items():
        sequences = harness.requests[request_id].sequences[: len(samples)]
        got = [(sequence.output_token_ids, sequence.finish_reason) for sequence in sequences]
        if any(reason == "abort" for _, reason in got):
            assert request_id in workload.aborts.values()
            for (output, reason), (whole, final) in zip(got, samples, strict=True):
                assert reason in ("abort", "error", final)
                assert output == whole[: len(output)]
        elif request_id in workload.doomed:
            codes = {workload.doomed[request_id], "engine_error" if has_bad_steps else None}
            assert harness.errors[request_id] in codes
        elif request_id not in harness.errors:
            assert got == samples, request_id
        else:
            assert has_bad_steps, f"{request_id} failed for no reason"
    check_logprobs(harness)


def check_logprobs(harness: Harness) -> None:
    for request in harness.requests.values():
        for sequence in request.sequences:
            told = harness.logprobs.get(sequence, [])
            tail = sequence.output_token_ids[-len(told) :] if told else []
            assert [entry.token_id for entry in told] == tail


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_outputs_are_the_oracles(seed: int) -> None:
    check_workload(make_workload(random.Random(seed), with_failures=False))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_outputs_are_the_oracles_while_steps_fail(seed: int) -> None:
    check_workload(make_workload(random.Random(seed), with_failures=True))


def with_a_past(windows: list[int | None]) -> tuple[int | None, ...]:
    """Add a group without chunks: otherwise tokens before a chunk need not be computed, and bad ones do not raise."""
    return tuple(windows) if any(window is None or window > 0 for window in windows) else (*windows, None)


WINDOWS = st.lists(st.sampled_from([None, 2, 3, 4, 8, 13, 30, -1, -3, -8, -13]), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), WINDOWS.map(with_a_past), st.booleans())
def test_outputs_are_the_oracles_with_windows(
    seed: int, windows: tuple[int | None, ...], with_failures: bool
) -> None:
    check_workload(make_workload(random.Random(seed), with_failures=with_failures, windows=windows))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from([(None,), (None,), (4,), (None, 3, 8)]), st.booleans())
def test_outputs_are_the_oracles_with_recurrent_state(
    seed: int, windows: tuple[int | None, ...], with_failures: bool
) -> None:
    rng = random.Random(seed)
    workload = make_workload(rng, with_failures=with_failures, windows=windows)
    # Like `with_states`: a state cannot return to an earlier token.
    num_cached = rng.choice([0, 1, 2, 5, 50])
    workload.config = replace(
        workload.config,
        state_bytes=1,
        num_cached_states=num_cached,
        enable_prefix_caching=num_cached > 0,
        num_speculative_tokens=0,
        num_host_blocks=0,
    )
    check_workload(workload)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_pool_one_block_short_refuses(seed: int) -> None:
    rng = random.Random(seed)
    request, _ = make_job(rng, HashOracle(8), "r", list(range(8)) * 3)
    for sequence in request.sequences:
        sequence.output_token_ids, sequence.status = [], SequenceStatus.WAITING
    needed = blocks_alone(request, 4)
    if needed >= 2:
        with pytest.raises(NeverFits):
            Harness(make_config(max_model_len=MAX_MODEL_LEN, num_kv_blocks=needed)).add(request)
