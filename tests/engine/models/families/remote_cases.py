"""The families that were published with custom code, which is never run: their config.json, names and layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.engine.models.families.independent_decoder import IndependentDecoder, Layer, Projection, projection
from tests.engine.models.families.native_cases import NO_SPECIAL_TOKENS, inverse_frequencies
from tests.engine.models.families.tiny import VOCAB_SIZE, Tensors, TinyCheckpoint

HIDDEN, MLP, LAYERS, HEADS, CONTEXT = 64, 96, 2, 4, 128
SLOPES = (2**-2, 2**-4, 2**-6, 2**-8)  # the ALiBi paper's rule for four heads: 2 ** (-8 i / n)
CONFIG: dict[str, Any] = NO_SPECIAL_TOKENS | {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


class Maker:
    """Random tensors under the given names."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self._generator = torch.Generator().manual_seed(0)

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self._normal(rows, columns)
        if bias:
            self.tensors[f"{name}.bias"] = self._normal(rows)

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self.tensors[f"{name}.weight"] = 1.0 + self._normal(size)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator) * 0.2


def code(module: str, name: str) -> dict[str, str]:
    return {
        "AutoConfig": f"configuration_{module}.Config",
        "AutoModelForCausalLM": f"modeling_{module}.{name}",
    }


def make_llama_names(maker: Maker, *, num_kv_heads: int, bias: bool, packed: bool) -> None:
    size = HIDDEN // HEADS
    maker.matrix("model.embed_tokens", VOCAB_SIZE, HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        maker.norm(f"{layer}.input_layernorm")
        maker.norm(f"{layer}.post_attention_layernorm")
        if packed:
            maker.matrix(f"{layer}.self_attn.W_pack", 3 * HIDDEN, HIDDEN)
        else:
            maker.matrix(f"{layer}.self_attn.q_proj", HIDDEN, HIDDEN, bias=bias)
            maker.matrix(f"{layer}.self_attn.k_proj", num_kv_heads * size, HIDDEN, bias=bias)
            maker.matrix(f"{layer}.self_attn.v_proj", num_kv_heads * size, HIDDEN, bias=bias)
        maker.matrix(f"{layer}.self_attn.o_proj", HIDDEN, HIDDEN, bias=bias)
        maker.matrix(f"{layer}.mlp.gate_proj", MLP, HIDDEN)
        maker.matrix(f"{layer}.mlp.up_proj", MLP, HIDDEN)
        maker.matrix(f"{layer}.mlp.down_proj", HIDDEN, MLP)
    maker.norm("model.norm")
    maker.matrix("lm_head", VOCAB_SIZE, HIDDEN)


def llama_names_layer(tensors: Tensors, number: int) -> Layer:
    layer = f"model.layers.{number}"
    packed = tensors.get(f"{layer}.self_attn.W_pack.weight")
    if packed is not None:
        query, key, value = (Projection(packed[n * HIDDEN : (n + 1) * HIDDEN]) for n in range(3))
    else:
        query, key, value = (projection(tensors, f"{layer}.self_attn.{name}_proj") for name in "qkv")
    return Layer(
        attention_norm=tensors[f"{layer}.input_layernorm.weight"],
        query=query,
        key=key,
        value=value,
        output=projection(tensors, f"{layer}.self_attn.o_proj"),
        mlp_norm=tensors[f"{layer}.post_attention_layernorm.weight"],
        gate=projection(tensors, f"{layer}.mlp.gate_proj"),
        up=projection(tensors, f"{layer}.mlp.up_proj"),
        down=projection(tensors, f"{layer}.mlp.down_proj"),
    )


def llama_names(
    config: dict[str, Any],
    *,
    bias: bool = False,
    packed: bool = False,
    norm_head: bool = False,
    **decoder: Any,
) -> TinyCheckpoint:
    maker = Maker()
    num_kv_heads = config.get("num_key_value_heads", HEADS)
    make_llama_names(maker, num_kv_heads=num_kv_heads, bias=bias, packed=packed)
    tensors, head = maker.tensors, maker.tensors["lm_head.weight"]
    if norm_head:
        head = head / head.square().sum(1, keepdim=True).sqrt()
    reference = IndependentDecoder(
        num_layers=LAYERS,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        embedding=tensors["model.embed_tokens.weight"],
        layer=lambda number: llama_names_layer(tensors, number),
        norm=tensors["model.norm.weight"],
        head=head,
        **decoder,
    )
    constants = inverse_frequencies("model.layers.{}.self_attn") if reference.slopes is None else {}
    return TinyCheckpoint(config, tensors | constants, reference.logits)


def aquila() -> TinyCheckpoint:
    own = {"model_type": "aquila", "architectures": ["AquilaForCausalLM"], "num_key_value_heads": 2}
    return llama_names(CONFIG | own | {"rope_theta": 30000.0, "auto_map": code("aquila", "AquilaForCausalLM")},
                       rotary_base=30000.0)  # fmt: skip


def baichuan_7b() -> TinyCheckpoint:
    own = {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"]}
    return llama_names(CONFIG | own | {"auto_map": code("baichuan", "BaiChuanForCausalLM")}, packed=True)


def baichuan_13b() -> TinyCheckpoint:
    config = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    config |= {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "model_max_length": CONTEXT,
        "auto_map": code("baichuan", "BaichuanForCausalLM"),
    }
    return llama_names(config, packed=True, slopes=SLOPES)


def baichuan2_7b() -> TinyCheckpoint:
    config = CONFIG | {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "model_max_length": CONTEXT,
        "z_loss_weight": 0,
    }
    return llama_names(config, packed=True, norm_head=True)


def baichuan2_13b() -> TinyCheckpoint:
    first = baichuan_13b()
    return llama_names(first.config | {"z_loss_weight": 0}, packed=True, norm_head=True, slopes=SLOPES)


def internlm(bias: bool) -> TinyCheckpoint:
    own = {"model_type": "internlm", "architectures": ["InternLMForCausalLM"], "bias": bias}
    rotary = {"rotary": {"base": 20000, "type": "dynamic"}} if bias else {}
    return llama_names(CONFIG | own | rotary, bias=bias, rotary_base=20000.0 if bias else 10000.0)


def internlm3() -> TinyCheckpoint:
    own = {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"], "num_key_value_heads": 2}
    return llama_names(CONFIG | own | {"bias": False, "qkv_bias": False, "head_dim": HIDDEN // HEADS})


def internlm2(bias: bool) -> TinyCheckpoint:
    maker, num_kv_heads, size = Maker(), 2, HIDDEN // HEADS
    group = HEADS // num_kv_heads
    maker.matrix("model.tok_embeddings", VOCAB_SIZE, HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        maker.norm(f"{layer}.attention_norm")
        maker.norm(f"{layer}.ffn_norm")
        maker.matrix(f"{layer}.attention.wqkv", num_kv_heads * (group + 2) * size, HIDDEN, bias=bias)
        maker.matrix(f"{layer}.attention.wo", HIDDEN, HIDDEN, bias=bias)
        for name, rows, columns in (("w1", MLP, HIDDEN), ("w2", HIDDEN, MLP), ("w3", MLP, HIDDEN)):
            maker.matrix(f"{layer}.feed_forward.{name}", rows, columns)
    maker.norm("model.norm")
    maker.matrix("output", VOCAB_SIZE, HIDDEN)
    tensors = maker.tensors

    def rows_of(number: int, first: int, last: int) -> Projection:
        """For every KV head, the rows of its members first .. last - 1 (queries, then key, then value)."""
        wanted = [
            (head * (group + 2) + member) * size + row
            for head in range(num_kv_heads)
            for member in range(first, last)
            for row in range(size)
        ]
        packed = projection(tensors, f"model.layers.{number}.attention.wqkv")
        return Projection(packed.weight[wanted], None if packed.bias is None else packed.bias[wanted])

    def layer_at(number: int) -> Layer:
        layer = f"model.layers.{number}"
        return Layer(
            attention_norm=tensors[f"{layer}.attention_norm.weight"],
            query=rows_of(number, 0, group),
            key=rows_of(number, group, group + 1),
            value=rows_of(number, group + 1, group + 2),
            output=projection(tensors, f"{layer}.attention.wo"),
            mlp_norm=tensors[f"{layer}.ffn_norm.weight"],
            gate=projection(tensors, f"{layer}.feed_forward.w1"),
            up=projection(tensors, f"{layer}.feed_forward.w3"),
            down=projection(tensors, f"{layer}.feed_forward.w2"),
        )

    reference = IndependentDecoder(
        LAYERS, HEADS, num_kv_heads, tensors["model.tok_embeddings.weight"], layer_at, tensors["model.norm.weight"],
        tensors["output.weight"], rotary_base=1000000.0,
    )  # fmt: skip
    config = CONFIG | {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "num_key_value_heads": num_kv_heads,
        "bias": bias,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "auto_map": code("internlm2", "InternLM2ForCausalLM"),
    }
    return TinyCheckpoint(config, tensors, reference.logits)


def qwen() -> TinyCheckpoint:
    maker = Maker()
    maker.matrix("transformer.wte", VOCAB_SIZE, HIDDEN)
    for number in range(LAYERS):
        layer = f"transformer.h.{number}"
        maker.norm(f"{layer}.ln_1")
        maker.norm(f"{layer}.ln_2")
        maker.matrix(f"{layer}.attn.c_attn", 3 * HIDDEN, HIDDEN, bias=True)
        maker.matrix(f"{layer}.attn.c_proj", HIDDEN, HIDDEN)
        maker.matrix(f"{layer}.mlp.w1", MLP, HIDDEN)
        maker.matrix(f"{layer}.mlp.w2", MLP, HIDDEN)
        maker.matrix(f"{layer}.mlp.c_proj", HIDDEN, MLP)
    maker.norm("transformer.ln_f")
    maker.matrix("lm_head", VOCAB_SIZE, HIDDEN)
    tensors = maker.tensors

    def layer_at(number: int) -> Layer:
        layer = f"transformer.h.{number}"
        packed = projection(tensors, f"{layer}.attn.c_attn")
        assert packed.bias is not None
        thirds = [slice(n * HIDDEN, (n + 1) * HIDDEN) for n in range(3)]
        query, key, value = (Projection(packed.weight[rows], packed.bias[rows]) for rows in thirds)
        return Layer(
            attention_norm=tensors[f"{layer}.ln_1.weight"],
            query=query,
            key=key,
            value=value,
            output=projection(tensors, f"{layer}.attn.c_proj"),
            mlp_norm=tensors[f"{layer}.ln_2.weight"],
            gate=projection(tensors, f"{layer}.mlp.w2"),
            up=projection(tensors, f"{layer}.mlp.w1"),
            down=projection(tensors, f"{layer}.mlp.c_proj"),
        )

    reference = IndependentDecoder(
        LAYERS, HEADS, HEADS, tensors["transformer.wte.weight"], layer_at, tensors["transformer.ln_f.weight"],
        tensors["lm_head.weight"], eps=1e-6,
    )  # fmt: skip
    config = NO_SPECIAL_TOKENS | {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * MLP,
        "kv_channels": HIDDEN // HEADS,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 4 * CONTEXT,
        "no_bias": True,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": CONTEXT,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "use_flash_attn": "auto",
        "bf16": False,
        "fp16": False,
        "fp32": False,
    }
    masked = {"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}
    return TinyCheckpoint(config, tensors | masked, reference.logits)


REMOTE_CASES: dict[str, Callable[[], TinyCheckpoint]] = {
    "aquila2, grouped": aquila,
    "baichuan 7b": baichuan_7b,
    "baichuan 13b": baichuan_13b,
    "baichuan2 7b": baichuan2_7b,
    "baichuan2 13b": baichuan2_13b,
    "internlm 7b, biases": lambda: internlm(bias=True),
    "internlm 20b": lambda: internlm(bias=False),
    "internlm2": lambda: internlm2(bias=False),
    "internlm2, biases": lambda: internlm2(bias=True),
    "internlm3": internlm3,
    "qwen": qwen,
}
