"""Command-line options that are generated from classes of settings.

A setting is declared once: as a field of `EngineConfig`, `WorkerConfig` or `UpSettings`, with a docstring under it.
A field `max_num_seqs` of the first two yields:

- the flag `--max-num-seqs` of `pagemill worker`, whose help text is the docstring and the default value,
- the variable `PAGEMILL_MAX_NUM_SEQS`, read by `WorkerConfig.load`,
- the key `max_num_seqs` in the table `[worker]` of a file for `pagemill up`.

A field of `UpSettings` yields the same for `pagemill up`. Commands list only what the command line adds to a setting,
such as another metavar, and which flags their help shows first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel

from pagemill.cli.terminal.checked import checked
from pagemill.cli.terminal.options import docstrings, leaves

FURTHER = "Further options"
MAX_CHOICES_WIDTH = 48
"""Longer lists of choices are left to the error message."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a class of settings."""

    name: str
    kind: Any
    """Its annotation, with metadata."""
    default: Any
    doc: str


def settings_of(*classes: type, without: Collection[str] = ()) -> dict[str, Setting]:
    """Return the fields of the classes by name, in the order of their declaration."""
    found: dict[str, Setting] = {}
    for kind in classes:
        hints, docs = get_type_hints(kind, include_extras=True), docstrings(kind)
        for name, default in _defaults(kind).items():
            found[name] = Setting(name, hints[name], default, docs.get(name, "").replace("`", ""))
    return {name: setting for name, setting in found.items() if name not in without}


def option(
    setting: Setting, flag: str = "", *, kind: Any = None, is_checked: bool = False, **more: Any
) -> Any:
    """Return the annotation of a command's parameter for a setting.

    Args:
        flag: the option's name, if it is not the setting's.
        kind: the parameter's type; by default a text, which the class of settings validates.
        is_checked: validate and convert the text by the setting's annotation.
        more: arguments of `typer.Option` that replace the generated ones.
    """
    flag = flag or f"--{setting.name.replace('_', '-')}"
    found = leaves(setting.kind)
    if bool in found:
        if setting.default is not False:
            flag = f"{flag}/--no-{flag[2:]}"
        kind, metavar, is_checked = bool, None, False
    else:
        metavar = _metavar(found)
    generated: dict[str, Any] = {"metavar": metavar, "help": _help(setting)}
    if is_checked:
        generated["callback"] = checked(setting.kind)
    return Annotated[(kind or str) | None, typer.Option(flag, **generated | more)]


def options(
    settings: Mapping[str, Setting],
    special: Mapping[str, Mapping[str, Any]],
    *,
    first: Sequence[str],
    is_checked: bool = False,
) -> dict[str, Any]:
    """Return the parameters of all settings, `first` ahead of the others, which help shows under `FURTHER`.

    `special`: further arguments of `option` by setting.
    """
    found = {name: option(settings[name], is_checked=is_checked, **special.get(name, {})) for name in first}
    for name in (name for name in settings if name not in first):
        found[name] = option(
            settings[name], is_checked=is_checked, rich_help_panel=FURTHER, **special.get(name, {})
        )
    return found


class SettingsHelp:
    """Makes the help of a command group options by panel, as plain text; a base ahead of typer's class."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if hasattr(self, "format_commands"):
            self.format_commands(ctx, formatter)


def _defaults(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: field.default for name, field in kind.model_fields.items()}
    return {field.name: None if field.default is MISSING else field.default for field in fields(kind)}


def _help(setting: Setting) -> str:
    """Return the docstring, followed by the default value unless the docstring states one or there is none."""
    default = setting.default
    if "Default" in setting.doc or default is None or default is False or default in ("", ()):
        return setting.doc
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{setting.doc} Default: {shown}."


def _metavar(leaves: set[Any]) -> str:
    for kind in leaves:
        if get_origin(kind) is Literal:
            choices = "|".join(map(str, get_args(kind)))
            return choices if len(choices) <= MAX_CHOICES_WIDTH else "NAME"
    names = {int: "INTEGER", float: "FLOAT", Path: "PATH"}
    return next((names[kind] for kind in leaves if kind in names), "TEXT")
