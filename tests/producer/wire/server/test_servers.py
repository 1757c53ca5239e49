"""The servers that the other tests use."""

import redis


def test_both_servers_answer_and_keep_an_append_only_file(redis_url: str) -> None:
    with redis.from_url(redis_url) as client:
        assert client.info("persistence")["aof_enabled"] == 1
