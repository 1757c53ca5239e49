"""Every option of every command, and every setting: invalid values exit with code 2 and a line that names it.

The lists come from the parser and the classes of settings, so a new one without validation fails here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from pagemill import LLM, AsyncProducer, ConfigError, Producer
from pagemill.__main__ import app
from pagemill.cli.processes import worker as worker_command
from pagemill.cli.terminal.setting_flags import settings_of
from pagemill.engine.config import EngineConfig
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.wire.schema.errors import InvalidAddress, InvalidJob
from pagemill.supervisor.settings import UpSettings
from pagemill.worker.config import SECRETS, WorkerConfig
from tests.cli.test_help import COMMANDS

CONTENT = {
    # Model inputs, or a name inside a file: the job or the dataset run reports errors in them.
    "prompt", "system", "stop", "choice", "continuation", "field", "template", "choices", "json_schema", "regex",
    "where",
    # Paths that a command creates, or reports as missing when it opens them.
    "source", "sources", "out", "template_file", "report_file", "keys", "run_dir", "image",
    # TENANT=WEIGHT, and names of settings: tested separately below.
    "pairs", "option", "worker_option",
}  # fmt: skip
WITH_SPACES = {"gold", "output_column", "image_column"}
SECRET_VARIABLES = {f"PAGEMILL_{name.upper()}" for name in SECRETS}
FILLED = {
    "PROMPT": "hello", "ID": "an-id", "ID...": "an-id", "[RECIPE.yaml] IN...": "rows.jsonl",
    "REQUESTS": "pyproject.toml", "NAME": "shop", "WORKER": "a-worker",
    "NAME=FOLDER": "shop=folder", "TENANT": "shop", "MODEL": "echo",
    "--share": "5%", "--to": "v2",
    "--out": "out.jsonl", "--model": "echo", "--celery-app": "shop:app",
}  # fmt: skip
BAD_NUMBERS = ("nan", "inf", "-1", "1e300", "1" + "0" * 40, "abc", "")
BAD_WORDS = ("", "a\nb", "x" * 300, "a b")
BAD_URLS = (
    "http://host", "redis://host/abc", "redis://host/-1", "redis://host:0", "redis://host:99999", " ",
)  # fmt: skip


HINTS = {
    **get_type_hints(WorkerConfig, include_extras=True),
    **get_type_hints(EngineConfig, include_extras=True),
}
SETTINGS = [*(option.name for option in fields(EngineConfig)), *WorkerConfig.model_fields]
SETTINGS.remove("engine")
SPECIAL = {
    "model": ("/no/such/model", "echo:nan", "echo:-1", "echo:x", "/tmp"),
    "engine_url": (
        "ftp://host/v1",
        "http://user:secret@host/v1",
        "http://host/v1?key=secret",
        "http://",
        "a b",
    ),
    "engine_key_file": ("/no/such/file", "/tmp", "pyproject.toml"),
    "revision_name": ("a~b", "a b", "x" * 65),
    "served_model_name": ("x" * 300, "a!b", "a b!", ",", " ".join(f"name-{number}" for number in range(33))),
    "adapters": ("a", "=x", "a!=x"),
    "chat_template": ("/no/such/file", "/tmp", "a b", "x.jinja"),
    "generation_config": ("/no/such/folder", "/tmp", "a b", "Auto"),
    "redis_url": BAD_URLS,
    "state_dir": ("/dev/null/state", "/proc/version/x"),
    "webhook_ca_file": ("/no/such/file", "/tmp"),
    "live_page_hosts": ("a b", "a,b c", "http://x", "*"),
    "webhook_hosts": ("a b", "a,b c", "http://x", "*", "a.example"),  # the last: without secrets
    "fetch_images": ("a b", "a,b c", "http://x", "*"),
    "hmac_keys": ("short", ",".join("x" * 16 for _ in range(3))),
    "webhook_secrets": ("whsec_!",),
    "renew_s": (*BAD_NUMBERS, "5.9"),
    "lease_s": (*BAD_NUMBERS, "3.9"),  # twice renew_s is 4
}

BLAMED = {
    ("lease_s", "3.9"): "PAGEMILL_RENEW_S",
    ("webhook_hosts", "a.example"): "PAGEMILL_WEBHOOK_SECRETS",
}
"""The variable that a message names, if it is not the bad setting's."""


def bad_values(name: str) -> tuple[str, ...]:
    """Values that a setting must reject; an unknown kind of setting is a failure."""
    if name in SPECIAL:
        return tuple(bad for bad in SPECIAL[name] if bad)
    kinds = leaves(HINTS[name])
    if kinds <= {int, float}:
        return tuple(bad for bad in BAD_NUMBERS if bad)
    if kinds <= {bool}:
        return ("maybe", "2", "nan")
    if kinds == {str} and refuses(HINTS[name], "a b"):
        return tuple(bad for bad in BAD_WORDS if bad)
    if kinds == {Literal}:
        return ("foo", "Auto ", "0")
    raise AssertionError(
        f"{name}: nothing says what is allowed; annotate it, or add what it refuses to SPECIAL"
    )


def leaves(kind: Any) -> set[Any]:
    """Return the members of a union type, without None."""
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(leaves, get_args(kind))) - {types.NoneType}
    if origin is typing.Annotated:
        return leaves(get_args(kind)[0])
    return {Literal if origin is Literal else kind}


def refuses(kind: Any, bad: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(bad)
    except ValidationError:
        return True
    return False


def is_number(kind: Any) -> bool:
    return any(plain in (int, float) for plain in (kind, *get_args(kind)))


def bad_options() -> Iterator[tuple[tuple[str, ...], Any, Any, str]]:
    """(command's words, command, parameter, bad value) for every parameter but flags."""
    for path, command in COMMANDS.values():
        if hasattr(command, "commands"):
            continue
        for parameter in command.params:
            kind = parameter.type_descriptor.annotation
            if bool in (kind, *get_args(kind)) or parameter.name in CONTENT or parameter.is_eager:
                continue
            bad = BAD_WORDS[:-1] if parameter.name in WITH_SPACES else BAD_WORDS
            if is_number(kind):
                bad = BAD_NUMBERS
            elif parameter.name == "redis_url":
                bad = BAD_URLS
            elif path == ("worker",):
                bad = bad_values(parameter.name)
            for value in bad:
                yield path, command, parameter, value


Told = Callable[..., str]
PROGRAM = get_command(app)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs a command that must not start; returns its single line of output."""

    def run(config: WorkerConfig) -> int:
        raise AssertionError(f"a worker would have started with {config}")

    def refused(*words: str, **variables: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                PROGRAM.main(list(words), prog_name="pagemill")
        said = capsys.readouterr()
        assert ended.value.code == 2, said
        assert said.out == ""
        (line,) = said.err.splitlines()
        return line

    monkeypatch.setattr(worker_command, "_run", run)
    return refused


class Offenses:
    """Collects failures, so that a loop lists all of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self.found.append(f"{what}: {error!r}"[:600])


@pytest.fixture
def offenses() -> Iterator[Offenses]:
    offenses = Offenses()
    yield offenses
    assert not offenses.found, "\n".join(offenses.found)


def test_every_setting_has_a_flag_of_its_name_with_a_help_text() -> None:
    """Secrets do not have one; all exceptions but --engine are older than the rule."""
    names = {"drain_grace_s": "--drain-grace", "adapters": "--adapter", "engine_url": "--engine"}
    wrong = []
    for command, classes, without in (
        ("worker", (EngineConfig, WorkerConfig), {"engine", *SECRETS}),
        ("up", (UpSettings,), {"worker"}),
    ):
        flags = {each.name: each for each in COMMANDS[f"pagemill {command}"][1].params}
        for name, setting in settings_of(*classes).items():
            if not setting.doc:
                wrong.append(f"{command}: no docstring under the field {name}")
            if (name in without) != (name not in flags):
                wrong.append(f"{command}: {name} {'is' if name in flags else 'is not'} a flag")
            elif name in flags and names.get(name, f"--{name.replace('_', '-')}") not in flags[name].opts:
                wrong.append(f"{command}: {name} has the flag {flags[name].opts}")
    assert not wrong, wrong


@pytest.mark.slow
def test_every_option_refuses_what_makes_no_sense(told: Told, offenses: Offenses) -> None:
    for path, command, parameter, bad in bad_options():
        with offenses.of(f"{' '.join(path)} {parameter.opts[0]} {bad[:12]!a}"):
            refuse_option(path, command, parameter, bad, told)


def refuse_option(path: tuple[str, ...], command: Any, parameter: Any, bad: str, told: Told) -> None:
    words = list(path)
    for other in command.params:
        name = other.opts[0] if other.opts[0].startswith("-") else other.metavar
        if name in FILLED and (other.required or other.name == "model") and other is not parameter:
            words += [name, FILLED[name]] if name.startswith("-") else [FILLED[name]]
    if parameter.opts[0].startswith("-"):
        line = told(*words, f"{parameter.opts[0]}={bad}")
        assert BLAMED.get((parameter.name, bad), parameter.opts[0]) in line
    else:
        line = told(*words, "--", bad)
        assert line.startswith(str(parameter.metavar or parameter.name.upper()))
    for variable in filter(None, [parameter.envvar]):
        assert variable in line
        # An empty variable counts as not set.
        if bad and variable != "PAGEMILL_MODEL":
            assert variable in told(*words, **{variable: bad})


@pytest.mark.slow
def test_every_setting_of_a_worker_refuses_what_makes_no_sense(told: Told, offenses: Offenses) -> None:
    for name in SETTINGS:
        for bad in bad_values(name):
            with offenses.of(f"{name} {bad[:12]!a}"):
                refuse_setting(name, bad, told)


def refuse_setting(name: str, bad: str, told: Told) -> None:
    variable = f"PAGEMILL_{name.upper()}"
    expected = BLAMED.get((name, bad), variable)
    model = [] if name == "model" else ["--model", "echo"]
    assert expected in told("worker", *model, **{variable: bad})
    if name not in SECRETS:
        line = told("worker", *model, "--option", f"{name}={bad}")
        assert expected in line
    if name not in ("model", *SECRETS) and expected not in SECRET_VARIABLES:
        assert "--worker-option" in told(
            "run", "a.jsonl", "--out", "b.jsonl", "--worker-option", f"{name}={bad}"
        )


def test_options_that_are_no_settings_are_refused(told: Told) -> None:
    for option in ("no_such=1", "no-equals", "=1", "a b=1"):
        told("worker", "--model", "echo", "--option", option)
    for pair in ("acme", "=3", "acme=0", "acme=1001", "acme=x", "a b=3"):
        told("queue", "weights", pair, PAGEMILL_REDIS_URL="redis://127.0.0.1:1")


def test_a_setting_given_as_an_option_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was once overruled: by the default of an absent flag."""
    started: list[WorkerConfig] = []
    monkeypatch.setattr(worker_command, "_run", lambda config: started.append(config) or 0)
    words = ["worker", "--model", "echo", "--option", "drain_grace_s=1", "--option", "max_num_seqs=7"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (started[0].drain_grace_s, started[0].engine.max_num_seqs) == (1.0, 7)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(f"PAGEMILL_{name.upper()}", "")
    assert WorkerConfig.load(model="echo") == WorkerConfig.load(model="echo", queue="default")


def test_an_engine_refuses_what_makes_no_sense(offenses: Offenses) -> None:
    for option in (each.name for each in fields(EngineConfig)):
        for bad in (*bad_values(option), float("nan"), [], object()):
            if option == "adapters" and bad == []:
                continue  # an empty list is valid
            with (
                offenses.of(f"{option}={bad!r}"),
                pytest.raises(ConfigError, match=option if option != "model" else None),
            ):
                LLM(**{"model": "echo", option: bad})  # type: ignore[arg-type]


def test_a_gateway_refuses_what_makes_no_sense(offenses: Offenses) -> None:
    for option in (each.name for each in fields(GatewayConfig)):
        for bad in (float("nan"), -1, 10**40, "a b", [["a b"]]):
            with offenses.of(f"{option}={bad!r}"), pytest.raises(ValidationError):
                GatewayConfig(**{option: bad if option != "keys_path" else object()})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_a_producer_refuses_what_makes_no_sense(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in BAD_URLS:
        with pytest.raises(InvalidAddress):
            kind(url)
    bad: list[dict[str, Any]] = [
        {"queue": "a b"}, {"tenant": ""}, {"hmac_key": "short"}, {"durability": "maybe"},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(InvalidJob):
            kind("redis://127.0.0.1:1", **options)
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "http://host")
    with pytest.raises(InvalidAddress):
        kind()


def test_a_secret_is_not_repeated(told: Told) -> None:
    assert "hunter2" not in told("worker", "--model", "echo", PAGEMILL_HMAC_KEYS="hunter2")
    for url in ("http://:hunter2@host", "redis://:hunter2@host/x", "redis://:hunter2/x@host:1/0"):
        assert "hunter2" not in told("worker", "--model", "echo", "--redis-url", url)
        assert "hunter2" not in told("workers", PAGEMILL_REDIS_URL=url)
        with pytest.raises(InvalidAddress) as refused:
            Producer(url)
        assert "hunter2" not in str(refused.value)
