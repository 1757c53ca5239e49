"""Plans: compared with the engine's own arithmetic, a measured load, and necessary conditions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from pagemill.engine.config import EngineConfig
from pagemill.engine.figures import ModelFigures, read_figures
from pagemill.sizing.cards import CARDS, cpu
from pagemill.sizing.plan import Load, Plan, PlanError, WorkerLimits, make_plan
from pagemill.sizing.redis_cost import SCRIPT_S, job_bytes, scripts_per_job

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
LOAD = Load(prompt_tokens=500, output_tokens=100, jobs_per_s=20.0, waiting_jobs=1000, kept_jobs=10_000)
LIMITS = WorkerLimits(max_num_seqs=256)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-8b")
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    return directory


def figures(directory: Path, **settings: object) -> ModelFigures:
    return read_figures(EngineConfig(model=str(directory), **settings), on_card=True)  # type: ignore[arg-type]


def test_a_published_model_is_counted_from_its_configuration_alone(llama_8b: Path) -> None:
    found = figures(llama_8b)
    assert found.parameters == 8_030_261_248
    assert found.weight_bytes == 2 * found.parameters
    assert found.block_bytes == 2 * 32 * 8 * 128 * 16 * 2
    assert (found.dtype, found.kv_dtype, found.weight_bits) == ("bfloat16", "bfloat16", 16.0)
    assert found.read_parameters == found.parameters - 128256 * 4096, "embeddings are looked up"
    assert figures(llama_8b / "config.json").parameters == found.parameters
    halved = figures(llama_8b, kv_cache_dtype="int8")
    assert halved.block_bytes == 2 * 32 * 8 * (128 + 4) * 16, "int8 has a scale per token and head"


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.5),
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8.0),
    ],
)
def test_a_quantized_checkpoint_takes_its_bits(
    scheme: dict[str, object], bits: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": scheme}))
    found = figures(tmp_path)
    assert found.weight_bits == bits
    assert found.weight_bytes < 0.4 * 4 * found.parameters


def plan(model: ModelFigures, card: str = "h100", load: Load = LOAD, limits: WorkerLimits = LIMITS) -> Plan:
    return make_plan(model, CARDS[card], load, limits)


def test_a_plan_adds_up(llama_8b: Path) -> None:
    model = figures(llama_8b)
    made = plan(model)
    assert made.kv_blocks == made.kv_bytes // model.block_bytes
    assert made.kv_bytes + model.weight_bytes < CARDS["h100"].memory_bytes * 0.9
    assert made.blocks_per_job == -(-599 // 16)
    assert made.rows == 256
    assert (
        made.workers * made.jobs_per_s * 0.8 >= LOAD.jobs_per_s > (made.workers - 1) * made.jobs_per_s * 0.8
    )
    assert made.busy_rows * made.workers == pytest.approx(LOAD.jobs_per_s * made.service_s), "Little's law"
    # A token needs at least its arithmetic, and a step the time to read the weights.
    flops = 2 * (model.layer_parameters + model.head_parameters)
    assert made.output_tokens_per_s < 989e12 / flops
    assert made.step_s > model.weight_bytes / 3.35e12


def test_what_helps_helps(llama_8b: Path) -> None:
    model = figures(llama_8b)
    made = plan(model)
    assert plan(model, "h200").jobs_per_s > made.jobs_per_s > plan(model, "a100").jobs_per_s
    assert plan(model, load=replace(LOAD, shared_tokens=400)).jobs_per_s > made.jobs_per_s
    assert plan(model, load=replace(LOAD, output_tokens=200)).jobs_per_s < made.jobs_per_s
    assert plan(model, load=replace(LOAD, jobs_per_s=2000.0)).workers > made.workers
    tight = plan(model, "l4")
    assert tight.rows_limited_by == "KV blocks"
    assert tight.rows * tight.blocks_per_job < tight.kv_blocks
    assert plan(model, load=replace(LOAD, kept_jobs=20_000)).redis_bytes > made.redis_bytes


def test_what_does_not_fit_is_told(llama_8b: Path) -> None:
    model = figures(llama_8b, dtype="float32")
    with pytest.raises(
        PlanError, match=r"l4 has 0.00 GiB for KV blocks next to 29.9 GiB of weights.*larger device"
    ):
        plan(model, "l4")
    with pytest.raises(PlanError, match="takes 131072"):
        plan(model, load=replace(LOAD, prompt_tokens=131_000, output_tokens=1000))
    with pytest.raises(PlanError, match="--shared-tokens"):
        plan(model, load=replace(LOAD, shared_tokens=500))


def test_experts_cost_their_memory_and_a_part_of_their_work(tmp_path: Path) -> None:
    sparse = LLAMA_8B | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    found = figures(tmp_path)
    experts = 2 * 8 * 3 * 4096 * 14336
    assert found.read_parameters - found.layer_parameters - found.head_parameters == experts * 3 // 4


def test_a_measured_load_agrees() -> None:
    """Measured on 2026-11-21 (benchmarks/README.md): jobs/s, scripts/s, and cores of the server."""
    stages = [(238.3, 1093.3, 0.248), (477.5, 2179.1, 0.438), (987.5, 4508.8, 0.825)]
    per_job = scripts_per_job(2.0, 64, 16, checkpoint_tokens=None)
    for jobs_per_s, scripts_per_s, server_cores in stages:
        assert per_job == pytest.approx(scripts_per_s / jobs_per_s, rel=0.1)
        assert scripts_per_s * SCRIPT_S == pytest.approx(server_cores, rel=0.25)
    assert 1 / (per_job * SCRIPT_S) == pytest.approx(stages[-1][0], rel=0.25), "about 1,000 jobs/s per server"
    sizes = job_bytes(200 // 4, 64, 4.0)
    assert sizes.waiting == pytest.approx(769.3, rel=0.2)
    assert sizes.ended == pytest.approx(1611.4, rel=0.2)


def test_a_cpu_is_what_it_was_measured_to_be() -> None:
    slow, fast = (cpu(8 << 30, speed * 1e9, speed * 1e10, "given") for speed in (10, 20))
    assert fast.flops_of("float32") == 2 * slow.flops_of("float32") == 2 * 0.7 * 1e11
    assert slow.flops_of("bfloat16") == slow.flops_of("float32"), "products are fp32's"


@pytest.mark.slow
def test_recurrent_states_limit_the_rows(tmp_path: Path) -> None:
    """24 layers of 32 heads, each with a matrix in float32, and a convolution's last inputs."""
    CONFIG_MAPPING["qwen3_5_text"]().save_pretrained(tmp_path)
    found = figures(tmp_path)
    assert found.state_bytes == 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    assert found.block_bytes == 2 * 8 * 4 * 256 * 16 * 2, "8 of its 32 layers attend"
    memory = 100 * found.state_bytes
    plan = make_plan(found, CARDS["h100"], LOAD, WorkerLimits(max_num_seqs=256, kv_bytes=memory))
    assert (plan.rows, plan.rows_limited_by) == (44, "recurrent states")
    assert plan.cached_states == 12
    assert plan.kv_blocks == 44 * found.state_bytes // found.block_bytes
    with pytest.raises(PlanError, match=r"recurrent state of 49\.50 MiB"):
        make_plan(found, CARDS["h100"], LOAD, WorkerLimits(max_num_seqs=256, kv_bytes=found.state_bytes))


def test_a_model_without_attention_needs_no_blocks(tmp_path: Path) -> None:
    CONFIG_MAPPING["mamba"]().save_pretrained(tmp_path)
    found = figures(tmp_path)
    assert found.block_bytes == 0
    memory = 100 * found.state_bytes
    plan = make_plan(found, CARDS["h100"], LOAD, WorkerLimits(max_num_seqs=256, kv_bytes=memory))
    assert (plan.rows, plan.rows_limited_by, plan.cached_states) == (88, "recurrent states", 12)
