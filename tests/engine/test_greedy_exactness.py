"""Greedy output is token-identical to transformers' own `generate`, for any schedule."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.dense import dense_smollm2
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

NUM_OUTPUT_TOKENS = 16
TEXT = """The lighthouse keeper wrote down the weather every evening, even when nobody asked for it. On the first
page of the book stood a date and a name, both washed out by salt water. "Wind from the west, four," she wrote,
"two boats at anchor, 17 gulls, one seal." Below the tower a narrow path led to the village, where the baker knew
the tides better than the price of flour. In March the mail came late: a letter from Bergen, a parcel with three
books, and a bill for 42.50 kroner that had been paid in January. Why does fog move uphill? The schoolteacher had
an answer, but it took her the whole afternoon and a drawing on the blackboard. Naïve visitors asked for coffee
in the café; everybody else brought their own. def tide(hour): return amplitude * cos(2 * pi * hour / 12.42)
When the generator failed, the keeper lit the old lamp, trimmed its wick, and counted the seconds between flashes:
one, two, three, four, five. A ship far out turned slowly to the north, as if it had read her mind."""

# (first token of the text, length): around the block size, around the budgets, with shared prefixes at 0 and 100.
SLICES = [
    (0, 1), (0, 2), (9, 3), (20, 5), (30, 7), (0, 8), (40, 9), (55, 15),
    (0, 16), (100, 17), (61, 18), (70, 23), (100, 31), (0, 32), (100, 33), (77, 40),
    (5, 47), (100, 48), (33, 49), (0, 64), (90, 80), (100, 100), (12, 128), (0, 150),
]  # fmt: skip


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    output: list[int]
    margins: list[float]
    """The best logit minus the second best, at every output position."""


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    """Return transformers' continuation of every prompt, each alone.

    One forward pass over a prompt and a proposed output checks whether the output is greedy at every
    position, in a twentieth of the time of `generate`. So `generate` writes every fourth reference, and any
    other whose proposal, by the engine's plainest configuration, is not confirmed.
    """
    directory = dense_smollm2()
    torch.set_num_threads(1)
    ids = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    prompts = [ids[start : start + length] for start, length in SLICES]
    assert [len(prompt) for prompt in prompts] == [length for _, length in SLICES]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS)
    proposals = make_llm(enable_prefix_caching=False).generate(prompts, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for number, (prompt, proposal) in enumerate(zip(prompts, proposals, strict=True)):
        confirmed = confirm(model, prompt, proposal.outputs[0].token_ids) if number % 4 else None
        found.append(confirmed or write(model, prompt))
    return found


@torch.inference_mode()
def confirm(model: Any, prompt: list[int], output: list[int]) -> Reference | None:
    """The proposed output, if every token of it is the best one after those before it, and its end is correct."""
    if len(output) != NUM_OUTPUT_TOKENS and output[-1] != model.generation_config.eos_token_id:
        return None
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    if best.indices[:, 0].tolist() != output:
        return None
    return Reference(prompt, output, (best.values[:, 0] - best.values[:, 1]).tolist())


def write(model: Any, prompt: list[int]) -> Reference:
    inputs = torch.tensor([prompt])
    result = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=NUM_OUTPUT_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    margins = []
    for logits in result.logits:
        best = logits[0].topk(2).values
        margins.append(float(best[0] - best[1]))
    return Reference(prompt, result.sequences[0, len(prompt) :].tolist(), margins)


def generate(llm: LLM, references: list[Reference]) -> int:
    """Complete the prompts and compare; returns the prompt tokens that came from the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS)
    results = llm.generate([reference.prompt for reference in references], params, use_tqdm=False)
    for reference, result in zip(references, results, strict=True):
        got = result.outputs[0].token_ids
        if got != reference.output:
            pairs = zip(got, reference.output, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(reference.output)))
            pytest.fail(
                f"prompt of {len(reference.prompt)} tokens: output differs at position {at}: {got} is not "
                f"{reference.output}; top-1/top-2 margin there {reference.margins[at : at + 1]}"
            )
    llm.engine.check_integrity()
    assert llm.engine.stats().kv.active_blocks == 0
    return sum(result.usage.cached_tokens for result in results)


def make_llm(**options: Any) -> LLM:
    # One thread: with several, test processes that share the cores slow each other down far more.
    settings = {"num_kv_blocks": 512, "max_model_len": 256, "max_num_seqs": 16, "num_threads": 1}
    return LLM("smollm2", **(settings | options))


# Pairwise over budget, threshold, prefix cache, depth and padding.
CONFIGURATIONS = [
    # budget, threshold, caching, overlapped, padded
    (1, 0, True, False, False),
    (1, 4, False, True, True),
    (7, 0, False, True, False),
    (7, 4, True, False, True),
    (64, 0, True, True, True),
    (64, 24, False, False, False),
    (512, 0, False, False, True),
]


@pytest.mark.parametrize(("budget", "threshold", "caching", "overlapped", "padded"), CONFIGURATIONS)
def test_schedule_does_not_change_the_output(
    references: list[Reference], budget: int, threshold: int, caching: bool, overlapped: bool, padded: bool
) -> None:
    check_schedule(references, budget, threshold, caching, overlapped, padded)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("budget", [1, 7, 64, 512])
def test_every_schedule_gives_the_same_output(references: list[Reference], budget: int) -> None:
    for threshold, caching, overlapped, padded in itertools.product((0, 4), *[(False, True)] * 3):
        check_schedule(references, budget, threshold, caching, overlapped, padded)


def check_schedule(
    references: list[Reference], budget: int, threshold: int, caching: bool, overlapped: bool, padded: bool
) -> None:
    llm = make_llm(
        max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, enable_prefix_caching=caching,
        async_scheduling=overlapped, pad_to_bucket=padded,
    )  # fmt: skip
    # One token per step computes every token of every prompt alone: fewer prompts are sufficient.
    chosen = {1: references[3:9:2], 7: references[:16:3]}.get(budget, references)
    cold = generate(llm, chosen)
    warm = generate(llm, chosen[-2:])
    assert bool(cold + warm) == caching or budget == 1


@pytest.mark.parametrize(("caching", "overlapped"), [(True, False), (False, True)])
def test_preemption_does_not_change_the_output(
    references: list[Reference], caching: bool, overlapped: bool
) -> None:
    llm = make_llm(
        num_kv_blocks=13,
        enable_prefix_caching=caching,
        async_scheduling=overlapped,
        max_num_batched_tokens=64,
    )
    generate(llm, references)
    assert llm.engine.stats().scheduler.preemptions > 0
