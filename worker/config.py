"""The worker's settings. A flag beats `PAGEMILL_<NAME>` in the environment, which beats the default."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError, complaint
from pagemill.engine.models.directory import check_model
from pagemill.engine.models.source import ModelSource
from pagemill.producer.wire.schema.host_names import HostName, HostPatterns
from pagemill.producer.wire.schema.keys import ModelName, QueueName, RevisionName
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.clients import RedisAddress
from pagemill.producer.wire.server.durability import Durability
from pagemill.producer.wire.store.store import (
    DEFAULT_OVER_BYTES,
    MAX_STORED_BYTES,
    Store,
    check_store_url,
)
from pagemill.worker.webhooks.delivery import secret_bytes
from pagemill.worker.webhooks.policy import AllowedHost, WebhookPolicy

ENV_PREFIX = "PAGEMILL_"
DEFAULT_HTTP_PORT = 9790
SECRETS = frozenset({"hmac_keys", "webhook_secrets"})
"""Settings read from the environment only: every user of the machine can read a command line."""

_ENGINE_OPTIONS = frozenset(option.name for option in fields(EngineConfig))
_NO_QUOTE = SECRETS | {"redis_url", "store_url"}
"""Never quoted in a message: a Redis URL may hold a password."""
DAY_S = 86_400.0
_model_name = TypeAdapter(ModelName)
_host_patterns = TypeAdapter(HostPatterns)


def _not_empty(given: Any) -> Any:
    if given == "":
        raise ValueError("it should be a directory's path")
    return given


def _can_be_made(path: Path) -> Path:
    there = next(above for above in (path, *path.absolute().parents) if above.exists())
    if not there.is_dir():
        raise ValueError(f"it can't be made: {there} is no directory")
    return path


def _check_webhook_hosts(text: str) -> str:
    for host in map(AllowedHost.parse, _listed(text)):
        if ":" not in host.name:  # no IPv6 address
            _host_patterns.validate_python(host.name)
    return text


StoreUrl = Annotated[str, AfterValidator(check_store_url)]
WebhookHosts = Annotated[str, AfterValidator(_check_webhook_hosts)]
Directory = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_can_be_made)]
"""A directory that exists or can be created."""


class WorkerConfig(BaseSettings):
    """The settings of one worker process, loaded by `WorkerConfig.load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    engine: EngineConfig
    redis_url: RedisAddress | None = Field(default=None, repr=False)
    """None: an embedded Valkey server under `state_dir`."""
    queue: QueueName = "default"
    revision_name: RevisionName | None = None
    """The name of its model's revision, for jobs that pin one and for rollouts. None: the hub's commit, or a digest
    of the weights and the settings that change numbers."""
    state_dir: Directory | None = None
    """The embedded server's data directory. None: `~/.local/state/pagemill`."""
    http_host: HostName = "127.0.0.1"
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """None: 9790, or the next free port. An explicit port that is taken is an error; 0 takes any."""
    live_page: bool = False
    """Serve the live page to other machines too, as metrics and health always are. It shows job ids."""
    live_page_hosts: HostPatterns = ""
    """Comma-separated host names, besides this machine's own, that the live page answers to."""
    show_prompts: bool = False
    """Show the beginning of running jobs' prompts on the live page."""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    vllm_metric_names: bool = False
    """Also export vLLM's metrics under their own names (`vllm:...`)."""
    lease_s: float = Field(default=6.0, ge=0.1, le=600)
    """The life of a lease without a renewal."""
    renew_s: float = Field(default=2.0, ge=0.05, le=300, validate_default=True)
    """Interval of renewals and sweeps: a killed worker's jobs are taken over within `lease_s` + `renew_s`."""
    drain_grace_s: float = Field(default=10.0, ge=0, le=DAY_S)
    """Time that running jobs get after the first SIGTERM, before they are checkpointed and handed back."""
    shutdown_s: float = Field(default=25.0, ge=1, le=DAY_S)
    """The worker exits at most this long after the first signal, even if something hangs."""
    engine_stall_s: float = Field(default=60.0, ge=0.1, le=DAY_S)
    """A step longer than this counts as a hung engine: leases lapse, /healthz fails, the process exits."""
    engine_process: Literal["auto", "on", "off"] = "auto"
    """Run the engine in a process of its own, where its steps share no interpreter with the worker's threads.
    auto: on CUDA."""
    checkpoint_s: float = Field(default=1.0, ge=0.001, le=3600)
    checkpoint_tokens: int = Field(default=32, ge=1, le=2**20)
    """A job's progress is written every `checkpoint_s` or `checkpoint_tokens`, whichever comes first."""
    stream_checkpoint_s: float = Field(default=0.05, ge=0.001, le=60)
    """As `checkpoint_s`, for jobs with a stream reader: after their first tokens twice this if they are over 32."""
    max_held_results: int = Field(default=1000, ge=1, le=10**6)
    max_held_bytes: int = Field(default=256 * 1024 * 1024, ge=1, le=2**40)
    """Limits on results held in memory during a Redis outage; beyond them the engine stops stepping."""

    durability: Durability = "server"
    """fsync: a result counts as written, and leaves memory, only once it is in the server's file on disk."""
    hmac_keys: SecretStr = SecretStr("")
    """One key, or two with a comma during a rotation. If set, only jobs signed with one of them run."""
    webhook_hosts: WebhookHosts = ""
    """Comma-separated hosts that webhooks may go to; `*.example.com` matches every name below it. The port is
    443 unless one follows the name (`example.com:8443`). Empty: none."""
    webhook_secrets: SecretStr = Field(default=SecretStr(""), validate_default=True)
    """The keys that sign webhooks; two, separated by a comma, during a rotation."""
    webhook_allow_private: bool = False
    """Allow webhooks to hosts with private addresses: receivers inside your own network."""
    webhook_ca_file: FilePath | None = None
    """CA certificates to trust for webhooks instead of the system's."""
    webhook_retry_s: float = Field(default=5.0, ge=0.01, le=3600)
    """Delay before the second attempt; doubles each time up to an hour, with 12 attempts in all."""

    store_url: StoreUrl | None = None
    """Where payloads and results too large for Redis lie: a URL of fsspec. Nothing outside it is ever opened."""
    store_over_bytes: int = Field(default=DEFAULT_OVER_BYTES, ge=0, le=MAX_STORED_BYTES)
    """Results with more bytes of JSON go to the store, where there is one."""
    store_timeout_s: float = Field(default=60.0, ge=0.1, le=3600)
    """Patience with a payload that is fetched or a result that is written."""

    @field_validator("engine")
    @classmethod
    def _model_to_be_asked_for(cls, engine: EngineConfig) -> EngineConfig:
        """Check that the model exists and that jobs can name it."""
        check_model(engine.model)
        if not engine.served_model_name:
            _model_name.validate_python(ModelSource.parse(engine.model).served_name)
        return engine

    @field_validator("hmac_keys")
    @classmethod
    def _keys_that_sign(cls, given: SecretStr) -> SecretStr:
        Keys(_listed(given.get_secret_value()))
        return given

    @field_validator("webhook_secrets")
    @classmethod
    def _secrets_that_sign(cls, given: SecretStr, info: ValidationInfo) -> SecretStr:
        if not _webhook_keys(given) and info.data.get("webhook_hosts"):
            raise ValueError("webhook_hosts is set, and webhooks are signed")
        return given

    @field_validator("renew_s")
    @classmethod
    def _in_time(cls, renew_s: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s", renew_s * 2)
        if renew_s > lease_s / 2:
            raise ValueError(f"it should be at most half of lease_s ({lease_s:g}): one renewal may fail")
        return renew_s

    def live_page_names(self) -> list[str]:
        return _listed(self.live_page_hosts)

    def signing_keys(self) -> Keys:
        return Keys(_listed(self.hmac_keys.get_secret_value()))

    def store(self) -> Store | None:
        return None if self.store_url is None else Store(self.store_url, self.store_over_bytes)

    def webhook_policy(self) -> WebhookPolicy:
        return WebhookPolicy(_listed(self.webhook_hosts), self.webhook_allow_private)

    def webhook_keys(self) -> list[bytes]:
        return _webhook_keys(self.webhook_secrets)

    @classmethod
    def load(cls, **flags: Any) -> WorkerConfig:
        """Load settings from flags and the environment. A flag that is None counts as not given.

        Engine options are taken under their own names (`max_num_seqs=...`, `PAGEMILL_MAX_NUM_SEQS`). An empty
        variable counts as not set. Raises `pagemill.engine.errors.ConfigError`, which names the setting.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        environment = {
            name: value for name in _ENGINE_OPTIONS if (value := os.environ.get(ENV_PREFIX + name.upper()))
        }
        engine_options = environment | {
            name: given.pop(name) for name in list(given) if name in _ENGINE_OPTIONS
        }
        if not engine_options.get("model"):
            raise ConfigError("model: it is missing", setting="model")
        if unknown := sorted(set(given) - set(cls.model_fields)):
            raise ConfigError(f"{unknown[0]}: there is no such setting", setting=unknown[0])
        try:
            return cls(engine=EngineConfig(**engine_options), **given)
        except SettingsError as error:
            raise ConfigError(f"{ENV_PREFIX}ENGINE is no setting; its options are set one by one") from error
        except ValidationError as error:
            place = error.errors(include_url=False, include_context=False)[0]["loc"]
            setting = {"engine": "model"}.get(str(place[0]), str(place[0])) if place else None
            reason = complaint(error, is_secret=setting is None or setting in _NO_QUOTE)
            raise ConfigError(f"{setting}: {reason}" if setting else reason, setting=setting) from None


def _webhook_keys(secrets: SecretStr) -> list[bytes]:
    try:
        return [secret_bytes(secret) for secret in _listed(secrets.get_secret_value())]
    except ValueError:
        raise ValueError("after whsec_ comes base64") from None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
