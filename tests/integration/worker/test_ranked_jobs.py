"""best_of and beam search as jobs: through a real server and a worker on threads of this process."""

from __future__ import annotations

import pytest

from pagemill import InvalidJob
from tests.worker.harness import QueueClient, running_worker, worker_config


@pytest.mark.slow
def test_ranked_jobs_return_n_outputs(valkey_url: str, queue_name: str, client: QueueClient) -> None:
    with running_worker(worker_config(valkey_url, queue_name)):
        ids = client.submit(
            {"prompt": "hello", "max_tokens": 5, "n": 2, "best_of": 4},
            {"prompt": "hello", "max_tokens": 5, "n": 2, "beam_width": 3, "early_stopping": "never"},
        )
        best_of, beams = client.wait(ids)
    result = best_of.value()
    assert result is not None
    assert [(output.index, output.text) for output in result.outputs] == [(0, "hello"), (1, "hello")]
    assert result.usage.completion_tokens == 10
    result = beams.value()
    assert result is not None
    assert [output.index for output in result.outputs] == [0, 1]
    assert result.outputs[0].text == "hello"
    assert result.outputs[1].text != "hello"
    with pytest.raises(InvalidJob, match="a beam search cannot be combined with temperature") as refused:
        client.submit({"prompt": "hello", "max_tokens": 5, "beam_width": 3, "temperature": 0.5})
    assert refused.value.code == "unsupported_feature"
