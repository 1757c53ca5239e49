"""Tries a `model_type`: tiny random models of it, written by transformers and served, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import SampleState
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.tiny import NUM_OUTPUT_TOKENS, PROMPTS, SMALLEST_MARGIN
from tests.engine.models.generic.tiny_configs import VARIANTS, tiny_config

_MOST_PARAMETERS = 30_000_000
_SEEDS = range(8)
# Chunks, half-full blocks, changing rows.
_SMALL_STEPS: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 5}
# Two of the longest sequences do not fit: some are preempted. With windows they hold less than the maximum.
_FEW_BLOCKS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16}
_FEW_COLUMNS = 12
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


class NoMargin(Exception):
    """Every seed gave a reference that rounding could change."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a type."""

    architecture: str
    refusal: str | None
    """None: exact in every variant."""
    has_experts: bool = False


def try_type(model_type: str, directory: Path, variants: Sequence[int] = VARIANTS) -> Outcome:
    """Serve a type's variants. Raises `AssertionError` if one is served and differs from transformers."""
    architecture = causal_lm(model_type).__name__
    module = None
    for variant in variants:
        try:
            module = check_variant(model_type, variant, directory / f"{model_type}-{variant}")
        except ModelLoadError as error:
            return Outcome(architecture, _reason(error))
    assert module is not None
    kinds = {type(part).__name__.casefold() for part in module.modules()}
    return Outcome(architecture, None, any("experts" in kind or "moe" in kind for kind in kinds))


def _reason(error: ModelLoadError) -> str:
    """Return the reason of a rejection with its name, without numbers."""
    _, is_named, reason = str(error).partition(" is not supported: ")
    assert is_named, f"not refused by name: {error}"
    return reason.partition("; ")[0].partition(" by ")[0]


def causal_lm(model_type: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def check_variant(model_type: str, variant: int, directory: Path) -> Any:
    """Serve a tiny model of this type: whole, in chunks, cached, preempted, resumed. Returns transformers' module."""
    directory.mkdir(parents=True)
    fields = tiny_config(model_type, variant)
    (directory / "config.json").write_text(json.dumps(fields | {"model_type": model_type}))
    LLM(str(directory), load_format="dummy", num_threads=1, num_kv_blocks=8)  # a rejection needs no weights
    module, expected = write_checkpoint(build(model_type, fields), directory)
    check_served(directory, module, expected)
    return module


def check_served(directory: Path, module: Any, expected: list[list[int]]) -> None:
    """Check the outputs of a model on disk, and their log-probabilities by transformers' module."""
    llm = LLM(str(directory), num_threads=1, **_SMALL_STEPS)
    assert run(llm) == expected, "in chunks"
    assert run(llm) == expected, "from the prefix cache"
    llm.engine.check_integrity()
    check_logprobs(llm, module, expected)
    assert resumed(llm, PROMPTS[-1], expected[-1]) == expected[-1], "resumed"
    windows = [window for window, _ in llm.engine.stats().kv.groups]
    num_kv_blocks = 1 + _FEW_COLUMNS * len(windows)
    llm = LLM(
        str(directory),
        num_threads=1,
        enable_prefix_caching=False,
        num_kv_blocks=num_kv_blocks,
        **_FEW_BLOCKS,
    )
    assert run(llm) == expected, "preempted"
    stats = llm.engine.stats()
    assert stats.scheduler.preemptions > 0 or windows != [None]
    assert bool(stats.kv.window_frees) == (windows != [None])


def build(model_type: str, fields: dict[str, Any]) -> Any:
    model_class, config = causal_lm(model_type), CONFIG_MAPPING[model_type].from_dict(dict(fields))
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class._from_config(config).parameters())
    assert count < _MOST_PARAMETERS, f"{count} parameters: its configuration needs an exception"
    return model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def write_checkpoint(module: Any, directory: Path) -> tuple[Any, list[list[int]]]:
    """Save random weights whose greedy outputs do not depend on rounding.

    Returns:
        The module that transformers itself loads from there, and its outputs.
    """
    for seed in _SEEDS:
        randomise(module, seed)
        module.save_pretrained(directory)
        loaded = (
            type(module).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        )
        outputs = [complete(loaded, prompt) for prompt in PROMPTS]
        if _counts_padding(loaded) and any(
            loaded.config.pad_token_id in (output or ()) for output in outputs
        ):
            continue
        if None not in outputs and len({tuple(output or ()) for output in outputs}) > 1:
            return loaded, [output for output in outputs if output is not None]
    raise NoMargin


def _counts_padding(module: Any) -> bool:
    """Return True if positions depend on padding tokens, which Pagemill's texts do not have."""
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules())


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Draw wide weights, as those of a new model would leave the best tokens almost tied; norms are left near 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_gain = parameter.ndim == 1 and name.endswith("weight")
            if is_gain:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.ndim > 1 or name.endswith("bias"):
                parameter.normal_(std=0.2)


@torch.inference_mode()
def complete(module: Any, prompt: list[int]) -> list[int] | None:
    """Return transformers' greedy output, recomputed completely for every token; None if one is a near tie."""
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT_TOKENS):
        best = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        if not float(best.values[0] - best.values[1]) > SMALLEST_MARGIN:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def run(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, _GREEDY, use_tqdm=False)]


@torch.inference_mode()
def check_logprobs(llm: LLM, module: Any, expected: list[list[int]]) -> None:
    params = replace(_GREEDY, logprobs=1)
    for result, prompt, output in zip(
        llm.generate(PROMPTS, params, use_tqdm=False), PROMPTS, expected, strict=True
    ):
        logits = module(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        wanted = logits.log_softmax(dim=-1)[torch.arange(len(output)), output]
        logprobs = result.outputs[0].logprobs
        assert logprobs is not None
        found = torch.tensor([entry.logprob for entry in logprobs])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def resumed(llm: LLM, prompt: list[int], output: list[int]) -> list[int]:
    """Return the output of a request that resumes after its first half."""
    half = output[: len(output) // 2]
    tokens, params = llm.engine.input_processor.process(prompt_token_ids=prompt, params=_GREEDY)
    llm.engine.add_request("resumed", tokens, params, resume=[SampleState(0, half, None)])
    while llm.engine.has_unfinished():
        for output_ in llm.engine.step():
            for delta in output_.deltas:
                half += delta.token_ids
    return half
