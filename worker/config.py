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

from pagemill.common.api_keys import read_key
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
from pagemill.producer.wire.webhooks.delivery import secret_bytes
from pagemill.producer.wire.webhooks.policy import AllowedHost, WebhookPolicy
from pagemill.worker.endpoint_settings import check_endpoint_options, check_engine_url

ENV_PREFIX = "PAGEMILL_"
DEFAULT_HTTP_PORT = 9790
SECRETS = frozenset({"hmac_keys", "webhook_secrets"})
"""Settings read from the environment only: every user of the machine can read a command line."""

_ENGINE_OPTIONS = frozenset(option.name for option in fields(EngineConfig))
_RENAMED = {"swap_space_gib": "host_cache_gib"}
_NO_QUOTE = SECRETS | {"redis_url", "store_url"}
"""Never quoted in a message: a Redis URL may hold a password."""
DAY_S = 86_400.0
_model_name = TypeAdapter(ModelName)
_host_patterns = TypeAdapter(HostPatterns)


def _not_empty(given: Any) -> Any:
    if given == "":
        raise ValueError("should be the path of a directory")
    return given


def _can_be_made(path: Path) -> Path:
    there = next(above for above in (path, *path.absolute().parents) if above.exists())
    if not there.is_dir():
        raise ValueError(f"can't be created: {there} is not a directory")
    return path


def _check_webhook_hosts(text: str) -> str:
    for host in map(AllowedHost.parse, _listed(text)):
        if ":" not in host.name:  # no IPv6 address
            _host_patterns.validate_python(host.name)
    return text


EngineUrl = Annotated[str, AfterValidator(check_engine_url)]
StoreUrl = Annotated[str, AfterValidator(check_store_url)]
WebhookHosts = Annotated[str, AfterValidator(_check_webhook_hosts)]
Directory = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_can_be_made)]
"""A directory that exists or can be created."""


class WorkerConfig(BaseSettings):
    """The settings of one worker process, loaded by `WorkerConfig.load`. Docstrings are help texts of flags."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    engine_url: EngineUrl | None = None
    """Run jobs in the engine at this OpenAI-compatible address, such as http://vllm:8000/v1. Requires
    served_model_name; model is then a folder with the tokenizer, or absent."""
    engine_key_file: FilePath | None = None
    """File with the API key of engine_url."""
    engine: EngineConfig
    """The engine's settings, which flags and variables set one by one."""
    redis_url: RedisAddress | None = Field(default=None, repr=False)
    """The queue's server. Default: an embedded Valkey server with its data in state_dir."""
    queue: QueueName = "default"
    """The queue to serve."""
    revision_name: RevisionName | None = None
    """Name of the model's revision. Default: the hub's commit, or a digest of weights and settings."""
    state_dir: Directory | None = None
    """The embedded server's data directory. Default: ~/.local/state/pagemill, or in XDG_STATE_HOME."""
    http_host: HostName = "127.0.0.1"
    """Address that serves metrics and health."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of metrics and health. Default: 9790, or the next free port; 0: any free port."""
    live_page: bool = False
    """Serve the live page to other machines too."""
    live_page_hosts: HostPatterns = ""
    """Further comma-separated host names under which the live page is served."""
    show_prompts: bool = False
    """Show the beginning of running jobs' prompts on the live page."""
    log_format: Literal["console", "json"] = "console"
    """Format of log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    vllm_metric_names: bool = False
    """Also export metrics under vLLM's names (`vllm:...`)."""
    lease_s: float = Field(default=6.0, ge=0.1, le=600)
    """Seconds until a lease expires unless it is renewed."""
    renew_s: float = Field(default=2.0, ge=0.05, le=300, validate_default=True)
    """Seconds between renewals and sweeps."""
    drain_grace_s: float = Field(default=10.0, ge=0, le=DAY_S)
    """Seconds that running jobs can continue after the first SIGTERM, before they are requeued."""
    shutdown_s: float = Field(default=25.0, ge=1, le=DAY_S)
    """Seconds from the first signal until the worker exits, even if something hangs."""
    engine_stall_s: float = Field(default=60.0, ge=0.1, le=DAY_S)
    """Seconds after which a step counts as a hung engine, and the process exits."""
    engine_process: Literal["auto", "on", "off"] = "auto"
    """Run the engine in a separate process. auto: on CUDA."""
    audit_interval_s: float = Field(default=600.0, ge=0, le=DAY_S)
    """Seconds between two canaries, whose output the workers of a model compare; 0: none."""
    audit_input_mib: int = Field(default=0, ge=0, le=1024)
    """MiB of inputs of finished jobs that stay in Redis until the next canary, for recalls. 0: only those of jobs with
    keep_input."""
    checkpoint_s: float = Field(default=1.0, ge=0.001, le=3600)
    """Seconds between two checkpoints of a job, unless checkpoint_tokens come first."""
    checkpoint_tokens: int = Field(default=32, ge=1, le=2**20)
    """Tokens between two checkpoints of a job, unless checkpoint_s comes first."""
    stream_checkpoint_s: float = Field(default=0.05, ge=0.001, le=60)
    """checkpoint_s of jobs with a stream reader; doubled after the first tokens if there are more than 32 of them."""
    max_held_results: int = Field(default=1000, ge=1, le=10**6)
    """Results held in memory during a Redis outage, before the engine stops stepping."""
    max_held_bytes: int = Field(default=256 * 1024 * 1024, ge=1, le=2**40)
    """Bytes of results held in memory during a Redis outage."""

    durability: Durability = "server"
    """fsync: a result counts as written once it is in the server's file on disk."""
    hmac_keys: SecretStr = SecretStr("")
    """One or two comma-separated keys. If set, only jobs signed with one of them run."""
    webhook_hosts: WebhookHosts = ""
    """Comma-separated hosts that can receive webhooks, such as `*.example.com` or `example.com:8443`.
    Default: none."""
    webhook_secrets: SecretStr = Field(default=SecretStr(""), validate_default=True)
    """One or two comma-separated keys that sign webhooks."""
    webhook_allow_private: bool = False
    """Allow webhooks to hosts with private addresses."""
    webhook_ca_file: FilePath | None = None
    """CA certificates to trust for webhooks instead of the system's."""
    webhook_retry_s: float = Field(default=5.0, ge=0.01, le=3600)
    """Seconds before the second attempt. The delay doubles each time, up to an hour, with 12 attempts in all."""

    fetch_images: WebhookHosts = ""
    """Hosts from which images of jobs are fetched (https), in the form of webhook_hosts. Default: none."""
    fetch_images_private: bool = False
    """Fetch images also from hosts with private addresses."""

    store_url: StoreUrl | None = None
    """URL of fsspec for payloads and results that are too large for Redis."""
    store_over_bytes: int = Field(default=DEFAULT_OVER_BYTES, ge=0, le=MAX_STORED_BYTES)
    """Results with more bytes of JSON go to the store, if there is one."""
    store_timeout_s: float = Field(default=60.0, ge=0.1, le=3600)
    """Seconds to fetch a payload or to write a result."""

    @field_validator("engine")
    @classmethod
    def _model_to_be_asked_for(cls, engine: EngineConfig, info: ValidationInfo) -> EngineConfig:
        """Check that the model exists and that jobs can name it."""
        if info.data.get("engine_url"):
            return engine
        check_model(engine.model)
        if not engine.served_model_name:
            _model_name.validate_python(ModelSource.parse(engine.model).served_name)
        return engine

    @field_validator("engine_key_file")
    @classmethod
    def _key_that_can_be_sent(cls, file: Path | None) -> Path | None:
        read_key(file)
        return file

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
            raise ValueError(f"should be at most half of lease_s ({lease_s:g}): one renewal may fail")
        return renew_s

    def live_page_names(self) -> list[str]:
        return _listed(self.live_page_hosts)

    def signing_keys(self) -> Keys:
        return Keys(_listed(self.hmac_keys.get_secret_value()))

    def store(self) -> Store | None:
        return None if self.store_url is None else Store(self.store_url, self.store_over_bytes)

    def webhook_policy(self) -> WebhookPolicy:
        return WebhookPolicy(_listed(self.webhook_hosts), self.webhook_allow_private)

    def image_policy(self) -> WebhookPolicy:
        return WebhookPolicy(
            _listed(self.fetch_images), self.fetch_images_private, setting="fetch_images", subject="image"
        )

    def webhook_keys(self) -> list[bytes]:
        return _webhook_keys(self.webhook_secrets)

    @classmethod
    def load(cls, **flags: Any) -> WorkerConfig:
        """Load settings from flags and the environment. A flag that is None counts as not given.

        Engine options are taken under their own names (`max_num_seqs=...`, `PAGEMILL_MAX_NUM_SEQS`). An empty
        variable counts as not set. Raises `pagemill.engine.errors.ConfigError`, which names the setting.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        for old, new in _RENAMED.items():
            if old in given or os.environ.get(ENV_PREFIX + old.upper()):
                raise ConfigError(f"{old}: the setting was renamed to {new}", setting=old)
        environment = {
            name: value for name in _ENGINE_OPTIONS if (value := os.environ.get(ENV_PREFIX + name.upper()))
        }
        engine_options = environment | {
            name: given.pop(name) for name in list(given) if name in _ENGINE_OPTIONS
        }
        if engine_url := given.get("engine_url") or os.environ.get(f"{ENV_PREFIX}ENGINE_URL"):
            check_endpoint_options(engine_url, engine_options)
        if not engine_options.get("model"):
            raise ConfigError("model: it is missing", setting="model")
        if unknown := sorted(set(given) - set(cls.model_fields)):
            raise ConfigError(f"{unknown[0]}: unknown setting", setting=unknown[0])
        try:
            return cls(engine=EngineConfig(**engine_options), **given)
        except SettingsError as error:
            raise ConfigError(f"{ENV_PREFIX}ENGINE is not a setting; set its options one by one") from error
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
