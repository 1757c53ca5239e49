"""Every benchmark can be imported, and `benchmarks.all` runs only what there is."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import benchmarks
from benchmarks import all as everything


def test_every_module_can_be_imported() -> None:
    names = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    failures = {}
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            failures[name] = repr(error)
    assert "benchmarks.gpu.sections.decode" in names
    assert not failures


def test_every_command_of_the_list_is_there() -> None:
    for quick in (False, True):
        listed = everything.commands(quick)
        assert len(listed) == len(everything.COMMANDS)
        assert all(find_spec(module) for _, module, *_ in listed)
    assert set(everything.QUICK) <= {command[0] for command in everything.COMMANDS}
