"""Merging the list of deltas that forms a checkpoint in Redis into samples."""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.common.gc_pause import gc_paused
from pagemill.producer.wire.schema.outputs import (
    Checkpoint,
    CheckpointSample,
    Delta,
    FinishReason,
    Output,
    PositionLogprobs,
)
from pagemill.producer.wire.schema.sealing import opened
from pagemill.producer.wire.schema.signing import unsigned_entry
from pagemill.producer.wire.schema.text.parsed_text import ParsedText


def read_deltas(job_id: str, entries: Iterable[bytes]) -> list[Delta]:
    """Parse a job's entries as deltas. Raises ValueError for an invalid entry, or one that cannot be decrypted here."""
    with gc_paused():
        return [
            Delta.model_validate_json(opened(unsigned_entry(entry), "delta", job_id)) for entry in entries
        ]


def merge_checkpoint(
    entries: Iterable[bytes], fingerprint: str = "", seed: int | None = None, *, job_id: str = ""
) -> Checkpoint | None:
    """Merge the entries of a job into samples; None if there are no entries. `job_id` is needed if they are encrypted.

    Raises ValueError if an entry is not a delta, or does not continue where the one before it ended.
    """
    samples: dict[int, _Sample] = {}
    for delta in read_deltas(job_id, entries):
        samples.setdefault(delta.index, _Sample()).add(delta)
    if not samples:
        return None
    seqs = tuple(samples[index].freeze(index) for index in sorted(samples))
    return Checkpoint(fingerprint=fingerprint, seed=seed, seqs=seqs)


def partial_outputs(job_id: str, entries: Iterable[bytes]) -> tuple[Output, ...]:
    """Return the partial output of a job that ended without a result; empty if it cannot be read."""
    try:
        checkpoint = merge_checkpoint(entries, job_id=job_id)
    except ValueError:
        return ()
    return tuple(_output(job_id, sample) for sample in checkpoint.seqs) if checkpoint else ()


def _output(job_id: str, sample: CheckpointSample) -> Output:
    fields = {name: value for name, value in sample if name != "syntax"}
    parsed = ParsedText.parse(sample.syntax, job_id, sample.index, sample.text)
    return Output(**fields | parsed.output_fields())


class _Sample:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.syntax: str | None = None

    def add(self, delta: Delta) -> None:
        if delta.offset != len(self.token_ids):
            raise ValueError("the checkpoint has a gap")
        self.token_ids += delta.token_ids
        self.text.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.syntax = delta.syntax or self.syntax

    def freeze(self, index: int) -> CheckpointSample:
        return CheckpointSample(
            index=index,
            token_ids=tuple(self.token_ids),
            text="".join(self.text),
            logprobs=tuple(self.logprobs) or None,
            finish_reason=self.finish_reason,
            syntax=self.syntax,
        )
