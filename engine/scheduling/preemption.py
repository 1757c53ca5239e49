"""Preemption when KV blocks run out: by swapping to the host, or by recomputing later."""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.scheduling.beam_search import restart_beams
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.kv.swap_space import kept_blocks
from pagemill.engine.scheduling.preemption_cost import PreemptionCost
from pagemill.engine.scheduling.request import Sequence
from pagemill.engine.scheduling.sequence_queue import SequenceQueue


class Preemption:
    """Takes blocks from victims and tracks swapped sequences. It manages neither rows nor queues."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.swapped = SequenceQueue()
        self.cost = PreemptionCost(config.kv_block_bytes, config.swap_bytes_per_second)
        self.num_recomputing = 0
        """Preemptions by recompute; the beams of one search count as one."""
        self.num_swapping = 0
        self.preempted_tokens = 0
        self.recomputed_tokens = 0
        self._kv = kv

    def take_blocks(self, victims: SequenceType[Sequence]) -> None:
        """Take all blocks of a running sequence, or of a search's beams, in the cheaper available way."""
        space = self._kv.swap_space
        for victim in victims:
            self._kv.trim(victim)
        if space.capacity:
            quote = space.quote(victims)
            if quote.num_blocks <= space.num_free and self.cost.prefers_swap(quote, victims):
                self.num_swapping += 1
                space.swap_out(victims)
                for victim in victims:
                    self.swapped.add(victim)
                return
        self.num_recomputing += 1
        self.preempted_tokens += self._lose(victims)
        for victim in victims:
            self._kv.free(victim)
        restart_beams(victims[0].request)

    def restore(self, sequences: SequenceType[Sequence]) -> None:
        """Bring swapped sequences back; the pool has room for them."""
        self._kv.swap_space.swap_in(sequences)
        for sequence in sequences:
            self.swapped.discard(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Recompute a swapped sequence, and the other beams if it is one, instead of restoring it."""
        request = sequence.request
        beams = [beam for beam in request.sequences if beam.swapped_blocks] if request.beam_search else []
        self._lose(beams or [sequence])
        for swapped in beams or [sequence]:
            self.forget(swapped)
        restart_beams(request)

    def forget(self, sequence: Sequence) -> None:
        """Release what a sequence has swapped out, if anything."""
        if self.swapped.discard(sequence):
            self._kv.swap_space.drop(sequence)

    def drop_last_holder(self, spare: SequenceType[Sequence] = ()) -> bool:
        """Drop the last swapped request that still refers to blocks on the device. False if there is none."""
        for sequence in reversed(list(self.swapped)):
            if kept_blocks(sequence) and sequence not in spare:
                self.drop(sequence)
                return True
        return False

    def note_admission(self, sequence: Sequence, num_hit_tokens: int) -> None:
        """Count recomputed tokens as a sequence restarts: what it had computed, less its prefix hits."""
        # The first beam stands for all.
        for lost in sequence.request.sequences if sequence.request.beam_search is not None else (sequence,):
            self.recomputed_tokens += max(0, lost.num_lost_tokens - num_hit_tokens)
            lost.num_lost_tokens = 0

    @staticmethod
    def _lose(victims: SequenceType[Sequence]) -> int:
        """Record what must be recomputed; returns the number of tokens whose KV is discarded."""
        for victim in victims:
            victim.num_lost_tokens = victim.num_computed_tokens
            if victim is not victims[0]:  # beams share the prompt
                victim.num_lost_tokens -= victim.num_prompt_tokens
        return sum(victim.num_lost_tokens for victim in victims)
