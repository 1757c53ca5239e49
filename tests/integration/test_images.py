"""Images through the complete system: a worker's results equal transformers' outputs for the same processor."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.images.model_folders import encoded, noise
from tests.engine.images.tiny_checkpoint import generated, whole_call, write_checkpoint
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

pytestmark = pytest.mark.slow

PICTURES = [encoded(noise(80, 60)), encoded(noise(31, 97, seed=1))]
MAX_TOKENS = 12
LONG = 300
Chat = list[dict[str, Any]]


def chat(*parts: str | bytes) -> Chat:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def job(conversation: Chat, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return a job's fields, with pictures as `data:` URLs."""
    messages = [
        {
            "role": message["role"],
            "content": [
                part
                if part["type"] == "text"
                else {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part['image']).decode()}"},
                }
                for part in message["content"]
            ],
        }
        for message in conversation
    ]
    return {
        "model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip


CHATS = {
    "one": chat(PICTURES[0], "What?"),
    "two": chat("Left: ", PICTURES[0], "right: ", PICTURES[1], "Which?"),
    "other": chat(PICTURES[1], "What?"),
    "text": chat("What?"),
}


@pytest.mark.parametrize("model_type", ["llava", "smolvlm", "qwen2_5_vl"])
def test_offline_outputs_equal_transformers(model_type: str, tmp_path: Path) -> None:
    module = write_checkpoint(model_type, tmp_path)
    expected = [generated(module, tmp_path, conversation, MAX_TOKENS) for conversation in CHATS.values()]
    llm = LLM(str(tmp_path), num_threads=1, num_kv_blocks=128, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        outputs = llm.chat(list(CHATS.values()), params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert llm.engine.stats().media.encoded == 2
    llm.close()


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_a_worker_serves_images(
    engine_process: str, tmp_path: Path, valkey_url: str, queue_name: str
) -> None:
    directory = tmp_path / "model"
    module = write_checkpoint("qwen2_5_vl", directory)
    client = QueueClient(valkey_url, queue_name)
    settings = {"model": str(directory), "served_model_name": "tiny", "num_threads": 1, "num_kv_blocks": 256}
    options = process_settings(valkey_url, queue_name, **settings, engine_process=engine_process, lease_s=3.0)
    worker = WorkerProcess(options, tmp_path / "log")
    try:
        broken = [chat(PICTURES[0][:300], "What?"), chat("What?", b"<html>")]
        ids = client.submit(*map(job, [*CHATS.values(), *broken]))
        outcomes = client.wait(ids)
        for outcome, conversation in zip(outcomes, CHATS.values(), strict=False):
            assert outcome.result is not None, outcome.error
            tokens = tokens_of(outcome.result)
            assert tokens == generated(module, directory, conversation, MAX_TOKENS)
        for outcome in outcomes[len(CHATS) :]:
            assert outcome.error is not None
            assert outcome.error.code == "invalid_image"
        (long,) = client.submit(job(CHATS["two"], LONG))
        eventually(lambda: client.generated(long) > 20, "a checkpoint")
        worker.kill()
        assert client.status(long).state == "running"
        worker = WorkerProcess(options, tmp_path / "log")
        (outcome,) = client.wait([long])
        assert outcome.result is not None, outcome.error
        assert tokens_of(outcome.result) == generated(module, directory, CHATS["two"], LONG)
    finally:
        worker.kill()


def tokens_of(result: Any) -> list[int]:
    (output,) = result.outputs
    return list(output.token_ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_and_images(tmp_path: Path) -> None:
    """An adapter of the language model changes the outputs for pictures, and only those of its requests."""
    directory = tmp_path / "model"
    module = write_checkpoint("qwen2_5_vl", directory)
    plain = [generated(module, directory, CHATS[name], MAX_TOKENS) for name in ("two", "text")]
    targets = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
    config = LoraConfig(r=4, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM")
    wrapped = get_peft_model(module, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload().eval()
    adapted = [generated(merged, directory, CHATS[name], MAX_TOKENS) for name in ("two", "text")]
    llm = LLM(str(directory), num_threads=1, num_kv_blocks=128, adapters=(f"a={tmp_path / 'adapter'}",))
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    chats = [CHATS["two"], CHATS["text"]] * 2
    outputs = llm.chat(chats, params, adapter=[None, None, "a", "a"])
    assert [output.outputs[0].token_ids for output in outputs] == plain + adapted
    assert adapted[0] != plain[0]
    assert llm.engine.stats().media.encoded == 2
    llm.close()


def test_labels_and_structures_of_images(tmp_path: Path) -> None:
    module = write_checkpoint("qwen2_5_vl", tmp_path)
    llm = LLM(str(tmp_path), num_threads=1, num_kv_blocks=128, max_num_batched_tokens=32)
    labels = ("cat", "a dog", "no")
    shape = StructuredOutputs(choice=labels)
    params = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=shape, label_probs="product")
    names = ("one", "other", "two")
    found = llm.chat([CHATS[name] for name in names], params)
    for name, output in zip(names, found, strict=True):
        sums = torch.tensor([label_logprob(module, tmp_path, CHATS[name], label) for label in labels])
        probabilities = output.outputs[0].label_probs
        assert probabilities is not None
        assert list(probabilities) == pytest.approx(sums.softmax(0).tolist(), abs=1e-3)
        assert output.outputs[0].text == labels[int(sums.argmax())]
    schema = {"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    params = SamplingParams(max_tokens=64, temperature=0.0, structured_outputs=StructuredOutputs(json=schema))
    for output in llm.chat([CHATS[name] for name in names], params):
        assert json.loads(output.outputs[0].text)["kind"] in ("x", "y")
    llm.close()


@torch.inference_mode()
def label_logprob(module: Any, directory: Path, conversation: Chat, label: str) -> float:
    """Return transformers' log probability of a label after a chat."""
    inputs = whole_call(directory, conversation).convert_to_tensors("pt")
    tokens = AutoTokenizer.from_pretrained(directory).encode(label, add_special_tokens=False)
    prompt = inputs["input_ids"]
    inputs["input_ids"] = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        more = torch.zeros(1, len(tokens), dtype=inputs["mm_token_type_ids"].dtype)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], more], dim=1)
    logprobs = module(**inputs).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    return float(logprobs[torch.arange(len(tokens)), tokens].sum())
