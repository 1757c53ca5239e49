"""Tenants share a worker and cannot detect each other's prompts."""

from __future__ import annotations

import pytest

from pagemill import Producer
from tests.worker.harness import running_worker, worker_config


@pytest.mark.slow
def test_a_prefix_is_cached_for_its_tenant_alone(valkey_url: str, queue_name: str) -> None:
    prompt = "a secret system prompt of several blocks " * 4
    with (
        running_worker(worker_config(valkey_url, queue_name)),
        Producer(valkey_url, queue=queue_name) as producer,
    ):

        def cached(tenant: str) -> int:
            handle = producer.submit(prompt=prompt, model="echo", max_tokens=2, tenant=tenant)
            return handle.result(timeout=120).usage.cached_tokens

        assert cached("one") == 0
        assert cached("one") > 100
        assert cached("two") == 0
        assert cached("two") > 100
        assert cached("default") == 0


def test_an_idempotency_key_is_its_tenants_own(valkey_url: str, queue_name: str) -> None:
    with Producer(valkey_url, queue=queue_name) as producer:
        fields = {"prompt": "p", "model": "echo", "idempotency_key": "k"}
        ids = {producer.submit(fields, tenant=tenant).id for tenant in ("one", "two", "one")}
    assert len(ids) == 2
