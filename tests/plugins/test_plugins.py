"""A package that extends Pagemill: installed into a folder, found by its entry points, imported when it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, run_python
from tests.engine.models.families.native_cases import write_llama

pytestmark = pytest.mark.slow  # every script loads the engine

EXAMPLE = ROOT / "tests" / "plugins" / "example"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, in a separate folder with the metadata of its distribution."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for file in EXAMPLE.rglob("*"):
        if file.suffix in (".py", ".toml"):
            copy = source / file.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def run(script: str, installed: Path | None, *arguments: str, **environment: str) -> tuple[Any, str]:
    """Run a script next to the example; returns its JSON output, and its log."""
    paths = [*([] if installed is None else [str(installed)]), str(ROOT)]
    ran = run_python(
        "-c",
        f"import json, logging, sys\nlogging.basicConfig()\n{script}",
        *arguments,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def example_model(directory: Path) -> Path:
    write_llama(directory)
    file = directory / "config.json"
    fields = {"model_type": "example_llama", "architectures": ["ExampleForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


GENERATE = """
from pagemill.engine.errors import EngineError
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

outcomes = []
for model in sys.argv[1:]:
    try:
        llm = LLM(model, num_threads=1, num_kv_blocks=16)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        outcomes.append(list(output.outputs[0].token_ids))
    except EngineError as error:
        outcomes.append(f"{type(error).__name__}: {error}")
print(json.dumps([outcomes, "pagemill_example" in sys.modules]))
"""


def test_a_family_and_a_hub_serve_a_model(installed: Path, tmp_path: Path) -> None:
    example_model(tmp_path / "org" / "tiny")
    write_llama(tmp_path / "plain")
    models = ("example:org/tiny", "example:org/none", "example:org/raises", "broken:org/tiny", "example:tiny")
    (outcomes, _), _ = run(
        GENERATE, installed, str(tmp_path / "plain"), *models, PAGEMILL_EXAMPLE_HUB=str(tmp_path)
    )
    plain, tiny, missing, raising, broken, misspelt = outcomes
    assert tiny == plain
    assert len(tiny) == 4
    assert missing == "ModelLoadError: the example hub has no model org/none"
    assert raising == "EngineError: can't get example:org/raises: ValueError: out of order"
    for part in ("pagemill-example 1.0", "'broken'", "pagemill.hubs", "RuntimeError: a part is missing"):
        assert part in broken
    assert "neither a folder nor a repository's name" in misspelt


def test_nothing_of_it_is_imported_for_others(installed: Path, tmp_path: Path) -> None:
    """Also if a name is already Pagemill's own: that is logged, and not used."""
    write_llama(tmp_path)
    (outcomes, is_imported), log = run(GENERATE, installed, str(tmp_path))
    assert len(outcomes[0]) == 4
    assert not is_imported
    assert "the package pagemill-example 1.0 registers 'llama'" in log
    (outcomes, _), log = run(GENERATE, None, str(example_model(tmp_path / "other")))
    assert outcomes[0].startswith(
        "ModelLoadError: model type 'example_llama' (ExampleForCausalLM) is not sup"
    )
    assert "pagemill-example" not in log


def test_what_cannot_be_used_names_its_package(installed: Path, tmp_path: Path) -> None:
    for kind in ("broken", "wrong"):
        write_llama(tmp_path / kind)
        file = tmp_path / kind / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": f"example_{kind}"}))
    (outcomes, _), _ = run(GENERATE, installed, str(tmp_path / "broken"), str(tmp_path / "wrong"))
    assert all(one.startswith("ModelLoadError: model type 'example_") for one in outcomes)
    assert all("the package pagemill-example 1.0 registers" in one for one in outcomes)
    assert "RuntimeError: a part is missing" in outcomes[0]
    assert "which is not a Family" in outcomes[1]


TOOLS = """
from dataclasses import asdict

from pagemill.common.chat.families import find_tools
from pagemill.common.chat.syntax import ChatSyntax
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.producer.wire.chat.parser import parse_whole

found = {}
for name in ("example_tools", "example_broken", "hermes", "klingon"):
    try:
        found[name] = EngineConfig(model="echo", tool_call_parser=name).tool_call_parser
    except ConfigError as error:
        found[name] = str(error)
text = sys.argv[1]
answers = [asdict(parse_whole(ChatSyntax.read(f"/{name}"), text)) for name in ("example_tools", "example_broken")]
print(json.dumps([found, answers, find_tools("hermes").opens]))
"""
TEXT = 'Look: <call>weather {"city": "Rome"}</call>'


def test_a_syntax_of_calls_is_named_and_read(installed: Path) -> None:
    (found, (answer, unread), opens), log = run(TOOLS, installed, TEXT)
    assert (found["example_tools"], found["hermes"], opens) == ("example_tools", "hermes", ["<tool_call>"])
    assert answer["calls"] == [{"name": "weather", "arguments": '{"city": "Rome"}'}]
    assert answer["content"] == "Look:"
    assert (unread["content"], unread["calls"]) == (TEXT, [])
    assert "RuntimeError: a part is missing" in found["example_broken"]
    assert "'example_tools'" in found["klingon"]
    assert "registers 'hermes' as one of pagemill.tool_parsers, but Pagemill has that name itself" in log
    assert "calls are not separated from the text: the package pagemill-example 1.0" in log


def test_a_reader_without_the_package_leaves_calls_in_the_text() -> None:
    (found, (answer, _), _), _ = run(TOOLS, None, TEXT)
    assert "'example_tools' is not valid" in found["example_tools"]
    assert (answer["content"], answer["calls"]) == (TEXT, [])


def test_two_packages_of_one_name_are_refused(installed: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "rival-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(
        "[pagemill.tool_parsers]\nexample_tools = rival:SYNTAX\nno good = rival:SYNTAX\n"
    )
    both = Path(os.pathsep.join(map(str, (installed, tmp_path))))
    (found, _, _), log = run(TOOLS, both, TEXT)
    assert "several packages register 'example_tools'" in found["example_tools"]
    assert "pagemill-example 1.0, the package rival 2.0" in found["example_tools"]
    assert "registers 'no good'" in log
