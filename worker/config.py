"""The worker's settings. A flag beats `PAGEMILL_<NAME>` in the environment, which beats the default."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, TypeAdapter, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.durability import Durability
from pagemill.worker.webhooks.delivery import secret_bytes
from pagemill.worker.webhooks.policy import WebhookPolicy

ENV_PREFIX = "PAGEMILL_"
DEFAULT_HTTP_PORT = 9790
SECRETS = frozenset({"hmac_keys", "webhook_secrets"})
"""Settings that come from the environment only: what is on a command line, every user of the machine can read."""

_ENGINE_OPTIONS = frozenset(option.name for option in fields(EngineConfig))
_engine_config = TypeAdapter(EngineConfig)


class WorkerConfig(BaseSettings):
    """Everything one worker process needs to know. `WorkerConfig.load` is the way in."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    engine: EngineConfig
    redis_url: str | None = Field(default=None, repr=False)
    """None: an embedded Valkey server under `state_dir`."""
    queue: str = "default"
    state_dir: Path | None = None
    """Where an embedded server keeps its data. None: `~/.local/state/pagemill`."""
    http_host: str = "127.0.0.1"
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """None: 9790, or the next free port. An explicit port that is taken is an error; 0 takes any."""
    live_page: bool = False
    """Serve the live page off this machine too; metrics and health always are. It shows job ids to everybody."""
    live_page_hosts: str = ""
    """Names beside this machine's own under which the live page may be asked for, with commas."""
    show_prompts: bool = False
    """The beginning of running jobs' prompts on the live page."""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    vllm_metric_names: bool = False
    """Export what vLLM exports too, also under its names (`vllm:...`)."""
    lease_s: float = Field(default=6.0, gt=0, le=600)
    """How long a job stays ours without a renewal."""
    renew_s: float = Field(default=2.0, gt=0)
    """Between two renewals, and two sweeps: a killed worker's jobs are taken over within `lease_s` + `renew_s`."""
    drain_grace_s: float = Field(default=10.0, ge=0)
    """How long running jobs may go on after the first SIGTERM; then they are checkpointed and handed back."""
    shutdown_s: float = Field(default=25.0, gt=0)
    """The worker is gone this long after the first signal, whatever hangs."""
    engine_stall_s: float = Field(default=60.0, gt=0)
    """A step longer than this means a hung engine: leases lapse, /healthz fails, the process exits."""
    checkpoint_s: float = Field(default=1.0, gt=0)
    checkpoint_tokens: int = Field(default=32, ge=1)
    """A job's progress is written every `checkpoint_s` or `checkpoint_tokens`, whichever comes first."""
    stream_checkpoint_s: float = Field(default=0.05, gt=0)
    """The same for jobs that somebody streams."""
    max_held_results: int = Field(default=1000, ge=1)
    max_held_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    """Redis away: finished results are kept in memory up to these limits, then the engine stops stepping."""

    durability: Durability = "server"
    """fsync: an end counts as written, and leaves memory, once it is in the server's file on disk."""
    hmac_keys: SecretStr = SecretStr("")
    """One key, or two with a comma while they are being changed. Then only jobs signed with one of them run."""
    webhook_hosts: str = ""
    """Hosts that webhooks may go to, with commas; `*.example.com` is every name below it. Empty: none."""
    webhook_secrets: SecretStr = SecretStr("")
    """What webhooks are signed with; two with a comma while they are being changed."""
    webhook_allow_private: bool = False
    """Also call allowed hosts whose addresses are private: receivers inside one's own network."""
    webhook_ca_file: str | None = None
    """Certificates to trust for webhooks instead of the system's."""
    webhook_retry_s: float = Field(default=5.0, gt=0)
    """Before the second try; each pause after it is twice as long, up to an hour, 12 tries in all."""

    @model_validator(mode="after")
    def _renew_in_time(self) -> Self:
        if self.renew_s > self.lease_s / 2:
            raise ValueError("renew_s must be at most half of lease_s: one renewal may fail")
        return self

    def live_page_names(self) -> list[str]:
        return _listed(self.live_page_hosts)

    def signing_keys(self) -> Keys:
        """Raises InvalidJob for keys that are too short or too many."""
        return Keys(_listed(self.hmac_keys.get_secret_value()))

    def webhook_policy(self) -> WebhookPolicy:
        return WebhookPolicy(_listed(self.webhook_hosts), self.webhook_allow_private)

    def webhook_keys(self) -> list[bytes]:
        """Raises ConfigError when webhooks are on and there is none, or one that is no base64."""
        try:
            secrets = [secret_bytes(secret) for secret in _listed(self.webhook_secrets.get_secret_value())]
        except ValueError:
            raise ConfigError("webhook_secrets: after whsec_ comes base64") from None
        if self.webhook_policy().is_on and not secrets:
            raise ConfigError(
                "webhook_hosts is set: webhooks are signed, so set PAGEMILL_WEBHOOK_SECRETS too"
            )
        return secrets

    @classmethod
    def load(cls, **flags: Any) -> WorkerConfig:
        """Settings from flags and environment. A flag that is None was not given.

        Engine options are taken under their own names (`max_num_seqs=...`, `PAGEMILL_MAX_NUM_SEQS`).
        Raises `pydantic.ValidationError` or `pagemill.engine.errors.ConfigError` when a value makes no sense.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        environment = {
            name: value for name in _ENGINE_OPTIONS if (value := os.environ.get(ENV_PREFIX + name.upper()))
        }
        engine_options = environment | {
            name: given.pop(name) for name in list(given) if name in _ENGINE_OPTIONS
        }
        return cls(engine=_engine_config.validate_python(engine_options), **given)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
