"""Startup of a quantized checkpoint: its log and memory, and the identity that a resumed job checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.models.loader import load_model
from pagemill.kernels.cpu.matmul import fp32
from tests.conftest import ROOT, run_python
from tests.engine.models.quantized.checkpoints import FORMATS, gptq, write_pair

MIB = 2**20
needs_own_kernel = pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512")


class RoundingBackend(CpuBackend):
    def quantized_activations(self) -> str:
        return "rounded"


def fingerprint(directory: Path, device: CpuBackend | None = None, **options: str) -> str:
    config = EngineConfig(model=str(directory), **options)  # type: ignore[arg-type]
    return load_model(config, device or CpuBackend()).fingerprint


def test_the_fingerprint_names_the_format_and_the_computation(tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path, gptq(sym=False))
    own = fingerprint(stored)
    assert own == fingerprint(stored)
    assert own != fingerprint(stored, RoundingBackend())
    assert own != fingerprint(stored, quantization="int8")
    assert fingerprint(plain) == fingerprint(plain, RoundingBackend())
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"  # other values of the same file
    (stored / "config.json").write_text(json.dumps(config))
    assert own != fingerprint(stored)


def test_settings_in_a_file_of_their_own_are_in_the_fingerprint(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, gptq(sym=False))
    config = json.loads((stored / "config.json").read_text())
    settings = config.pop("quantization_config")
    (stored / "config.json").write_text(json.dumps(config))
    found = set()
    for version in ("gptq", "gptq_v2"):
        (stored / "quantize_config.json").write_text(json.dumps(settings | {"checkpoint_format": version}))
        found.add(fingerprint(stored))
    assert len(found) == 2


def test_an_outline_needs_no_weights(tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path, FORMATS["awq"][0])
    (stored / "model.safetensors").unlink()
    outlines = [
        describe_model(EngineConfig(model=str(path), skip_tokenizer_init=True)) for path in (stored, plain)
    ]
    assert outlines[0] == outlines[1]


_PEAK = """
import resource, sys, threading
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.models.loader import load_model

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024

highest, is_over = 0, threading.Event()
def watch():
    global highest
    while not is_over.wait(0.002):
        highest = max(highest, anonymous())

from pagemill.kernels.cpu.matmul import grouped_packing
device, before = CpuBackend(), anonymous()
thread = threading.Thread(target=watch)
thread.start()
model = load_model(EngineConfig(model=sys.argv[1]), device)
device.fuse(model.module, model.family.decoder, model.dtype, LinearOptions(None, False))
is_over.set()
thread.join()
print(before, max(highest, anonymous()), model.weight_bytes())
"""


@pytest.mark.slow
@needs_own_kernel
def test_layers_are_converted_one_at_a_time(tmp_path: Path) -> None:
    """The peak in addition to the mapped file: the kept weights, and a few bytes per weight of one layer."""
    stored, _ = write_pair(tmp_path, gptq())
    config = json.loads((stored / "config.json").read_text())
    hidden, intermediate, layers = 1024, 4096, 8
    config |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": 64,
               "num_attention_heads": 16, "num_key_value_heads": 16}  # fmt: skip
    config["quantization_config"]["group_size"] = 128
    (stored / "config.json").write_text(json.dumps(config))
    sizes = {"self_attn.q": (hidden, hidden), "self_attn.k": (hidden, hidden), "self_attn.v": (hidden, hidden),
             "self_attn.o": (hidden, hidden), "mlp.gate": (hidden, intermediate), "mlp.up": (hidden, intermediate),
             "mlp.down": (intermediate, hidden)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.randn(61, hidden), "lm_head.weight": torch.randn(61, hidden),
               "model.norm.weight": torch.ones(hidden)}  # fmt: skip
    for layer in range(layers):
        for name, (inputs, outputs) in sizes.items():
            stem = f"model.layers.{layer}.{name}_proj."
            tensors[stem + "qweight"] = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs)).int()
            tensors[stem + "qzeros"] = torch.full((inputs // 128, outputs // 8), 0x77777777).int()
            tensors[stem + "scales"] = torch.rand(inputs // 128, outputs).half()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, stored / "model.safetensors")
    run = run_python("-c", _PEAK, str(stored), cwd=ROOT, check=True)
    before, peak, kept = map(int, run.stdout.split())
    largest = 2 * hidden * intermediate  # gate and up as one
    weights = layers * sum(inputs * outputs for inputs, outputs in sizes.values())
    assert kept < 0.8 * weights + 4 * MIB
    assert peak - before < kept + 8 * largest + 64 * MIB
