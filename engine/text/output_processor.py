"""Turns tokens into the caller's view: text, stop strings, deltas, usage and latencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pagemill.engine.outputs import (
    CompletionDelta,
    FinishReason,
    Histogram,
    HistogramSnapshot,
    LabelValues,
    Phase,
    RequestOutput,
    RequestStats,
    Usage,
)
from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.tasks import Score
from pagemill.engine.text.best_of import BestOf
from pagemill.engine.text.detokenizer import Detokenizer, StopStrings
from pagemill.engine.text.tokenizer import Tokenizer

# vLLM's buckets, so that dashboards can be compared.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0)  # fmt: skip
E2E_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
               960.0, 1920.0, 7680.0)  # fmt: skip
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

FinishSequence = Callable[[Sequence, FinishReason, int | str | None], None]


@dataclass(slots=True)
class _SampleText:
    """The conversion of one sample's tokens to text."""

    num_reported: int
    """Number of output tokens already reported to the caller (including resumed ones)."""
    detokenizer: Detokenizer | None
    stop: StopStrings
    last_token_time: float | None = None
    is_reported_finished: bool = False


@dataclass(slots=True)
class _RequestRecord:
    request: Request
    added: float
    samples: list[_SampleText]
    best_of: BestOf | None = None
    first_token_time: float | None = None
    is_admission_counted: bool = False
    num_resumed_tokens: int = 0
    prompt_tokens_done: int = 0
    error: str | None = None
    error_code: str | None = None


@dataclass(slots=True)
class OutputStats:
    requests: RequestStats = field(default_factory=RequestStats)
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    tpot: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    wait: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    decode: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    inference: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    generated_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    longest_sample: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    samples: Histogram = field(default_factory=lambda: Histogram(COUNT_BUCKETS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    peak_blocks: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        named = {
            "time_to_first_token_seconds": self.ttft,
            "inter_token_latency_seconds": self.itl,
            "time_per_output_token_seconds": self.tpot,
            "request_seconds": self.e2e,
            "request_wait_seconds": self.wait,
            "request_prefill_seconds": self.prefill,
            "request_decode_seconds": self.decode,
            "request_inference_seconds": self.inference,
            "prompt_tokens": self.prompt_length,
            "generated_tokens": self.generated_length,
            "longest_sample_tokens": self.longest_sample,
            "request_samples": self.samples,
            "request_max_tokens": self.max_tokens,
            "request_peak_blocks": self.peak_blocks,
        }
        return {name: {(): histogram.snapshot()} for name, histogram in named.items()}


class OutputProcessor:
    """Owns the text state of every request the engine holds.

    Args:
        tokenizer: None serves token ids only; text stays empty.
        finish_sequence: ends a sequence in the scheduler when its text has hit a stop string.
        eos_token_ids: tokens that are never part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        finish_sequence: FinishSequence,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._finish_sequence = finish_sequence
        self._records: dict[str, _RequestRecord] = {}
        self.stats = OutputStats()

    def add(self, request: Request, best_of: BestOf | None = None) -> None:
        """Start a request. Resumed tokens are replayed, so that stop strings can span the interruption.

        With `best_of`, its samples are reported after all have ended.
        """
        record = _RequestRecord(request, time.monotonic(), [self._new_sample(s) for s in request.reported])
        record.best_of = best_of
        record.num_resumed_tokens = request.num_output_tokens
        self._records[request.request_id] = record
        self.stats.requests.prompt_tokens += request.num_input_tokens
        self.stats.prompt_length.observe(request.num_input_tokens)
        self.stats.samples.observe(request.params.n)
        if not isinstance(request.task, Score):
            self.stats.max_tokens.observe(request.max_tokens)

    def process(self, updates: list[SequenceUpdate]) -> list[RequestOutput]:
        """Turn a retired step's updates into outputs, one per request that changed."""
        now = time.monotonic()
        outputs: dict[str, RequestOutput] = {}
        for update in updates:
            record = self._records.get(update.sequence.request.request_id)
            if record is None:
                continue
            output = outputs.get(record.request.request_id)
            if output is None:
                output = outputs[record.request.request_id] = self._new_output(record)
                self._count_admission(record)
            self._apply(record, update, output, now)
        for output in outputs.values():
            self._close_if_finished(self._records[output.request_id], output, now)
        return list(outputs.values())

    def end(
        self, request: Request, reason: FinishReason, error: str | None = None, error_code: str | None = None
    ) -> list[RequestOutput]:
        """Return the final output of a request that never reached the scheduler."""
        updates = []
        for sequence in request.live_sequences:
            sequence.finish_reason, sequence.status = reason, SequenceStatus.FINISHED
            if sequence in request.reported:
                updates.append(SequenceUpdate(sequence, error=error, error_code=error_code))
        request.num_open_chains = 0
        return self.process(updates)

    def _new_sample(self, sequence: Sequence) -> _SampleText:
        params = sequence.request.params
        detokenizer = None
        reported_ids = [] if sequence.continuation else sequence.output_token_ids
        stop = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        if self._tokenizer is not None:
            detokenizer = Detokenizer(
                self._tokenizer,
                sequence.request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
            resumed = self._visible(sequence, reported_ids)
            if resumed:
                # Already reported; replayed only to restore held-back text.
                unwatched = max(0, params.min_tokens - 1)
                detokenizer.append(resumed[:unwatched])
                stop.append(detokenizer.append(resumed[unwatched:]))
        return _SampleText(
            num_reported=len(reported_ids),
            detokenizer=detokenizer,
            stop=stop,
            is_reported_finished=sequence.is_finished,
        )

    def _visible(self, sequence: Sequence, token_ids: list[int]) -> list[int]:
        """Return the tokens that produce text: a final stop token or EOS is in token_ids, not in text."""
        if not (sequence.is_finished and sequence.finish_reason == "stop" and token_ids):
            return token_ids
        is_stop_token = token_ids[-1] == sequence.stop_reason or token_ids[-1] in self._eos_token_ids
        return token_ids[:-1] if is_stop_token else token_ids

    def _apply(
        self, record: _RequestRecord, update: SequenceUpdate, output: RequestOutput, now: float
    ) -> None:
        sequence = update.sequence
        sample = record.samples[sequence.index]
        if sample.is_reported_finished:
            return
        if update.error is not None:
            record.error, record.error_code = update.error, update.error_code
        if not update.new_token_ids and not sequence.is_finished:
            return
        text = self._extend_text(sequence, sample, update)
        if not sequence.continuation:
            self._record_latency(record, sample, len(update.new_token_ids), now)
        delta = CompletionDelta(
            index=sequence.index,
            token_ids=update.new_token_ids,
            text=text,
            offset=sample.num_reported,
            logprobs=update.new_logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if record.best_of is not None:
            record.best_of.hold(delta)
        else:
            delta.cumulative_logprob = update.cumulative_logprob
            if (scores := update.label_scores) is not None:
                delta.cumulative_logprob = scores.logprob
                delta.label_probs, delta.label = scores.probs, scores.chosen
            output.deltas.append(delta)
        sample.num_reported += len(update.new_token_ids)
        sample.is_reported_finished = sequence.is_finished
        if sequence.is_finished and sequence.request.params.structured_outputs is not None:
            self._count_structured(sequence)

    def _extend_text(self, sequence: Sequence, sample: _SampleText, update: SequenceUpdate) -> str:
        """Return the text of an update. Tokens after one that completes a stop string are removed.

        Text that is held back is only released at an end that the model or a limit has caused. After any other end the
        request can resume from its tokens, which restore that text.
        """
        if sample.detokenizer is None:
            return ""
        visible = self._visible(sequence, update.new_token_ids)
        is_complete = sequence.finish_reason in ("stop", "length")
        # As with stop tokens, a sample cannot stop before min_tokens, regardless of the number of tokens in a step.
        num_taken = max(0, sequence.request.params.min_tokens - 1 - sample.num_reported)
        text, stop = sample.detokenizer.append(visible[:num_taken]), None
        at_once = 1 if sequence.request.params.stop else len(visible)
        while num_taken < len(visible) and stop is None:
            made_final = sample.detokenizer.append(visible[num_taken : num_taken + at_once])
            released, stop = sample.stop.append(made_final)
            text += released
            num_taken += at_once
        if stop is not None:
            _take_back(sequence, update, num_taken)
        elif is_complete:
            released, stop = sample.stop.append(sample.detokenizer.flush())
            text += released
        if stop is not None:
            if is_complete:  # the last token also completed the stop string
                sequence.finish_reason, sequence.stop_reason = "stop", stop
            else:
                self._finish_sequence(sequence, "stop", stop)
        elif is_complete:
            text += sample.stop.flush()
        return text

    def _count_structured(self, sequence: Sequence) -> None:
        """Count an ended sample with structured_outputs by its validity."""
        is_cut = sequence.stop_reason is not None  # by a stop string or token of the caller
        is_complete = sequence.grammar is not None and sequence.grammar.is_complete
        match sequence.finish_reason:
            case "stop" if is_complete or not is_cut:  # a grammar allows EOS only where the output can end
                self.stats.requests.structured_outputs["valid"] += 1
            case "stop" | "length":
                self.stats.requests.structured_outputs["truncated"] += 1
            case "error":
                self.stats.requests.structured_outputs["invalid"] += 1

    def _record_latency(
        self, record: _RequestRecord, sample: _SampleText, num_tokens: int, now: float
    ) -> None:
        if not num_tokens:
            return
        self.stats.requests.generated_tokens += num_tokens
        stay = record.request.stay
        if stay.cause != "decode" and any(s.row is not None for s in record.request.sequences):
            stay.enter("decode", now)
        if record.first_token_time is None:
            record.first_token_time = now
            self.stats.ttft.observe(now - record.added)
        if sample.last_token_time is not None:
            self.stats.itl.observe((now - sample.last_token_time) / num_tokens, num_tokens)
        sample.last_token_time = now

    def _count_admission(self, record: _RequestRecord) -> None:
        """Record a request's wait in the engine and the source of its prompt's KV, at its first update."""
        request = record.request
        if record.is_admission_counted or not request.was_admitted:
            return
        record.is_admission_counted = True
        self.stats.wait.observe(max(0.0, request.admitted_at - record.added))
        sources = self.stats.requests.prompt_tokens_by_source
        sources["prefix_cache"] += request.num_cached_tokens
        sources["computed"] += request.num_input_tokens - request.num_cached_tokens

    def _record_phases(self, record: _RequestRecord, generated: int) -> None:
        """Record the times of a request's phases, when it ends after generating tokens here."""
        last = max((s.last_token_time for s in record.samples if s.last_token_time is not None), default=None)
        if record.first_token_time is None or last is None:
            return
        decode_s = last - record.first_token_time
        self.stats.prefill.observe(max(0.0, record.first_token_time - record.request.admitted_at))
        self.stats.decode.observe(decode_s)
        self.stats.inference.observe(max(0.0, last - record.request.admitted_at))
        # Samples decode in parallel: the latency is per sample, as a reader of one sees it.
        gaps = generated / len(record.samples) - 1
        if gaps > 0:
            self.stats.tpot.observe(decode_s / gaps)

    def _new_output(self, record: _RequestRecord) -> RequestOutput:
        request = record.request
        computed = max(s.num_computed_tokens for s in request.sequences)
        # A preempted request computes its prompt again, but its progress must not go backwards.
        record.prompt_tokens_done = max(
            record.prompt_tokens_done, min(computed, len(request.prompt_token_ids))
        )
        phase: Phase = "prefill" if record.prompt_tokens_done < len(request.prompt_token_ids) else "decode"
        return RequestOutput(
            request.request_id, phase, record.prompt_tokens_done, len(request.prompt_token_ids)
        )

    def _close_if_finished(self, record: _RequestRecord, output: RequestOutput, now: float) -> None:
        request = record.request
        if not request.is_finished:
            return
        del self._records[request.request_id]
        if record.best_of is not None:
            output.deltas = record.best_of.release()
        generated = request.num_output_tokens
        output.finished = True
        returned = generated
        if record.best_of is not None:
            returned = sum(len(delta.token_ids) for delta in output.deltas)
        output.usage = Usage(request.num_input_tokens, returned, request.num_cached_tokens)
        output.error, output.error_code = record.error, record.error_code
        output.warnings = request.warnings
        output.stay = request.stay.report(len(request.sequences), now)
        output.prompt_logprobs = request.prompt_logprobs or None
        if record.first_token_time is not None:
            output.ttft_s = record.first_token_time - record.added
        reason = request.sequences[0].finish_reason or "error"
        self.stats.requests.finished[reason] += 1
        self.stats.e2e.observe(now - record.added)
        self.stats.generated_length.observe(generated - record.num_resumed_tokens)
        self.stats.longest_sample.observe(
            max(len(sequence.output_token_ids) for sequence in request.sequences)
        )
        if request.was_admitted:
            self.stats.peak_blocks.observe(request.peak_blocks)
        self._record_phases(record, generated - record.num_resumed_tokens)


def _take_back(sequence: Sequence, update: SequenceUpdate, num_kept: int) -> None:
    """Remove all but an update's first tokens."""
    num_after = len(update.new_token_ids) - num_kept
    if num_after > 0:
        del update.new_token_ids[num_kept:], sequence.output_token_ids[-num_after:]
        if update.new_logprobs is not None:
            del update.new_logprobs[num_kept:]
