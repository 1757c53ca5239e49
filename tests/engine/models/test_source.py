"""How a model's name is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.cli.terminal.checked import served_name
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.source import ModelSource

HUB = "huggingface"


@pytest.mark.parametrize(
    ("given", "kind", "name", "revision", "served"),
    [
        ("echo:5", "echo", "echo:5", None, "echo"),
        ("smollm2", "packaged", "smollm2", None, "smollm2"),
        ("facebook/opt-125m", HUB, "facebook/opt-125m", None, "facebook/opt-125m"),
        ("Qwen/Qwen3-0.6B@v1.0", HUB, "Qwen/Qwen3-0.6B", "v1.0", "Qwen/Qwen3-0.6B"),
        ("a/b@refs/pr/3", HUB, "a/b", "refs/pr/3", "a/b"),
        ("modelscope:Qwen/Qwen3-0.6B@master", "modelscope", "Qwen/Qwen3-0.6B", "master", "Qwen/Qwen3-0.6B"),
        ("/models/tiny", "folder", "/models/tiny", None, "tiny"),
        ("./no/such", "folder", "./no/such", None, "such"),
        ("~/models/tiny/", "folder", "~/models/tiny/", None, "tiny"),
    ],
)
def test_names(given: str, kind: str, name: str, revision: str | None, served: str) -> None:
    source = ModelSource.parse(given)
    assert (source.kind, source.name, source.revision) == (kind, name, revision)
    assert source.served_name == served == served_name(given)
    assert source.is_remote == (kind in (HUB, "modelscope"))
    assert str(source) == given


def test_a_folder_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ModelSource.parse("org/tiny").kind == HUB
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert ModelSource.parse("org/tiny").kind == "folder"
    assert served_name("org/tiny") == "tiny"


@pytest.mark.parametrize(
    "hostile",
    [
        "", "gpt2", "a/b/c", "org/..", "../../etc@x/..", "org/na me", "org/name@", "org/name@../../x", "org/name@-x",
        "org/name@a..b", "org/name@/x", "org/a--b", "org/name.git", ".org/name", "org/-name", "org/name\n", "org/näme",
        "modelscope:", "modelscope:name", "modelscope:../x", "modelscope:/etc/passwd", "org/" + "x" * 97, "org/n\0",
        "https://huggingface.co/org/name", "org//name",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(hostile: str) -> None:
    if hostile.startswith("../"):
        assert ModelSource.parse(hostile).kind == "folder"
        return
    with pytest.raises(ModelLoadError, match=r"give a folder, a \.gguf file, org/name"):
        ModelSource.parse(hostile)
