from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app
from pagemill.engine.errors import ConfigError
from pagemill.worker.config import WorkerConfig


def test_a_flag_beats_the_environment_and_the_environment_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMILL_QUEUE", "from-environment")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "32")
    monkeypatch.setenv("PAGEMILL_ENABLE_PREFIX_CACHING", "false")
    config = WorkerConfig.load(model="echo", block_size=8, queue=None)
    assert config.queue == "from-environment"
    assert config.engine.max_num_seqs == 7
    assert config.engine.block_size == 8
    assert not config.engine.enable_prefix_caching
    assert config.drain_grace_s == 10.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({}, "model"),
        (
            {"model": "echo", "block_size": 0},
            "block_size: 0 is not valid: should be greater than or equal to 1",
        ),
        ({"model": "echo", "lease_s": 0}, "lease_s"),
        ({"model": "echo", "http_port": 70000}, "http_port"),
        ({"model": "echo", "no_such_option": 1}, "no_such_option"),
        # Leases that the worker could not keep.
        ({"model": "echo", "renew_s": 4.0}, "renew_s"),
        ({"model": "echo", "lease_s": 700.0}, "lease_s"),
        ({"model": "echo", "durability": "maybe"}, "durability"),
        ({"model": "echo", "webhook_hosts": "a.example, b.example:https"}, "webhook_hosts"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        WorkerConfig.load(**flags)


@pytest.mark.parametrize("name", ["hmac_keys", "webhook-secrets", "HMAC_KEYS"])
def test_secrets_are_kept_off_the_command_line(name: str) -> None:
    command = ["worker", "--model", "echo", "--option", f"{name}=my-secret-key-material"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "PAGEMILL_" in result.output
    assert "my-secret" not in result.output


def test_a_password_on_the_command_line_is_warned_about_and_not_repeated() -> None:
    command = ["workers", "--redis-url", "redis://:hunter2@127.0.0.1:1/0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3
    assert "every user of this machine can read a password" in result.output
    assert "hunter2" not in result.output
    broken = CliRunner().invoke(app, ["workers", "--redis-url", "http://:hunter2@host"])
    assert broken.exit_code == 2
    assert "hunter2" not in broken.output


def test_settings_do_not_show_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_HMAC_KEYS", "k" * 32)
    monkeypatch.setenv("PAGEMILL_WEBHOOK_SECRETS", "hunter2")
    config = WorkerConfig.load(
        model="echo", redis_url="redis://:hunter2@host", webhook_hosts="a.example, b.example"
    )
    assert "kkk" not in repr(config)
    assert "hunter2" not in repr(config)
    assert config.webhook_policy().hosts == ["a.example", "b.example"]
    assert bool(config.signing_keys())


def test_a_renamed_setting_is_rejected_with_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="renamed to host_cache_gib"):
        WorkerConfig.load(model="echo", swap_space_gib=1)
    monkeypatch.setenv("PAGEMILL_SWAP_SPACE_GIB", "1")
    with pytest.raises(ConfigError, match="renamed to host_cache_gib"):
        WorkerConfig.load(model="echo")
