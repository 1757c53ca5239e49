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
from pagemill.engine.models.echo import is_echo
from pagemill.producer.wire.schema.host_names import HostName, HostPatterns
from pagemill.producer.wire.schema.keys import ModelName, QueueName
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.clients import RedisAddress
from pagemill.producer.wire.server.durability import Durability
from pagemill.worker.webhooks.delivery import secret_bytes
from pagemill.worker.webhooks.policy import AllowedHost, WebhookPolicy

ENV_PREFIX = "PAGEMILL_"
DEFAULT_HTTP_PORT = 9790
SECRETS = frozenset({"hmac_keys", "webhook_secrets"})
"""Settings that come from the environment only: what is on a command line, every user of the machine can read."""

_ENGINE_OPTIONS = frozenset(option.name for option in fields(EngineConfig))
_NO_QUOTE = SECRETS | {"redis_url"}
"""Never part of a message: an address may hold a password."""
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


WebhookHosts = Annotated[str, AfterValidator(_check_webhook_hosts)]
Directory = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_can_be_made)]
"""One that is there, or can be made."""


class WorkerConfig(BaseSettings):
    """Everything one worker process needs to know. `WorkerConfig.load` is the way in."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    engine: EngineConfig
    redis_url: RedisAddress | None = Field(default=None, repr=False)
    """None: an embedded Valkey server under `state_dir`."""
    queue: QueueName = "default"
    state_dir: Directory | None = None
    """Where an embedded server keeps its data. None: `~/.local/state/pagemill`."""
    http_host: HostName = "127.0.0.1"
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """None: 9790, or the next free port. An explicit port that is taken is an error; 0 takes any."""
    live_page: bool = False
    """Serve the live page off this machine too; metrics and health always are. It shows job ids to everybody."""
    live_page_hosts: HostPatterns = ""
    """Names beside this machine's own under which the live page may be asked for, with commas."""
    show_prompts: bool = False
    """The beginning of running jobs' prompts on the live page."""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    vllm_metric_names: bool = False
    """Export what vLLM exports too, also under its names (`vllm:...`)."""
    lease_s: float = Field(default=6.0, ge=0.1, le=600)
    """How long a job stays ours without a renewal."""
    renew_s: float = Field(default=2.0, ge=0.05, le=300, validate_default=True)
    """Between two renewals, and two sweeps: a killed worker's jobs are taken over within `lease_s` + `renew_s`."""
    drain_grace_s: float = Field(default=10.0, ge=0, le=DAY_S)
    """How long running jobs may go on after the first SIGTERM; then they are checkpointed and handed back."""
    shutdown_s: float = Field(default=25.0, ge=1, le=DAY_S)
    """The worker is gone this long after the first signal, whatever hangs."""
    engine_stall_s: float = Field(default=60.0, ge=0.1, le=DAY_S)
    """A step longer than this means a hung engine: leases lapse, /healthz fails, the process exits."""
    checkpoint_s: float = Field(default=1.0, ge=0.001, le=3600)
    checkpoint_tokens: int = Field(default=32, ge=1, le=2**20)
    """A job's progress is written every `checkpoint_s` or `checkpoint_tokens`, whichever comes first."""
    stream_checkpoint_s: float = Field(default=0.05, ge=0.001, le=60)
    """The same for jobs that somebody streams."""
    max_held_results: int = Field(default=1000, ge=1, le=10**6)
    max_held_bytes: int = Field(default=256 * 1024 * 1024, ge=1, le=2**40)
    """Redis away: finished results are kept in memory up to these limits, then the engine stops stepping."""

    durability: Durability = "server"
    """fsync: an end counts as written, and leaves memory, once it is in the server's file on disk."""
    hmac_keys: SecretStr = SecretStr("")
    """One key, or two with a comma while they are being changed. Then only jobs signed with one of them run."""
    webhook_hosts: WebhookHosts = ""
    """Hosts that webhooks may go to, with commas; `*.example.com` is every name below it. Port 443, or the one that
    follows the name (`example.com:8443`). Empty: none."""
    webhook_secrets: SecretStr = Field(default=SecretStr(""), validate_default=True)
    """What webhooks are signed with; two with a comma while they are being changed."""
    webhook_allow_private: bool = False
    """Also call allowed hosts whose addresses are private: receivers inside one's own network."""
    webhook_ca_file: FilePath | None = None
    """Certificates to trust for webhooks instead of the system's."""
    webhook_retry_s: float = Field(default=5.0, ge=0.01, le=3600)
    """Before the second try; each pause after it is twice as long, up to an hour, 12 tries in all."""

    @field_validator("engine")
    @classmethod
    def _model_to_be_asked_for(cls, engine: EngineConfig) -> EngineConfig:
        """There is such a model, and its directory's name, which it is served under, is one that jobs can name."""
        check_model(engine.model)
        if not is_echo(engine.model):
            _model_name.validate_python(Path(engine.model).expanduser().resolve().name)
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

    def webhook_policy(self) -> WebhookPolicy:
        return WebhookPolicy(_listed(self.webhook_hosts), self.webhook_allow_private)

    def webhook_keys(self) -> list[bytes]:
        return _webhook_keys(self.webhook_secrets)

    @classmethod
    def load(cls, **flags: Any) -> WorkerConfig:
        """Settings from flags and environment. A flag that is None was not given.

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
