"""`pagemill worker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from pagemill.cli.app import EXIT_USAGE, app, check_url, say
from pagemill.cli.terminal.grouped import grouped
from pagemill.engine.errors import ConfigError
from pagemill.worker.config import ENV_PREFIX, SECRETS, WorkerConfig

Given = str | None
"""A value as typed: WorkerConfig validates it."""


_SERVED_NAMES = "--served-model-name"


class _WorkerCommand(TyperCommand):
    """Takes several words after --served-model-name, as vLLM does: this command has no arguments they could be."""

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


def _number(help: str) -> Any:
    return typer.Option(metavar="INTEGER", help=help)


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    context: typer.Context
    model: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEMILL_MODEL",
            help="A folder, a .gguf file, org/name[@revision] of the Hugging Face Hub, "
            "modelscope:org/name[@revision], smollm2, or echo (no model).",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        typer.Option(
            _SERVED_NAMES,
            metavar="NAME ...",
            help="What jobs call it: one name or several. Default: org/name, or the folder's or file's name.",
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEMILL_REDIS_URL", callback=check_url, help="Default: an embedded Valkey server."
        ),
    ] = None
    queue: Annotated[str | None, typer.Option(help="The queue to serve. Default: default.")] = None
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="The embedded server's data. Default: ~/.local/state/pagemill."
        ),
    ] = None
    http_host: Annotated[str | None, typer.Option(help="For metrics and health. Default: 127.0.0.1.")] = None
    http_port: Annotated[Given, _number("Default: 9790, or the next free port.")] = None
    drain_grace_s: Annotated[
        str | None,
        typer.Option(
            "--drain-grace",
            metavar="FLOAT",
            help="Seconds running jobs may go on after SIGTERM. Default: 10.",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Jinja chat template. Default: the model's own."),
    ] = None
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=FOLDER",
            help="A LoRA adapter of PEFT that jobs may name; may be repeated. More at run time: pagemill adapter add.",
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto (as dtype), float32, float16, bfloat16, int8 or fp8.")
    ] = None
    quantization: Annotated[
        str | None, typer.Option(help="Multiply 8-bit numbers: int8, or fp8 on GPUs. Default: no.")
    ] = None
    max_model_len: Annotated[Given, _number("Longest prompt + output, in tokens.")] = None
    max_num_seqs: Annotated[Given, _number("Sequences in one step.")] = None
    max_num_batched_tokens: Annotated[Given, _number("Token budget of a step.")] = None
    num_kv_blocks: Annotated[Given, _number("KV blocks in the pool.")] = None
    kv_cache_memory_bytes: Annotated[Given, _number("Bytes for the KV cache.")] = None
    num_threads: Annotated[Given, _number("CPU threads for the model.")] = None
    tensor_parallel_size: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER", help="Processes, and GPUs, that share each layer's work. Default: 1."
        ),
    ] = None
    engine_process: Annotated[
        str | None,
        typer.Option(
            metavar="auto|on|off",
            help="Run the engine in a process of its own, apart from the worker's threads. Default: auto, on CUDA.",
        ),
    ] = None
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare a model of no registered family with transformers at its first start. Default: on.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None, typer.Option(metavar="NAME", help="Syntax of tool calls. Default: the chat template's.")
    ] = None
    reasoning_parser: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tags around thinking. Default: the chat template's.")
    ] = None
    vllm_metric_names: Annotated[
        bool | None, typer.Option("--vllm-metric-names", help="Also export vLLM's names of metrics, vllm:*.")
    ] = None
    live_page: Annotated[
        bool | None, typer.Option("--live-page", help="Serve the live page beyond this machine too.")
    ] = None
    live_page_hosts: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Further names that the live page answers to.")
    ] = None
    show_prompts: Annotated[
        bool | None, typer.Option("--show-prompts", help="Show how running prompts begin on the live page.")
    ] = None
    log_format: Annotated[str | None, typer.Option(help="console or json. Default: console.")] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other setting; may be repeated."),
    ] = None


@app.command(cls=_WorkerCommand)
@grouped
def worker(given: WorkerFlags) -> None:
    """Serve jobs until SIGTERM or Ctrl-C. Every setting is also read from PAGEMILL_<NAME>."""
    named = {field.name for field in fields(given)} - {"context", "option"}
    flags = {
        name: option.opts[0] for option in given.context.command.params if (name := option.name) in named
    }
    chosen = {name: value for name in named if (value := getattr(given, name)) not in (None, [])}
    raise typer.Exit(_run(load(pairs(given.option or []) | chosen, flags)))


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
        _refuse(
            f"{error.name} is missing; a worker needs more than a producer: pip install 'pagemill[worker]'"
        )
    return run_worker(config)


def _refuse(message: str) -> NoReturn:
    say(message)
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
                f"{name} is a secret, and a command line is none: set {ENV_PREFIX}{name.upper()} instead"
            )
        found[name] = value
    return found
