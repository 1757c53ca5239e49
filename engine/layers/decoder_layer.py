"""A decoder layer without Python between its operators, if the compiled layer supports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagemill.engine.layers.attention import current_context
from pagemill.engine.layers.converted_products import PackedBf16Product, PackedInt8Product
from pagemill.engine.layers.fusion import SiluGatedMLP
from pagemill.engine.layers.linear import Linear, PackedProduct, has_adapter_rows

if TYPE_CHECKING:
    from pagemill.kernels.cpu.layer.compile_ahead import Part
    from pagemill.kernels.cpu.layer.layer import LayerWeights, Product
    from pagemill.kernels.cpu.layer.stack import LayerStack
    from pagemill.kernels.cpu.layer.step_buffers import StepBuffers


_COMPILED_PRODUCTS: tuple[set[type[nn.Module]], ...] = (
    {PackedProduct},
    {PackedInt8Product},
    {PackedBf16Product},
)


class FusedDecoderLayer(nn.Module):
    """Computes the same as `source`, to the last bit, in place on the given hidden states.

    `source` is one of transformers' layers whose modules have been replaced
    (`pagemill.engine.layers.fusion`). It remains a child: its modules own the weights.
    """

    def __init__(self, source: Any, buffers: StepBuffers) -> None:
        super().__init__()
        from pagemill.kernels.cpu.layer.layer import DecoderLayer
        from pagemill.kernels.cpu.layer.stack import LayerStack

        self.source = source
        self._attention = attention = source.self_attn
        self.layer: DecoderLayer = DecoderLayer(_weights(source), attention.scoring, attention.rotates)
        self.step_buffers: StepBuffers = buffers
        self._alone: LayerStack = LayerStack([self.layer], buffers)
        self.is_last = False
        """True if only norm and head follow, so that it can skip tokens that are not read."""
        if hasattr(source, "attention_type"):  # models that mix windows look up a layer's mask by it
            self.attention_type = source.attention_type

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        attention_mask: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin [1, num_tokens, head_dim]
        **_: Any,
    ) -> torch.Tensor:
        if has_adapter_rows():  # the compiled layer does not support adapters
            hidden: torch.Tensor = self.source(hidden_states, position_embeddings=position_embeddings)
            return hidden
        context = current_context()
        cos, sin = position_embeddings
        caches = [context.layers[self.layer_idx]]
        read_tokens = context.read_tokens if self.is_last else None
        self._alone.run(hidden_states[0], (cos[0], sin[0]), caches, context.metadata, read_tokens)
        return hidden_states

    @property
    def layer_idx(self) -> int:
        index: int = self._attention.layer_idx
        return index

    def parts(self, cache_dtype: torch.dtype) -> list[Part]:
        """Return the kernels that it runs over a cache of this dtype."""
        from pagemill.kernels.cpu.layer.compile_ahead import Part
        from pagemill.kernels.cpu.layer.stack import PARTS

        return [Part(name, self._alone.kind, cache_dtype) for name in PARTS]

    def warm_up(self, block_size: int, cache_dtype: torch.dtype) -> None:
        self._alone.warm_up(block_size, cache_dtype)


def can_be_compiled(layer: Any) -> bool:
    """Return True if `FusedDecoderLayer` supports this pre-norm layer, whose modules have been replaced."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, SiluGatedMLP):
        return False
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return (
        {type(linear.product) for linear in products} in _COMPILED_PRODUCTS
        and all(linear.part is None for linear in products)
        and layer.input_layernorm.eps == layer.post_attention_layernorm.eps
        and _has_whole_panels(mlp.down_proj)
    )


def _has_whole_panels(down: Any) -> bool:
    """Return True if the compiled MLP supports these sizes, as it does for every common model."""
    from pagemill.kernels.cpu.jit.vector import LANES
    from pagemill.kernels.cpu.matmul.fp32_tile import PANEL

    return bool(down.in_features % PANEL == 0 and down.out_features % LANES == 0)


def _weights(layer: Any) -> LayerWeights:
    from pagemill.kernels.cpu.layer.layer import LayerWeights

    attention, mlp = layer.self_attn, layer.mlp
    has_qk_norm = attention.q_norm is not None and attention.k_norm is not None
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=_product(attention.qkv_proj),
        q_norm=attention.q_norm.weight if has_qk_norm else None,
        k_norm=attention.k_norm.weight if has_qk_norm else None,
        o=_product(attention.o_proj),
        post_attention_norm=layer.post_attention_layernorm.weight,
        gate_up=_product(mlp.gate_up_proj),
        down=_product(mlp.down_proj),
        eps=layer.input_layernorm.eps,
        qk_eps=attention.q_norm.eps if has_qk_norm else 0.0,
        intermediate_size=mlp.down_proj.in_features,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
    )


def _product(linear: Linear) -> Product:
    from pagemill.kernels.cpu.layer.layer import Product

    product: Any = linear.product
    return Product(product.panels, product.bias, product.kind, product.packed.weight_format)
