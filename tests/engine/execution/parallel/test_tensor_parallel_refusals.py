"""Invalid splits: rejected before a process is started, with the number that does not divide."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.share import (
    CHANNELS,
    INPUTS,
    KV_HEADS,
    MERGED_MLP,
    MERGED_QKV,
    QKV_BY_KV_HEAD,
    ShardingPlan,
    Share,
    TensorSplit,
    planned_split,
)
from pagemill.engine.models.families.registry import find_family
from tests.engine.models.families.native_cases import NATIVE_CASES
from tests.engine.models.families.remote_cases import REMOTE_CASES

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def refusal(directory: Path, config: dict[str, Any], **options: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        Engine.from_config(EngineConfig(model=str(directory), device="cpu", load_format="dummy", **options))
    return str(refused.value)


@pytest.mark.parametrize(
    ("size", "case", "words"),
    [
        (3, "gpt2", "does not divide the model's num_attention_heads of 4; use one of 1, 2, 4"),
        (2, "falcon, as its 7b", "does not divide the model's num_attention_heads of 71; use 1"),
        (
            8,
            "codegen",
            "does not divide the 4 blocks that the model's heads are stored in; use one of 1, 2, 4",
        ),
        (
            3,
            "falcon, as its 40b",
            "neither divides the model's 2 KV heads nor is a multiple of them; use one of 1, 2",
        ),
    ],
)
def test_families_with_splits_of_their_own(tmp_path: Path, size: int, case: str, words: str) -> None:
    heads = {"codegen": {"n_head": 8}, "falcon, as its 40b": {"num_attention_heads": 6, "hidden_size": 96}}
    config = NATIVE_CASES[case]().config | heads.get(case, {})
    assert words in refusal(tmp_path, config, tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "leaves a rank 24 of 48 inputs, and quantization='int8' scales 32 together; use 1"),
        (
            {"head_dim": 32, "intermediate_size": 96},
            "tensor_parallel_size=2 leaves a rank 48 of 96 inputs, and quantization='int8' scales 32 together; use 1",
        ),
        (
            {"head_dim": 32, "intermediate_size": 384, "num_key_value_heads": 12},
            "=8 does not divide the model's num_attention_heads of 12; use one of 1, 2, 3, 4, 6, 12",
        ),
    ],
)
def test_int8_is_cut_at_whole_groups(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    size = 8 if "=8" in words else 2
    assert words in refusal(tmp_path, LLAMA | changes, tensor_parallel_size=size, quantization="int8")


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (
            5,
            {},
            "tensor_parallel_size=5 does not divide the model's num_attention_heads of 12; use one of 1, 2, 4, 12",
        ),
        (2, {"intermediate_size": 95}, "does not divide the model's intermediate_size of 95"),
        (3, {}, "tensor_parallel_size=3 neither divides the model's 4 KV heads nor is a multiple of them"),
        (12, {"vocab_size": 11}, "is more than the model's vocab_size of 11"),
    ],
)
def test_numbers_that_do_not_divide(tmp_path: Path, size: int, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, LLAMA | changes, tensor_parallel_size=size)


def test_families_without_a_plan() -> None:
    with pytest.raises(ConfigError, match="has a plan to split mystery models; use 1"):
        planned_split(SimpleNamespace(model_type="mystery"))


@pytest.mark.slow
def test_every_registered_family_can_be_split() -> None:
    """Declared by the family, or planned by transformers."""
    for case in {**NATIVE_CASES, **REMOTE_CASES}.values():
        raw = case().config
        family = find_family(raw)
        split = family.split or planned_split(family.build_config(raw))
        assert INPUTS in split.layers.values(), family.name


def test_embeddings_tied_to_the_head_are_on_every_rank() -> None:
    """Some versions of transformers plan them too; the head is split separately."""
    plan = {"layers.*.mlp.up_proj": "colwise", "embed_tokens": "embedding_rowwise"}
    split = planned_split(SimpleNamespace(model_type="other", base_model_tp_plan=plan))
    assert split.layers == {"layers.*.mlp.up_proj": CHANNELS}


@pytest.mark.parametrize("style", ["colwise_gather_output", "moe_tp_experts"])
def test_plans_that_ask_for_more_than_rows_and_columns(style: str) -> None:
    """Families whose layers hold several projections declare a separate split."""
    config = SimpleNamespace(model_type="other", base_model_tp_plan={"layers.*.mlp.router": style})
    with pytest.raises(ConfigError, match=f"the tensor parallel plan of other models asks for '{style}'"):
        planned_split(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        (
            {"tensor_parallel_size": 2, "batch_invariant": True},
            "batch_invariant=True with tensor_parallel_size=2",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="anything", **options)


def test_a_model_that_is_not_there_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="echo has nothing to split"):
        Engine.from_config(EngineConfig(model="echo", tensor_parallel_size=2))


def test_int8_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"head_dim": 32, "intermediate_size": 128}))
    config = EngineConfig(
        model=str(tmp_path), device="cuda", load_format="dummy", quantization="int8", tensor_parallel_size=2
    )
    with pytest.raises(ConfigError, match="a scale spans a token's activations, of which a rank sees a part"):
        Engine.from_config(config)


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="takes as many GPUs; torch finds 1"):
        Engine.from_config(EngineConfig(model=str(tmp_path), device="cuda", tensor_parallel_size=2))


@pytest.mark.slow
def test_a_rank_that_can_not_load_its_share_says_why(tmp_path: Path) -> None:
    """Both ranks read the same file; rank 0 comes first and ends the other."""
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=r"can't load the weights in .*model\.safetensors"):
        Engine.from_config(
            EngineConfig(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2)
        )


class TestShares:
    @pytest.mark.parametrize(("count", "size"), [(61, 4), (8, 4), (4, 4), (7, 3), (1000, 7)])
    def test_together_they_are_everything_once(self, count: int, size: int) -> None:
        parts = [range(count)[Share(rank, size).of(count)] for rank in range(size)]
        assert [index for part in parts for index in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    def test_ranks_beyond_the_kv_heads_have_the_head_of_their_query_heads(self) -> None:
        num_heads, num_kv_heads, size = 16, 4, 8
        for rank in range(size):
            heads = range(num_heads)[Share(rank, size).of(num_heads)]
            (kv_head,) = range(num_kv_heads)[Share(rank, size).of_kv_heads(num_kv_heads)]
            assert {head // (num_heads // num_kv_heads) for head in heads} == {kv_head}

    def test_what_ranks_hold_adds_up_to_the_product(self) -> None:
        split = TensorSplit(layers={"layers.*.o": INPUTS, "layers.*.k_proj": KV_HEADS})
        plan_of = [ShardingPlan(split, Share(rank, 3), 3, 3) for rank in range(3)]
        weight, bias, x = torch.randn(9, 12), torch.randn(9), torch.randn(5, 12)
        tensors = {"model.layers.10.o.weight": weight, "model.layers.10.o.bias": bias,
                   "model.layers.10.k_proj.weight": weight, "model.layers.10.k_proj.bias": bias,
                   "model.layers.10.other.weight": weight}  # fmt: skip
        cuts = [plan.cut(dict(tensors)) for plan in plan_of]
        total = sum(
            x[:, 4 * rank : 4 * rank + 4] @ cut["model.layers.10.o.weight"].T for rank, cut in enumerate(cuts)
        )
        torch.testing.assert_close(total, x @ weight.T, rtol=1e-5, atol=1e-5)
        for name in ("weight", "bias"):
            parts = [cut[f"model.layers.10.k_proj.{name}"] for cut in cuts]
            torch.testing.assert_close(torch.cat(parts), tensors[f"model.layers.10.k_proj.{name}"])
        assert all(cut["model.layers.10.o.bias"] is bias for cut in cuts)
        assert all(cut["model.layers.10.other.weight"] is weight for cut in cuts)

    @pytest.mark.parametrize(("num_kv_heads", "size"), [(8, 2), (4, 2), (2, 4), (1, 2), (1, 8)])
    def test_projections_that_lie_together_by_kv_head(self, num_kv_heads: int, size: int) -> None:
        """As BLOOM, Falcon and GPT BigCode store them."""
        num_heads, head_dim, hidden = 8, 3, 5
        queries = torch.randn(num_kv_heads, num_heads // num_kv_heads, head_dim, hidden)
        keys, values = torch.randn(2, num_kv_heads, 1, head_dim, hidden)
        weight = torch.cat([queries, keys, values], dim=1).flatten(0, 2)
        split = TensorSplit(layers={"h.*.qkv": QKV_BY_KV_HEAD})
        for rank in range(size):
            share = Share(rank, size)
            plan = ShardingPlan(split, share, num_heads, num_kv_heads)
            (cut,) = plan.cut({"h.0.qkv.weight": weight}).values()
            own, kv_heads = share.of(num_heads), share.of_kv_heads(num_kv_heads)
            found = cut.view(plan.num_kv_heads, -1, head_dim, hidden)
            assert torch.equal(found[:, :-2].flatten(0, 1), queries.flatten(0, 1)[own])
            assert torch.equal(found[:, -2], keys[kv_heads, 0])
            assert torch.equal(found[:, -1], values[kv_heads, 0])

    @pytest.mark.parametrize(("num_kv_heads", "size"), [(4, 2), (2, 4), (1, 2)])
    def test_projections_that_are_merged_are_cut_one_by_one(self, num_kv_heads: int, size: int) -> None:
        """A rank of Phi 3 has its queries, its keys, its values; its gate and the same channels of up."""
        num_heads, head_dim, hidden = 8, 3, 5
        split = TensorSplit(
            layers={"layers.*.self_attn.qkv_proj": MERGED_QKV, "layers.*.mlp.gate_up_proj": MERGED_MLP}
        )
        queries = torch.randn(num_heads, head_dim, hidden)
        keys, values = torch.randn(2, num_kv_heads, head_dim, hidden)
        gate, up = torch.randn(2, 16, hidden)
        tensors = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat([queries, keys, values]).flatten(0, 1),
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat([gate, up]),
        }
        for rank in range(size):
            share = Share(rank, size)
            plan = ShardingPlan(split, share, num_heads, num_kv_heads)
            qkv, gate_up = plan.cut(dict(tensors)).values()
            heads, kv_heads = share.of(num_heads), share.of_kv_heads(num_kv_heads)
            expected = torch.cat([queries[heads], keys[kv_heads], values[kv_heads]]).flatten(0, 1)
            assert torch.equal(qkv, expected)
            assert torch.equal(gate_up, torch.cat([gate[share.of(16)], up[share.of(16)]]))
            assert (plan.num_heads, plan.num_kv_heads) == (len(queries[heads]), len(keys[kv_heads]))
