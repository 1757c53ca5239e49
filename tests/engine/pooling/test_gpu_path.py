"""Models for vectors and scores on CUDA's path, without a GPU: no tensor of the computation stays on the host."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel, AutoModelForSequenceClassification

pytest.importorskip("triton")

from pagemill.engine.config import EngineConfig
from pagemill.engine.pooling.folder import read_pooling_folder
from pagemill.engine.pooling.loader import PackedBatch, load_pooling_model
from tests.engine.execution.meta_gpu import meta_gpu
from tests.engine.pooling.tiny_pooling import DECODERS, ENCODERS, save_base

_LENGTHS = [1, 3, 3, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [(name, kind) for name in (*ENCODERS, *DECODERS) for kind in ("vectors", "labels")
     if kind == "labels" or name in ENCODERS],
)  # fmt: skip
def test_a_batch_stays_on_the_device(model_type: str, kind: str, tmp_path: Path) -> None:
    config = deepcopy((ENCODERS | DECODERS)[model_type])
    config.num_labels = 3
    save_base(tmp_path, config, AutoModel if kind == "vectors" else AutoModelForSequenceClassification)
    folder = read_pooling_folder(tmp_path)
    assert folder is not None
    ids = np.arange(3, 3 + sum(_LENGTHS), dtype=np.int64)
    batch = PackedBatch(ids, _LENGTHS, np.zeros_like(ids))
    with meta_gpu() as (device, watch):
        model = load_pooling_model(EngineConfig(model=str(tmp_path), dtype="bfloat16"), folder, device)
        with watch.during("step"):
            (rows,) = model.launch(batch).wait()
    assert len(rows) == len(_LENGTHS)
    assert not watch.findings, watch.details
