"""A model's forward pass without its modules' Python, for models whose layers are all compiled.

transformers' forward creates unused masks, recomputes angles and traverses wrappers and layers, all while
the CPU caches hold weights instead of Python: milliseconds of every step. It computes the embedding, the layers,
the last norm and the head; this class does the same, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagemill.engine.layers.decoder_layer import FusedDecoderLayer
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.media_step import MediaStep
from pagemill.engine.layers.positions.rope_table import RotaryTable
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata

if TYPE_CHECKING:
    from pagemill.kernels.cpu.layer.stack import LayerStack


class DirectForward:
    """Runs a causal language model with plain traits."""

    def __init__(self, module: Any) -> None:
        from pagemill.kernels.cpu.layer.stack import LayerStack

        decoder = module.model
        layers: list[FusedDecoderLayer] = list(decoder.layers)
        self._embed, self._norm, self._head = decoder.embed_tokens, decoder.norm, module.lm_head
        self._rotary = RotaryTable(decoder.rotary_emb)
        self._cache_indices = [layer.layer_idx for layer in layers]
        self._layers, self._buffers = [layer.layer for layer in layers], layers[0].step_buffers
        self._stack = LayerStack(self._layers, self._buffers)
        self._parts: dict[tuple[int, int], LayerStack] = {}
        """Stacks of layers, by first layer and end."""

    @classmethod
    def from_module(cls, module: Any, traits: DecoderTraits | None) -> DirectForward | None:
        """Return None if the model's forward pass computes more, or is not fully compiled."""
        if traits is None or not traits.is_plain or traits.rotation != "one":
            return None
        if not RotaryTable.holds(module.model.rotary_emb):
            return None
        layers = list(module.model.layers)
        if len(layers) != module.config.num_hidden_layers:
            return None
        if not all(isinstance(layer, FusedDecoderLayer) for layer in layers):
            return None
        return cls(module)

    def logits(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None,
        logits_indices: torch.Tensor | None,
        media: MediaStep | None = None,
    ) -> torch.Tensor:
        """Return logits [num_samples, vocab_size] of the tokens at `logits_indices`; None: of all tokens.

        Args:
            read_tokens, media: see `AttentionContext`.
        """
        hidden = self.hidden_states(input_ids, positions, caches, metadata, read_tokens, media)
        if logits_indices is not None:
            if not len(logits_indices):
                return hidden[:0]  # there are no samples, so no logits are read
            hidden = hidden.index_select(0, logits_indices)
        return self.head(hidden)

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None,
        media: MediaStep | None = None,
    ) -> torch.Tensor:
        """Return the last layer's output, [num_tokens, hidden_size], for the arguments of `logits`."""
        if media is not None:
            return self._with_media(media, input_ids, positions, caches, metadata, read_tokens)
        hidden: torch.Tensor = self._embed(input_ids)
        rotation = self._rotary.rows(positions, metadata.max_seq_len)
        self._stack.run(hidden, rotation, [caches[i] for i in self._cache_indices], metadata, read_tokens)
        return hidden

    def _with_media(
        self,
        media: MediaStep,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """`hidden_states` of a step with media: vectors are added after the first layers, which run separately."""
        hidden = media.embed(self._embed, input_ids)
        rotation = self._rotary.rows(positions, metadata.max_seq_len)
        if media.positions is not None and media.sections is not None:
            tables = [self._rotary.rows(axis, metadata.max_seq_len)[0] for axis in media.positions]
            rows = media.sections.combine((tables[0], tables[1], tables[2]))
            rotation = rows, rows[:, rows.shape[1] // 2 :]
        layer_caches = [caches[i] for i in self._cache_indices]
        num_deep = len(media.deep)
        for index in range(num_deep):
            alone = self._alone(index, index + 1)
            alone.run(hidden, rotation, layer_caches[index : index + 1], metadata)
            hidden = media.add_deep(index, hidden)
        if num_deep < len(layer_caches):
            rest = self._alone(num_deep, len(layer_caches)) if num_deep else self._stack
            rest.run(hidden, rotation, layer_caches[num_deep:], metadata, read_tokens)
        return hidden

    def _alone(self, first: int, end: int) -> LayerStack:
        """Return the stack of layers first..end-1."""
        from pagemill.kernels.cpu.layer.stack import LayerStack

        if (stack := self._parts.get((first, end))) is None:
            stack = self._parts[first, end] = LayerStack(self._layers[first:end], self._buffers)
        return stack

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to logits [num_tokens, vocab_size]."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits
