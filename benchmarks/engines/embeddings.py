"""Vectors of ragged texts: pagemill beside Sentence Transformers and fastembed (ONNX Runtime), the same weights.

    python -m benchmarks.engines.embeddings --model DIRECTORY [--onnx FILE]

Each slice of the texts goes through every engine in turn, in one process; a ratio is the median over the slices of one
engine's seconds over another's. Sentence Transformers sorts texts by length itself; fastembed gets them sorted.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.report import result_path, write
from pagemill.engine.config import EngineConfig
from pagemill.engine.pooling.engine import PoolingEngine
from pagemill.engine.pooling.input_processor import PoolInput
from pagemill.engine.serving import load_engine

Vectors = np.ndarray[Any, np.dtype[np.float32]]
Encode = Callable[[list[str]], Vectors]
_PASSAGE = """the of a queue worker vector that returns every text in order and while some are short others go on
about capitals of countries such as France where most of what is written has more than one sentence"""
WORDS = _PASSAGE.split()


def ragged_texts(count: int, median_words: int, seed: int = 0) -> list[str]:
    """Texts of log-normal lengths, as passages of a corpus have."""
    draw = random.Random(seed)
    lengths = [1 + int(median_words * draw.lognormvariate(0.0, 0.8)) for _ in range(count)]
    return [" ".join(draw.choices(WORDS, k=length)) for length in lengths]


def pagemill_encode(model: Path, num_threads: int) -> Encode:
    engine = load_engine(EngineConfig(model=str(model), num_threads=num_threads, device="cpu"))
    assert isinstance(engine, PoolingEngine)

    def encode(texts: list[str]) -> Vectors:
        """A request per text, as a queue of jobs brings them."""
        rows: dict[str, Vectors] = {}
        for start in range(0, len(texts), 64):
            for number, text in enumerate(texts[start : start + 64], start):
                given = PoolInput(kind="embed", texts=[text], truncate=True)
                ids, params, task = engine.input_processor.process_pool(given)
                engine.add_request(str(number), ids, params, task=task)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                if output.pooled is not None:
                    rows[output.request_id] = np.frombuffer(output.pooled.data, np.float32)
        return np.stack([rows[str(number)] for number in range(len(texts))])

    return encode


def sentence_transformers_encode(model: Path) -> Encode:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(model), device="cpu")
    return lambda texts: np.asarray(theirs.encode(texts, show_progress_bar=False), np.float32)


def fastembed_encode(model: Path, onnx: Path, num_threads: int, directory: Path) -> Encode:
    from fastembed import TextEmbedding

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(model / name, directory / name)
    shutil.copy(onnx, directory / "model.onnx")
    name = "sentence-transformers/all-MiniLM-L6-v2"
    theirs = TextEmbedding(name, specific_model_path=str(directory), threads=num_threads)

    def encode(texts: list[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = list(theirs.embed([texts[number] for number in order], batch_size=32))
        vectors = np.empty((len(texts), len(found[0])), np.float32)
        vectors[order] = np.stack(found)
        return vectors

    return encode


def export(model: Path, path: Path) -> None:
    """Write the encoder as ONNX, with fastembed's names."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            return self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    ids = torch.ones(2, 7, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden(),
            (ids, ids, ids * 0),
            str(path),
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=axes,
            dynamo=False,
            opset_version=17,
        )


def measure(engines: dict[str, Encode], texts: list[str], slices: int) -> dict[str, Any]:
    """Return each engine's seconds per slice, the ratios to the first, and the least cosine with its vectors."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cosines = dict.fromkeys(engines, 1.0)
    for encode in engines.values():
        encode(texts[:16])
    for number in range(slices):
        part = texts[number::slices]
        names = list(engines)
        vectors: dict[str, Vectors] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            vectors[name] = engines[name](part)
            seconds[name].append(time.perf_counter() - began)
        first = vectors[names[0]]
        for name in names:
            cosines[name] = min(cosines[name], float((first * vectors[name]).sum(1).min()))
        print(number, {name: round(times[-1], 1) for name, times in seconds.items()}, flush=True)
    ours, *others = seconds
    ratios = {
        name: statistics.median(
            theirs / mine for theirs, mine in zip(seconds[name], seconds[ours], strict=True)
        )
        for name in others
    }
    return {"seconds": seconds, "times_faster_than": ratios, "least_cosine": cosines}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Sentence Transformers directory")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--median-words", type=int, default=20)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-fastembed", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    if machine.is_busy():
        print("this machine is busy: compare ratios, not seconds", file=sys.stderr)
    started, where = datetime.now(UTC), machine.describe()
    torch.set_num_threads(given.threads)
    texts = ragged_texts(given.texts, given.median_words)
    with tempfile.TemporaryDirectory() as name:
        engines = {
            "pagemill": pagemill_encode(given.model, given.threads),
            "sentence-transformers": sentence_transformers_encode(given.model),
        }
        if not given.without_fastembed:
            exported = Path(name) / "exported.onnx"
            export(given.model, exported)
            engines["fastembed"] = fastembed_encode(given.model, exported, given.threads, Path(name))
        figures = measure(engines, texts, given.slices)
    report = {"date": started.isoformat(timespec="seconds"), "machine": where, "model": given.model.name}
    settings = {"texts": given.texts, "median_words": given.median_words, "threads": given.threads}
    path = given.out or result_path("embeddings", started)
    write(path, report | settings | figures)
    print(figures["times_faster_than"], figures["least_cosine"], f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
