"""`pagemill worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from pagemill.cli.app import EXIT_USAGE, app, check_url, say
from pagemill.engine.errors import ConfigError
from pagemill.worker.config import ENV_PREFIX, SECRETS, WorkerConfig


@app.command()
def worker(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(envvar="PAGEMILL_MODEL", help="A Hugging Face directory, smollm2 or echo (no model)."),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(callback=check_url, help="Default: PAGEMILL_REDIS_URL, else an embedded Valkey server."),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="The queue to serve. Default: default.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The embedded server's data. Default: ~/.local/state/pagemill.")
    ] = None,
    http_host: Annotated[str | None, typer.Option(help="For metrics and health. Default: 127.0.0.1.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Default: 9790, or the next free port.")] = None,
    drain_grace: Annotated[
        float | None, typer.Option(help="Seconds running jobs may go on after SIGTERM. Default: 10.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="KV blocks in the pool.")] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="Bytes for the KV cache.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads for the model.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Processes, and GPUs, that share each layer's work. Default: 1.")
    ] = None,
    vllm_metric_names: Annotated[
        bool | None, typer.Option("--vllm-metric-names", help="Also export vLLM's names of metrics, vllm:*.")
    ] = None,
    live_page: Annotated[
        bool | None, typer.Option("--live-page", help="Serve the live page beyond this machine too.")
    ] = None,
    live_page_hosts: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Further names that the live page answers to.")
    ] = None,
    show_prompts: Annotated[
        bool | None, typer.Option("--show-prompts", help="Show how running prompts begin on the live page.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json. Default: console.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other setting; may be repeated."),
    ] = None,
) -> None:
    """Serve jobs until SIGTERM or Ctrl-C. Every setting is also read from PAGEMILL_<NAME>."""
    named = {name: value for name, value in context.params.items() if name != "option"}
    named["drain_grace_s"] = named.pop("drain_grace")
    flags: dict[str, Any] = _pairs(option or []) | named
    if not flags["model"]:
        _refuse("no model; for the packaged one: pagemill worker --model smollm2")
    raise typer.Exit(_run(_load(flags)))


def _load(flags: dict[str, Any]) -> WorkerConfig:
    try:
        return WorkerConfig.load(**flags)
    except ValidationError as error:
        reasons = (f"{_setting(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False))
        _refuse("; ".join(reasons))
    except ConfigError as error:
        _refuse(str(error))


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


def _pairs(options: list[str]) -> dict[str, Any]:
    pairs = {}
    for text in options:
        name, separator, value = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"--option takes NAME=VALUE, not {text!r}")
        name = name.replace("-", "_").lower()
        if name in SECRETS:
            raise typer.BadParameter(
                f"{name} is a secret, and a command line is none: set {ENV_PREFIX}{name.upper()} instead"
            )
        pairs[name] = value
    return pairs


def _setting(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
