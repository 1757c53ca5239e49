"""docs/settings.md lists every setting; `python -m tests.cli.test_settings_page` rewrites it from the code."""

from __future__ import annotations

import re
from typing import Any

from typer.main import get_command

from pagemill.__main__ import app
from pagemill.cli.terminal.setting_flags import settings_of
from pagemill.engine.config import EngineConfig
from pagemill.supervisor.settings import UpSettings
from pagemill.worker.config import SECRETS, WorkerConfig
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "settings.md"
SOURCES = ("producer", "worker", "engine", "kernels", "monitoring", "pagemill")

INTRO = """\
# Settings

For operators: every setting, its default and its meaning. `pagemill COMMAND --help` shows the flags of a command.
`python -m tests.cli.test_settings_page` generates this page from the code.

A flag takes precedence over its `PAGEMILL_*` variable, and a variable over the default.
An empty variable counts as not set. An invalid setting exits with code 2 before anything starts.
"""

OTHERS = """\
## Clients and all commands

| Variable | Meaning |
| --- | --- |
| `PAGEMILL_REDIS_URL` | The queue's server. Default: the embedded server of this user, if one runs. |
| `PAGEMILL_REDIS_USERNAME`, `PAGEMILL_REDIS_PASSWORD` | Credentials for a URL without them. |
| `PAGEMILL_QUEUE` | The queue that commands use. Default: `default`. |
| `PAGEMILL_MODEL` | The model of workers, and of `pagemill submit` without `--model`. |
| `PAGEMILL_HMAC_KEYS` | Keys that sign jobs and verify them ([Security](security.md#signed-jobs)). |
| `PAGEMILL_ENCRYPTION_KEYS`, `PAGEMILL_ENCRYPTION_KEYS_COMMAND`, `PAGEMILL_ENCRYPTION_REQUIRED` | Encryption at rest \
([Confidentiality](confidentiality.md#encryption-at-rest)). |
| `PAGEMILL_STORE_URL`, `PAGEMILL_STORE_OVER_BYTES` | Where large payloads and results\
 are stored, and from which size on ([Storage](storage.md)). |
| `PAGEMILL_API_KEY` | Key of the API of `--to openai:...` ([Cascades](labels.md#a-last-model-behind-another-api)). |
| `PAGEMILL_STATE_DIR` | Data of the embedded server, and journals of runs on object stores. |
| `PAGEMILL_CACHE_DIR`, `PAGEMILL_CACHE_GIB` | Converted models, and their total size.\
 Default: `~/.cache/pagemill`, 100 GiB. |
| `PAGEMILL_RUN_DIR`, `PAGEMILL_UP_CONFIG` | Run directory and settings file of `pagemill up`. |
| `PAGEMILL_LOG_FORMAT`, `PAGEMILL_LOG_LEVEL` | Format and lowest level of log lines, except Celery's. |

Pagemill also reads variables of [model hubs](models.md#download-a-model), `OTEL_EXPORTER_OTLP_ENDPOINT`,
`NUMBA_CACHE_DIR`, `TRITON_CACHE_DIR`, `XDG_STATE_HOME`, and the credentials of the object store in use.
"""

COMMON = {"PAGEMILL_REDIS_URL", "PAGEMILL_QUEUE", "PAGEMILL_LOG_LEVEL", "PAGEMILL_LOG_FORMAT"}
"""Variables of the options that many commands share."""
INTERNAL = {"PAGEMILL_PRIVATE_KERNEL_CACHE"}
"""Set by a process for its children, not by a user."""


def settings_table(owner: type, *others: type) -> str:
    """Return a row per setting that is not shared with `others`: its name, its default and its docstring."""
    rows = ["| Setting | Default | Meaning |", "| --- | --- | --- |"]
    known = {(name, setting.doc) for name, setting in settings_of(*others, without={"engine"}).items()}
    for name, setting in settings_of(owner, without={"engine"}).items():
        if (name, setting.doc) in known:
            continue
        meaning = f"{setting.doc} Environment only." if setting.name in SECRETS else setting.doc
        rows.append(f"| `{setting.name}` | {default(setting.default)} | {cell(meaning)} |")
    return "\n".join(rows) + "\n"


def options_table(*words: str) -> str:
    """Return a row per option of a command, except common ones: its flags, its default and its help text."""
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    rows = ["| Option | Default | Meaning |", "| --- | --- | --- |"]
    for option in command.params:
        if option.envvar in COMMON:
            continue
        variable = f" (`{option.envvar}`)" if option.envvar else ""
        rows.append(f"| `{option.opts[0]}`{variable} | {default(option.default)} | {cell(option.help)} |")
    return "\n".join(rows) + "\n"


def default(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    text = str(getattr(value, "get_secret_value", lambda: value)() if value is not None else "")
    return f"`{text}`" if value not in (None, (), {}) and text else ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """Return the page's expected text."""
    return "\n".join(
        (
            INTRO,
            "## Engine\n\nSettings of `pagemill worker` and arguments of `LLM`.\n",
            settings_table(EngineConfig),
            "## Worker\n",
            settings_table(WorkerConfig),
            "## pagemill up\n\nKeys of its file, flags of the command, and variables, also `queue`, `state_dir`, "
            "`log_format` and `log_level`.\n",
            settings_table(UpSettings, WorkerConfig),
            "## Gateway\n\nOptions of `pagemill gateway`. It also has `--redis-url`, `--queue`, `--log-level` and "
            "`--log-format`.\n",
            options_table("gateway"),
            "## Exporter\n\nOptions of `pagemill exporter`. It also has `--redis-url`, `--log-level` and "
            "`--log-format`.\n",
            options_table("exporter"),
            OTHERS,
        )
    )


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.cli.test_settings_page"


def test_every_variable_is_on_the_page() -> None:
    settings = settings_of(EngineConfig, WorkerConfig, UpSettings)
    named = {f"PAGEMILL_{name.upper()}" for name in settings} | INTERNAL
    named |= set(re.findall(r"PAGEMILL_[A-Z_]+", page()))
    read = {
        name
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bPAGEMILL_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert sorted(read - named) == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
