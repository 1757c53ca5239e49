"""Labels' probabilities and log-probabilities of prompts under an adapter: those of PEFT's merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.tokenizer import ByteTokenizer
from tests.engine.adapters.trained import Trained, merged_model, save_adapter
from tests.engine.test_labels import LABELS, PROMPT, asking, check, saved

__all__ = ["saved"]


@pytest.mark.parametrize("options", [{}, {"adapter_slots": 1, "max_num_seqs": 2}], ids=str)
def test_label_probs_and_prompt_logprobs(
    saved: tuple[Path, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    base, _ = saved
    folders = {
        name: save_adapter(base, tmp_path / name, Trained(seed=seed)) for seed, name in enumerate("ab")
    }
    llm = LLM(
        str(base),
        adapters=tuple(f"{name}={path}" for name, path in folders.items()),
        num_kv_blocks=128,
        **options,
    )
    names = [None, *folders]
    models = {name: merged_model(base, folders.get(name or "")) for name in names}
    labeled = llm.generate([PROMPT] * 3, asking(LABELS), adapter=names, use_tqdm=False)
    for name, result in zip(names, labeled, strict=True):
        check(models[name], result.outputs[0], PROMPT, LABELS, "product")
    assert len({tuple(result.outputs[0].label_probs or ()) for result in labeled}) == 3

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scored = llm.generate([PROMPT] * 3, params, adapter=names, use_tqdm=False)
    ids = torch.tensor([ByteTokenizer().encode(PROMPT)])
    for name, result in zip(names, scored, strict=True):
        with torch.no_grad():
            wanted = models[name](ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found = [entry.logprob for entry in (result.prompt_logprobs or [])[1:] if entry is not None]
        assert found == pytest.approx(wanted.tolist(), abs=1e-4)
