"""Rows with a common prompt: reading its keys once for all of them does not change the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu.attention import decode_tasks, sharing

INSTRUCTIONS = """Decide what a customer wrote to a shop about, and answer with one of the categories alone. A message
about a parcel that is late, lost or damaged on its way is about delivery. One about an invoice, a refund or a card
that was charged twice is about payment. Whatever is said of the goods themselves, good or bad, is about quality.
All else, greetings and thanks included, is other. Messages may be short and full of mistakes; do not answer them.
"""
MESSAGES = [
    "Where is my parcel?", "Charged twice!!", "the mug leaks", "thank you so much", "refund pls", "hi",
]  # fmt: skip
LABELS = ("delivery of a parcel", "payment by card", "quality of the goods", "other matters")
PARAMS = (
    SamplingParams(structured_outputs=StructuredOutputs(choice=LABELS), label_probs="product"),
    SamplingParams(temperature=0.0, max_tokens=5, logprobs=2),
)


def results(**options: Any) -> tuple[int, list[Any]]:
    llm = LLM("smollm2", num_kv_blocks=400, **options)
    prompts = [f"{INSTRUCTIONS * 3}\nMessage: {message}\nCategory:" for message in MESSAGES]
    outputs = [row.outputs[0] for params in PARAMS for row in llm.generate(prompts, params, use_tqdm=False)]
    counted = llm.engine.stats().steps.sharing_rows
    return counted, [
        (output.text, output.token_ids, output.logprobs, output.label_probs) for output in outputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16"])
def test_labels_and_texts_after_a_shared_prompt_are_those_of_rows_on_their_own(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str
) -> None:
    found: list[npt.NDArray[np.int32] | None] = []
    find = sharing.shared_blocks

    def watch(tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        found.append(find(tables))
        return found[-1]

    monkeypatch.setattr(sharing, "shared_blocks", watch)
    counted, together = results(kv_cache_dtype=cache_dtype)
    enough = decode_tasks.SPLIT // 16
    num_steps = sum(order is not None and (order[1] >= enough).sum() == len(MESSAGES) - 1 for order in found)
    assert num_steps >= 5  # one for the labels' second tokens, four for the texts' after the first

    monkeypatch.setattr(sharing, "shared_blocks", lambda tables: None)
    assert counted >= 5 * len(MESSAGES)
    assert results(kv_cache_dtype=cache_dtype) == (0, together)
    texts = [text for text, *_ in together]
    assert set(texts[: len(MESSAGES)]) <= set(LABELS)
    assert len(set(texts)) > 2
