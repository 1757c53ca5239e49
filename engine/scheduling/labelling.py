"""Requests for the probabilities of labels: their chains fork off each other, and end together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagemill.engine.scheduling.label_tree import LabelTree
from pagemill.engine.scheduling.reads import Reads
from pagemill.engine.scheduling.request import Request, Sequence, SequenceStatus, SequenceUpdate
from pagemill.engine.scheduling.waiting_queue import WaitingQueue


def start_labels(request: Request, tree: LabelTree) -> None:
    """Make a request's one sequence into the chains of a tree; its first stays the one that is reported."""
    start = len(request.prompt_token_ids)
    request.params = replace(request.params, max_tokens=tree.longest)
    request.labels, request.num_open_chains = tree, len(tree.chains)
    request.sequences += [Sequence(request, number) for number in range(1, len(tree.chains))]
    for sequence, chain in zip(request.sequences, tree.chains, strict=True):
        sequence.continuation, sequence.output_token_ids = chain.token_ids, list(chain.token_ids[:-1])
        sequence.reads = Reads(start + chain.first_read - 1, chain.reads)
        if chain.parent is not None:
            sequence.fork_of = request.sequences[chain.parent]
            sequence.fork_at = start + chain.num_shared


def drop_chains(request: Request) -> Sequence:
    """Forget what the chains were given to compute, and return the sequence that is reported."""
    for sequence in request.sequences:
        sequence.continuation, sequence.output_token_ids = (), []
    return request.sequences[0]


def take_reads(sequence: Sequence, found: Iterable[tuple[int, list[float]]]) -> SequenceUpdate | None:
    """Record what a step found, as (position, log-probabilities).

    Returns the request's end, once all of its chains are complete.
    """
    request, reads = sequence.request, sequence.reads
    assert reads is not None
    assert request.labels is not None
    was_complete = reads.is_complete
    for position, values in found:
        reads.record(position, values)
    if was_complete or not reads.is_complete:
        return None
    request.num_open_chains -= 1
    if request.num_open_chains:
        return None
    scores = request.labels.scores([_found(chain) for chain in request.sequences])
    first = drop_chains(request)
    first.output_token_ids = list(request.labels.labels[scores.chosen])
    first.finish_reason = "stop"
    return SequenceUpdate(first, list(first.output_token_ids), label_scores=scores)


def is_complete(sequence: Sequence) -> bool:
    """Return True if it is a chain that has found all that it reads."""
    return sequence.reads is not None and sequence.reads.is_complete


class Labelling:
    """Lets chains enter once their parents have computed what they share, and finds those that can end.

    A complete chain keeps its blocks until the chains that fork off it have entered. Where rows or blocks are short it
    goes before: they then take the full blocks from the prefix cache, or compute them again.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._requests: dict[Request, None] = {}
        """Those with several chains, of which the first has entered."""

    def entered(self, sequence: Sequence) -> None:
        """Note that a sequence has entered the batch."""
        if sequence.reads is not None and len(sequence.request.sequences) > 1:
            self._requests[sequence.request] = None

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)

    def enqueue(self) -> None:
        """Queue the chains that can enter: between two steps."""
        for request in self._requests:
            self._waiting.enqueue(request)

    def idle(self, *, keeps_parents: bool) -> list[Sequence]:
        """Return the complete chains; with `keeps_parents` without those that others are yet to fork off."""
        found = []
        for request in self._requests:
            waiting = {s.fork_of for s in request.sequences if s.status is SequenceStatus.WAITING}
            parents = waiting if keeps_parents else set()
            found += [
                sequence
                for sequence in request.live_sequences
                if is_complete(sequence) and sequence not in parents
            ]
        return found


def _found(sequence: Sequence) -> list[list[float]]:
    assert sequence.reads is not None
    return [list(values or ()) for values in sequence.reads.found]
