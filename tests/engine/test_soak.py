"""Long runs: thousands of requests of every kind start, are cancelled, preempted and resumed, without leaks."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.engine import Engine, EngineParts
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.scheduling.hash_model import HashModel, HashOracle

VOCAB_SIZE, EOS, MAX_MODEL_LEN = 97, 0, 120
MAX_WAITING = 40


class Soak:
    """An engine over the hash model, whose pool is far too small for its requests."""

    def __init__(self, seed: int, *, depth: int) -> None:
        self.rng = random.Random(seed)
        limits = SchedulerConfig(
            block_size=4, num_kv_blocks=90, max_model_len=MAX_MODEL_LEN, max_num_seqs=16,
            max_num_batched_tokens=48, long_prefill_token_threshold=20, depth=depth, eos_token_ids=(EOS,),
            num_host_blocks=40, max_host_copies=8,
        )  # fmt: skip
        model = HashModel(
            limits.num_kv_blocks, limits.block_size, HashOracle(VOCAB_SIZE, (EOS,)), limits.max_num_seqs
        )
        parts = EngineParts(
            executor=model, tokenizer=None, limits=limits, served_models=("hash",), vocab_size=VOCAB_SIZE,
            fingerprint="hash", tier="token", device="none",
        )  # fmt: skip
        self.engine = Engine(parts)
        self.prefixes = [[self.rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(5)]
        self.live: dict[str, None] = {}
        self.num_added = self.num_ended = self.num_refused = 0

    def run(self, num_requests: int, *, check_every: int) -> None:
        """Send this many requests, and step until all of them have finished."""
        target, steps = self.num_added + num_requests, 0
        while self.num_added < target or self.engine.has_unfinished():
            while self.num_added < target and len(self.live) < MAX_WAITING and self.rng.random() < 0.7:
                self._add()
            if self.live and self.rng.random() < 0.08:
                self._note(self.engine.abort(self.rng.choice(list(self.live))))
            self._note(self.engine.step())
            steps += 1
            if steps % check_every == 0:
                self.engine.check_integrity()
        assert not self.live
        assert self.num_ended + self.num_refused == self.num_added

    def check_empty(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        kv = stats.kv
        assert kv.active_blocks == kv.shared_blocks == kv.block_references == kv.filled_slots == 0
        assert kv.free_blocks + kv.cached_blocks == kv.capacity_blocks - 1
        assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
        assert self.engine.capacity().free_rows == 16

    def _add(self) -> None:
        rng, request_id = self.rng, f"r{self.num_added}"
        self.num_added += 1
        prompt = [
            *rng.choice(self.prefixes)[: rng.choice([0, 8, 30, 60])],
            *(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 20))),
        ]
        try:
            prompt, params = self.engine.input_processor.process(
                prompt_token_ids=prompt, params=self._params()
            )
            self.engine.add_request(
                request_id,
                prompt,
                params,
                priority=rng.randint(0, 2),
                arrival=float(self.num_added),
                cache_salt=rng.choice(["", "", "a", "b"]),
            )
        except InvalidRequest:
            self.num_refused += 1
        else:
            self.live[request_id] = None

    def _params(self) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.choice([1, 5, 20, 45])
        match rng.randrange(8):
            case 0:
                width = rng.randint(1, 4)
                return SamplingParams(n=rng.randint(1, width), beam_width=width, max_tokens=max_tokens)
            case 1:
                return SamplingParams(n=2, best_of=3, max_tokens=max_tokens)
            case 2:
                return SamplingParams(n=3, max_tokens=max_tokens, logprobs=0)
            case _:
                return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=rng.random() < 0.3)

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.error is None
                del self.live[output.request_id]
                self.num_ended += 1


def soak(num_requests: int, *, depth: int, check_every: int) -> None:
    harness = Soak(depth, depth=depth)
    warm_up = num_requests // 4
    harness.run(warm_up, check_every=check_every)
    harness.check_empty()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        harness.run(num_requests - warm_up, check_every=check_every)
        harness.check_empty()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # A kilobyte per request would be a leak; the remaining memory holds the hashes and contents of cached blocks.
    assert grown < 300_000, f"{grown} bytes more after {num_requests - warm_up} requests"
    stats = harness.engine.stats()
    assert stats.scheduler.preemptions > num_requests // 100
    assert stats.kv.host_loaded_blocks > 0
    assert stats.scheduler.recomputed_tokens > 0
    assert stats.requests.finished["abort"] > num_requests // 100


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_hundreds_of_requests_leave_nothing_behind(depth: int) -> None:
    soak(400, depth=depth, check_every=20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    soak(20_000, depth=1, check_every=200)
