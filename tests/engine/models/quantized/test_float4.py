"""gpt-oss's experts, dequantized as transformers dequantizes them."""

from __future__ import annotations

import pytest
import torch

from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.quantized.float4 import Mxfp4
from pagemill.engine.models.quantized.reader import join_parts

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_as_transformers_has_them(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    blocks = torch.randint(0, 256, (3, 40, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 4), dtype=torch.uint8)
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    found = join_parts(tensors, Mxfp4({}), dtype)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert expected.shape == (3, 128, 40)
    for expert in range(3):
        weight = found[f"mlp.experts.down_proj.{expert}"]
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dense().t(), expected[expert])
