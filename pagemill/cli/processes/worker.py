"""`pagemill worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from pagemill.cli.app import EXIT_USAGE, app, check_url, print_stderr
from pagemill.cli.terminal.options import Options
from pagemill.cli.terminal.setting_flags import SettingsHelp, options, settings_of
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.models.echo import is_echo
from pagemill.producer.wire.server.discovery import URL_VARIABLE
from pagemill.worker.config import ENV_PREFIX, SECRETS, WorkerConfig

_SERVED_NAMES = "--served-model-name"


class _WorkerCommand(SettingsHelp, TyperCommand):
    """Accepts several words after --served-model-name, as vLLM does: this command has no arguments they could be."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names: list[str] = []
        others: list[str] = []
        is_name = False
        for word in args:
            flag, separator, value = word.partition("=")
            if flag == _SERVED_NAMES:
                names += [value] if separator else []
            elif is_name and not word.startswith("-"):
                names.append(word)
                continue
            else:
                others.append(word)
            is_name = flag == _SERVED_NAMES
        if _SERVED_NAMES in (word.partition("=")[0] for word in args):
            others += [_SERVED_NAMES, " ".join(names)]
        return super().parse_args(ctx, others)


_FIRST = (
    "model", "engine_url", "engine_key_file", "served_model_name", "redis_url", "queue", "state_dir",
    "http_host", "http_port", "drain_grace_s", "chat_template", "adapters", "device", "dtype", "kv_cache_dtype",
    "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks",
    "kv_cache_memory_bytes", "num_threads", "tensor_parallel_size", "engine_process", "verify",
    "generation_config", "tool_call_parser", "reasoning_parser", "vllm_metric_names", "live_page", "live_page_hosts",
    "show_prompts", "log_format", "log_level",
)  # fmt: skip
"""The settings that help shows first."""
FLAGS = options(
    settings_of(EngineConfig, WorkerConfig, without=SECRETS | {"engine"}),
    {
        "model": {"envvar": "PAGEMILL_MODEL"},
        "engine_url": {"flag": "--engine", "metavar": "URL"},
        "engine_key_file": {"metavar": "FILE"},
        "served_model_name": {"metavar": "NAME ..."},
        "redis_url": {"envvar": URL_VARIABLE, "callback": check_url},
        "state_dir": {"metavar": "DIRECTORY"},
        "drain_grace_s": {"flag": "--drain-grace"},
        "chat_template": {"metavar": "FILE"},
        "generation_config": {"metavar": "auto|none|FOLDER"},
        "adapters": {"flag": "--adapter", "metavar": "NAME=FOLDER", "kind": list[str]},
        "live_page_hosts": {"metavar": "NAME,..."},
        "tool_call_parser": {"metavar": "NAME"},
    },
    first=_FIRST,
)
"""The flag of every setting but secrets."""


class OtherSettings(Options):
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None
    """Setting by its name; may be repeated."""


@app.command(cls=_WorkerCommand)
def worker(context: typer.Context, settings: Annotated[dict[str, Any], FLAGS], other: OtherSettings) -> None:
    """Serve jobs until SIGTERM or Ctrl-C. Every setting is also read from PAGEMILL_<NAME>."""
    flags = {name: each.opts[0] for each in context.command.params if (name := each.name) in FLAGS}
    raise typer.Exit(_run(load(pairs(other.option or []) | settings, flags)))


class WorkerOptions(Options):
    worker_option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None
    """Setting of the worker that the run starts; may be repeated."""


def check_options(options: list[str] | None) -> None:
    """Raise a usage error for an invalid --worker-option, before anything is started."""
    if options:
        load({"model": "echo"} | pairs(options, "--worker-option"), {}, "--worker-option")


def load(
    settings: Mapping[str, Any], flags: Mapping[str, str], other_flags: str = "--option"
) -> WorkerConfig:
    """Load a worker's settings; a usage error names the flag, if there is one, and the variable."""
    try:
        return WorkerConfig.load(**settings)
    except ConfigError as error:
        if (setting := error.setting) is None:
            raise typer.BadParameter(str(error)) from None
        message = str(error).removeprefix(f"{setting}: ")
        if setting == "model" and not settings.get("model"):
            message += "; for the packaged one: pagemill worker --model smollm2"
        variable = f"{ENV_PREFIX}{setting.upper()}"
        flag = flags.get(setting, f"{other_flags} {setting}")
        raise typer.BadParameter(
            f"{variable if setting in SECRETS else f'{flag} ({variable})'}: {message}"
        ) from None


def _run(config: WorkerConfig) -> int:
    try:
        from pagemill.worker.process import run_worker
    except ModuleNotFoundError as error:
        extra = "echo" if is_echo(config.engine.model) else "worker"
        _refuse(
            f"{error.name} is missing; a worker needs more than a producer: pip install 'pagemill[{extra}]'"
        )
    return run_worker(config)


def _refuse(message: str) -> NoReturn:
    print_stderr(message)
    raise typer.Exit(EXIT_USAGE)


def pairs(options: list[str], flag: str = "--option") -> dict[str, Any]:
    """Split NAME=VALUE; raises a usage error for anything else, and for a secret."""
    found = {}
    for text in options:
        name, separator, value = text.partition("=")
        name = name.replace("-", "_").lower()
        if not separator or not name.isidentifier():
            raise typer.BadParameter(f"{flag} takes NAME=VALUE, not {text!r}")
        if name in SECRETS:
            raise typer.BadParameter(
                f"{name} is a secret, and command lines are visible to other users: "
                f"set {ENV_PREFIX}{name.upper()} instead"
            )
        found[name] = value
    return found
