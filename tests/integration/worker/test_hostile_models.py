"""A worker whose model's template and tokenizer can hang: the jobs fail, its threads continue, other jobs run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import JobFailed
from tests.engine.models.families.native_cases import write_llama
from tests.worker.harness import PATIENCE_S, running_worker, worker_config

TEMPLATE = """{% set n = messages|length + 8 %}{% if messages[0].content == 'bomb' %}{{ n**(n**n) }}{% endif %}
{{ messages[0].content }}"""
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.slow
def test_jobs_that_a_template_or_a_tokenizer_does_not_end_fail_alone(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    directory = write_llama(tmp_path / "model")
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["?", "a", "b"])}, "?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    content = json.loads(tokenizer.to_str())
    splits = {"type": "Sequence", "pretokenizers": [BACKTRACKING, content["pre_tokenizer"]]}
    (directory / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": splits}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    )
    config = worker_config(
        valkey_url, queue_name, model=str(directory), num_kv_blocks=64, num_threads=1, engine_process="off"
    )
    options = {"max_tokens": 4, "ignore_eos": True}
    with (
        running_worker(config) as worker,
        Producer(valkey_url, queue=queue_name, model=worker.engine.engine.served_models[0]) as producer,
    ):
        bomb = producer.submit(messages=[{"role": "user", "content": "bomb"}], **options)
        regex = producer.submit(prompt="q" * 40 + "!", **options)
        chat = producer.submit(messages=[{"role": "user", "content": "a b"}], **options)
        plain = producer.submit(prompt="a b", **options)
        with pytest.raises(JobFailed, match="the chat template takes more than") as failed:
            bomb.result(timeout=PATIENCE_S)
        assert failed.value.code == "invalid_job"
        with pytest.raises(JobFailed, match="the tokenizer rejects the text: PanicException") as failed:
            regex.result(timeout=PATIENCE_S)
        assert failed.value.code == "invalid_job"
        for handle in (chat, plain):
            assert len(handle.result(timeout=PATIENCE_S).outputs[0].token_ids) == 4
        assert worker.failure() is None
