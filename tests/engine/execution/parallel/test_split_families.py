"""Every family over several processes: the tokens of one process, from parts of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.layers.share import Columns, Rows, ShardingPlan, Share, TensorSplit, planned_split
from pagemill.engine.models.families.family import Family
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.models.split_sizes import SplitSizes
from tests.engine.models.families.native_cases import NATIVE_CASES
from tests.engine.models.families.remote_cases import REMOTE_CASES
from tests.engine.models.families.tiny import PROMPTS, TinyCheckpoint
from tests.engine.models.test_families import SMALL_STEPS, make_llm, run

CASES = NATIVE_CASES | REMOTE_CASES
QUICK = ("falcon, as its 40b", 2), ("gpt2", 2)
"""One whose projections are stored together by KV head, and one with transposed weights."""


def described(checkpoint: TinyCheckpoint) -> tuple[Family, Any, TensorSplit]:
    family = find_family(checkpoint.config)
    model_config = family.build_config(checkpoint.config)
    return family, model_config, family.split or planned_split(model_config)


def can_have(checkpoint: TinyCheckpoint, size: int) -> bool:
    """Return True if the model can be split over so many ranks."""
    family, model_config, split = described(checkpoint)
    return (
        SplitSizes.from_config(model_config, split, family.num_kv_heads(model_config)).obstacle(size) is None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, size, marks=() if (case, size) in QUICK else pytest.mark.slow)
        for case in CASES
        for size in (2, 3, 4)
    ],
)
def test_output_equals_that_of_one_process(case: str, size: int, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    if not can_have(checkpoint, size):
        pytest.skip("its heads don't divide")
    checkpoint.write(tmp_path, num_shards=3)
    expected = [checkpoint.complete(prompt) for prompt in PROMPTS]
    llm = make_llm(tmp_path, checkpoint, **SMALL_STEPS, tensor_parallel_size=size, device="cpu")
    try:
        assert run(llm) == expected
        assert run(llm) == expected, "with the prompts in the prefix cache"
        llm.engine.check_integrity()
    finally:
        llm.close()


@pytest.mark.parametrize("case", CASES)
def test_each_rank_takes_its_part_of_the_files(case: str) -> None:
    """Not split: embeddings, norms and biases that are added once; keys and values if there are too few heads."""
    checkpoint = CASES[case]()
    family, model_config, split = described(checkpoint)
    tensors: Any = family.convert_tensors(dict(checkpoint.tensors), model_config)
    num_heads, num_kv_heads = model_config.num_attention_heads, family.num_kv_heads(model_config)
    for size in (size for size in (2, 3, 4) if can_have(checkpoint, size)):
        plans = [ShardingPlan(split, Share(rank, size), num_heads, num_kv_heads) for rank in range(size)]
        ranks = [plan.cut(dict(tensors)) for plan in plans]
        cut_weights = 0
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            layer, held = plans[0].layer(module), sum(cut[name].shape.numel() for cut in ranks)  # type: ignore[union-attr]
            if layer is None or (isinstance(layer, Rows) and kind == "bias"):
                assert all(cut[name] is tensor for cut in ranks), name
                continue
            cut_weights += kind == "weight"
            has_too_few = isinstance(layer, Columns) and "kv_heads" in layer.sections and num_kv_heads < size
            assert tensor.numel() <= held <= (size if has_too_few else 1) * tensor.numel(), name
        assert cut_weights >= 4 * model_config.num_hidden_layers, "attention and MLP of every layer"
