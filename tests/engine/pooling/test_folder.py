"""Folders of older releases of Sentence Transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagemill.engine.models.hubs.repository import _SMALL_FILES
from pagemill.engine.pooling.folder import EmbedderFolder, read_pooling_folder
from pagemill.engine.pooling.heads import _fill

KINDS = ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_every_kind_of_transformer_apply(kind: str, tmp_path: Path) -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    folder = read_pooling_folder(tmp_path)
    assert isinstance(folder, EmbedderFolder)
    assert (folder.max_seq_length, folder.lowers_case) == (7, True)
    assert any(Path(f"sentence_{kind}_config.json").match(pattern) for pattern in _SMALL_FILES)


@pytest.mark.slow
def test_a_dense_layer_may_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))
    layer = torch.nn.Linear(3, 2)
    torch.save(
        {f"linear.{name}": value for name, value in layer.state_dict().items()},
        tmp_path / "pytorch_model.bin",
    )
    read = torch.nn.Linear(3, 2, device="meta")
    _fill(read, tmp_path, "linear.")
    assert torch.equal(read.weight, layer.weight)
    assert torch.equal(read.bias, layer.bias)
