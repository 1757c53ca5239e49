"""Applies a step's result to a sequence: appends the token, advances the grammar, checks stop conditions."""

from __future__ import annotations

from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.scheduling.request import Sequence, SequenceUpdate


def append_sampled(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    eos_token_ids: frozenset[int],
) -> SequenceUpdate:
    """Append a sampled token and those a grammar forces after it, stopping if the sequence ends.

    Sets `finish_reason` and `stop_reason` when the sequence ends; the scheduler sets its status. The token
    that stops a sequence is part of its output; tokens after it are dropped. A grammar that completes with
    the last allowed token sets `stop`, not `length`. A failed grammar does not end the sequence: the scheduler
    fails the entire request.
    """
    if len(token_ids) == 1 and sequence.grammar is None and sequence.request.params.logprobs is None:
        return _append_alone(sequence, token_ids[0], eos_token_ids)
    update = SequenceUpdate(sequence)
    if sequence.request.params.logprobs is not None:
        update.new_logprobs = []
    for number, token_id in enumerate(token_ids):
        _append(update, token_id, logprobs[number] if logprobs else None)
        if _stops(sequence, token_id, eos_token_ids):
            break
        if sequence.grammar is not None and _follow_grammar(update, token_id, eos_token_ids):
            break
        if _is_full(sequence):
            sequence.finish_reason = "length"
            break
    return update


def _append_alone(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> SequenceUpdate:
    """Append one token without drafts or forced tokens, the case in most steps."""
    sequence.output_token_ids.append(token_id)
    if not _stops(sequence, token_id, eos_token_ids) and _is_full(sequence):
        sequence.finish_reason = "length"
    return SequenceUpdate(sequence, [token_id])


def _follow_grammar(update: SequenceUpdate, token_id: int, eos_token_ids: frozenset[int]) -> bool:
    """Advance the grammar and append its forced tokens, up to the limit. Return True if the sequence ends."""
    sequence = update.sequence
    grammar = sequence.grammar
    assert grammar is not None
    for forced in grammar.advance(token_id):
        if _is_full(sequence):
            return False
        sequence.forced_token_ids.append((sequence.num_known_tokens, forced))
        _append(update, forced, None)
        if _stops(sequence, forced, eos_token_ids):
            return True
    if grammar.is_complete:
        sequence.finish_reason = "stop"
    return grammar.is_complete or grammar.failure is not None


def _append(update: SequenceUpdate, token_id: int, logprob: TokenLogprobs | None) -> None:
    sequence = update.sequence
    sequence.output_token_ids.append(token_id)
    update.new_token_ids.append(token_id)
    if update.new_logprobs is not None:
        update.new_logprobs.append(logprob or TokenLogprobs(token_id, None))


def _stops(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> bool:
    params = sequence.request.params
    if len(sequence.output_token_ids) < params.min_tokens:
        return False
    if token_id in eos_token_ids and not params.ignore_eos:
        sequence.finish_reason = "stop"
    elif token_id in params.stop_token_ids:
        sequence.finish_reason = "stop"
        sequence.stop_reason = token_id
    return sequence.finish_reason is not None


def _is_full(sequence: Sequence) -> bool:
    request = sequence.request
    return len(request.prompt_token_ids) + len(sequence.output_token_ids) >= request.max_num_tokens
