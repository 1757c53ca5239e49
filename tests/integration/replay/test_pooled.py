"""Vectors computed again on another worker, and from a record in which one number changed."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel

from pagemill import Producer
from pagemill.producer.wire.schema import keys
from tests.engine.pooling.tiny_pooling import ENCODERS, save_base, texts_of_all_lengths
from tests.integration.replay.conftest import announced_worker
from tests.worker.harness import QueueClient, worker_config


@pytest.mark.slow
def test_vectors_are_compared_by_bits_and_cosine(client: QueueClient, tmp_path: Path) -> None:
    save_base(tmp_path / "embedder", ENCODERS["bert"], AutoModel)
    config = worker_config(client.url, client.queue, model=str(tmp_path / "embedder"), num_threads=1)
    with Producer(client.url, queue=client.queue, model="embedder") as producer:
        with announced_worker(config, client):
            handle = producer.submit(task="embed", inputs=texts_of_all_lengths(), keep_input=True)
            rows = handle.result(timeout=60).rows
            assert rows is not None
        with announced_worker(config, client):
            found = producer.verify(handle.id, timeout=60)
            assert (found.exactness, found.promise, found.honoured) == ("bitwise", "token", True)
            key = keys.outcome(client.queue, handle.id)
            record = json.loads(client.redis.get(key) or b"")
            array = np.array(rows)
            for factor, exactness in ((1.001, "close"), (-1.0, "neither")):
                moved = array.copy()
                moved[2, 5] *= factor
                record["rows"]["data"] = base64.b64encode(moved.tobytes()).decode()
                client.redis.set(key, json.dumps(record))
                found = producer.verify(handle.id, timeout=60)
                assert found.comparison is not None
                assert found.comparison.difference is not None
                assert (found.exactness, found.honoured) == (exactness, exactness == "close")
                first = found.comparison.difference
                assert (first.output, first.position, first.stored) == (2, 5, float(moved[2, 5]))
                assert found.comparison.min_cosine is not None
                one, other = (values[2] / np.linalg.norm(values[2]) for values in (moved, array))
                assert abs(found.comparison.min_cosine - float(one @ other)) < 1e-6
