"""Changes to transformers' modules of unregistered types that packed batches require.

One row of `ADAPTATIONS` per type rewires modules in place. For a batch of one sequence, results do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.library import is_silu
from pagemill.engine.layers.observation import attention_function
from pagemill.kernels import dispatch

PAST_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Types whose positions start after the padding token's id."""


def _override(module: nn.Module, class_name: str, **makers: Callable[[Any], Any]) -> list[Any]:
    """Replace methods of all parts of a class; return these parts.

    Args:
        makers: by method, a function that maps the original to its replacement.
    """
    parts: list[Any] = [part for part in module.modules() if type(part).__name__ == class_name]
    for own in {type(part) for part in parts}:
        methods = {name: make(getattr(own, name)) for name, make in makers.items()}
        packed = type(f"Packed{class_name}", (own,), methods)
        for part in parts:
            if type(part) is own:
                part.__class__ = packed
                part.config = getattr(part, "config", module.config)
    return parts


def _attend_by_heads(own: Callable[..., Any], *, has_transposed_keys: bool = False) -> Callable[..., Any]:
    """Return the replacement of a method `_attn` over [1, num_heads, num_tokens, head_dim]."""

    def attend(self: Any, query: Any, key: Any, value: Any, mask: Any = None, *others: Any) -> Any:
        function = attention_function(self.config)
        if function is None:
            return own(self, query, key, value, mask, *others)
        key = key.transpose(2, 3) if has_transposed_keys else key
        scaling = 1.0 if getattr(self, "scale", True) is False else query.shape[-1] ** -0.5
        out, _ = function(self, query, key, value, mask, scaling=scaling)
        return [out.transpose(1, 2), None]

    return attend


def _forward_bert(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of the forward pass of BERT's self-attention."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        function = attention_function(self.config)
        if function is None:
            return own(self, hidden_states, attention_mask, *args, **kwargs)
        states = (
            project(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        out, _ = function(self, *states, attention_mask, scaling=self.attention_head_size**-0.5)
        return out.flatten(2), None

    return forward


def _shift_positions(module: nn.Module) -> None:
    """Start positions after the padding token's id, without counting padding tokens."""

    def shift(part: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        if positions is None:
            length = kwargs["input_ids"].shape[1]
            positions = torch.arange(length, device=kwargs["input_ids"].device)[None]
        return args, kwargs | {"position_ids": positions + part.padding_idx + 1}

    for part in module.modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            part.register_forward_pre_hook(shift, with_kwargs=True)
            vars(part)["counts_positions"] = True


class _Positions:
    """Replaces a cache in a layer that derives positions from the cache's length."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self._offsets

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def _forward_llama4_experts(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a block that multiplies every expert's input with the router's score."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if hasattr(self.experts, "gate_up_proj"):  # transformers' module, which computes every expert
            return own(self, hidden_states)
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        inputs = (rows[:, None] * weights[..., None]).flatten(0, 1)
        chosen = chosen.reshape(-1, 1)
        routed = self.experts(inputs, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return self.shared_expert(rows) + routed.unflatten(0, (-1, self.top_k)).sum(dim=1), logits

    return forward


def _adapt_llama4(module: Any) -> None:
    # transformers searches for "language_model", which this class does not have.
    module.base_model_prefix = "model"

    def give_positions(_layer: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"past_key_values": _Positions(kwargs["position_ids"][0])}

    for layer in module.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            layer.register_forward_pre_hook(give_positions, with_kwargs=True)
    for block in _override(module, "Llama4TextMoe", forward=_forward_llama4_experts):
        experts = block.experts
        if is_silu(experts.act_fn):  # the layout that is replaced
            experts.has_gate, experts.has_bias, experts.is_transposed = True, False, True
            experts.declared = dispatch.silu_and_mul


def _adapt_longcat(module: nn.Module) -> None:
    for part in module.modules():
        if hasattr(part, "classifier"):  # the router reads its weight
            vars(part.classifier)["is_read"] = True


@cache
def _normal_quantile(share: float, dtype: torch.dtype) -> float:
    """Return the quantile of the standard normal distribution, rounded to a dtype."""
    normal: Any = torch.distributions.Normal(0, 1)
    return float(normal.icdf(torch.tensor(share, dtype=torch.float32, device="cpu")).to(dtype))


def _sparsify(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of Gemma 3n's `_gaussian_topk`, which moves a constant to the device in each step."""

    def topk(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        spread = inputs.std(dim=-1, keepdim=True, unbiased=False)
        cutoff = inputs.mean(dim=-1, keepdim=True) + spread * _normal_quantile(
            self.activation_sparsity, inputs.dtype
        )
        return nn.functional.relu(inputs - cutoff)

    return topk


class _LinearCache:
    """MiniMax's cache of linear attention, kept in transformers' cache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self._cache.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: torch.Tensor) -> None:
        self._cache.update_recurrent_state(states, layer_idx)


def _forward_lightning(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = None if past_key_values is None else _LinearCache(past_key_values)
        out, _ = own(self, hidden_states, *args, past_key_values=cache, **kwargs)
        return out, None

    return forward


def _forward_griffin(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass whose state is in a cache, and continues with any number of tokens."""

    def forward(
        self: Any,
        input_states: torch.Tensor,
        position_ids: Any,
        *args: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if past_key_values is None:
            return own(self, input_states, position_ids, *args, **kwargs)
        inputs = self.linear_x(input_states).transpose(1, 2)
        before = past_key_values.get_conv_state(self.layer_idx)
        if before is None:
            before = inputs.new_zeros(*inputs.shape[:2], self.conv1d_width - 1)
        self.rg_lru.recurrent_states = past_key_values.get_recurrent_state(self.layer_idx)
        inputs = torch.cat([before, inputs], dim=-1)
        past_key_values.update_conv_state(inputs[..., 1 - self.conv1d_width :], self.layer_idx)
        conv = self.conv_1d
        mixed = nn.functional.conv1d(inputs, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2)
        out = self.rg_lru(mixed, position_ids) * self.act_fn(self.linear_y(input_states))
        past_key_values.update_recurrent_state(self.rg_lru.recurrent_states, self.layer_idx)
        self.rg_lru.recurrent_states = None
        return self.linear_out(out), None

    return forward


def _adapt_recurrent_gemma(module: Any) -> None:
    _override(module, "RecurrentGemmaRecurrentBlock", forward=_forward_griffin)
    for number, layer in enumerate(module.model.layers):
        layer.temporal_block.layer_idx = number


ADAPTATIONS: dict[str, Callable[[nn.Module], Any]] = {
    **dict.fromkeys(PAST_PADDING, _shift_positions),
    "gemma3n_text": partial(_override, class_name="Gemma3nTextMLP", _gaussian_topk=_sparsify),
    "gpt_neox_japanese": partial(_override, class_name="GPTNeoXJapaneseAttention", _attn=_attend_by_heads),
    "llama4_text": _adapt_llama4,
    "longcat_flash": _adapt_longcat,
    "megatron-bert": partial(_override, class_name="MegatronBertSelfAttention", forward=_forward_bert),
    "minimax": partial(_override, class_name="MiniMaxLightningAttention", forward=_forward_lightning),
    "openai-gpt": partial(
        _override, class_name="Attention", _attn=partial(_attend_by_heads, has_transposed_keys=True)
    ),
    "recurrent_gemma": _adapt_recurrent_gemma,
    "rembert": partial(_override, class_name="RemBertSelfAttention", forward=_forward_bert),
}
