"""All caches of the engine have a limit in bytes, in total and in practice."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

import pagemill
from pagemill.common.structured_outputs import MAX_SCHEMA, StructuredOutputs
from pagemill.engine.byte_cache import ByteCache
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output import choice, compiler
from pagemill.engine.structured_output.schema_process import SchemaProcess
from pagemill.engine.text import input_processor
from tests.conftest import run_python

MIB = 1 << 20
BOUNDED_BY_CONSTRUCTION = {
    "engine/config.py": "one answer",
    "engine/text/byte_level.py": "one table of 256 characters",
    "engine/text/text_encoder.py": "8 tokenizers at most",
    "engine/text/text_child.py": "4 templates at most, and one tokenizer",
    "engine/models/formats/gguf_conversion.py": "one table of a format's names",
    "engine/devices/cpu.py": "one answer",
    "engine/models/families/adaptations.py": "an entry per share of the models that are loaded",
    "engine/execution/sampling/processors.py": "the bad words of 16 requests at most, which have a limit",
    "engine/execution/sampling/narrow_head.py": "8 selections of 256 channels at most",
    "kernels/cpu/matmul/bf16.py": "one answer",
    "kernels/cpu/matmul/fp32.py": "one answer",
    "kernels/cpu/matmul/int8.py": "one answer",
    "kernels/cpu/jit/compiler.py": "one directory",
    "kernels/cpu/experts/grouped.py": "an entry per kind of weights",
    "kernels/cpu/experts/rows.py": "no answer, once",
    "kernels/dispatch.py": "an entry per kind of kernels, and per type of device",
    "kernels/gpu/attention.py": "a warning per library and reason",
    "kernels/gpu/tuning.py": "an entry per device, and per shape of the models that are loaded",
}


def attack(engine: Engine, number: int) -> None:
    """Requests near the maximum size of a job, each with new texts."""
    unique = f"{number:08}"
    labels = tuple(f"{label} {unique} {label:0950}" for label in range(60))
    words = tuple(f"{unique} {word:060}" for word in range(200))
    shapes = [
        StructuredOutputs(choice=labels),
        StructuredOutputs(regex="(" * (MAX_SCHEMA - 20) + unique),
        StructuredOutputs(json=json.dumps({"enum": [f"{unique} {value:080}" for value in range(700)]})),
        StructuredOutputs(grammar=f'start: "{unique}" s\ns: s s | /[a-z]/'),
        None,
    ]
    for kind, shape in enumerate(shapes):
        params = SamplingParams(max_tokens=4, structured_outputs=shape, bad_words=() if shape else words)
        name = f"{number}.{kind}"
        try:
            engine.add_request(name, *engine.input_processor.process(prompt=f"{number}", params=params))
        except InvalidRequest:
            continue
        while engine.has_unfinished():
            engine.step()


def num_bytes(kind: type) -> int:
    return sum(cache.num_bytes for cache in gc.get_objects() if type(cache) is kind)


@pytest.mark.slow
def test_all_caches_of_an_engine_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_BYTES", 64 * MIB)
    monkeypatch.setattr(choice, "_CACHE_BYTES", 2 * MIB)
    monkeypatch.setattr(input_processor, "_BAD_WORDS_BYTES", 2 * MIB)
    gc.collect()
    others = num_bytes(ByteCache), num_bytes(SchemaProcess)
    engine = LLM("echo", num_kv_blocks=400).engine
    for number in range(12):  # each adds about 1.1 MiB of labels, 0.3 MiB of words and 18 MiB of schemas
        attack(engine, number)
        assert num_bytes(ByteCache) - others[0] <= 2 * 2 * MIB
        assert num_bytes(SchemaProcess) - others[1] <= 64 * MIB + 32 * MIB, "and two that are in use"
    assert num_bytes(ByteCache) - others[0] > 2 * MIB, "there was something to bound"


def test_every_other_cache_is_known_and_why_it_needs_no_bound() -> None:
    """functools' caches count their entries, or nothing at all."""
    root = Path(pagemill.__path__[0])
    files = [file for folder in ("engine", "kernels") for file in (root / folder).rglob("*.py")]
    assert len(files) > 100
    caching = {
        str(file.relative_to(root))
        for file in files
        if re.search(r"from functools import .*\b(lru_)?cache\b|functools\.(lru_)?cache", file.read_text())
    }
    assert caching == BOUNDED_BY_CONSTRUCTION.keys()


GROWTH = """
import gc, sys
from pathlib import Path
from pagemill.engine.llm import LLM
from tests.engine.test_caches import attack

def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

engine = LLM("echo", num_kv_blocks=400).engine
attack(engine, 0)
before = resident()
for number in range(1, 61):
    attack(engine, number)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no resident size to read")
def test_a_process_that_is_sent_many_large_inputs_does_not_grow_with_them() -> None:
    """60 times about 300 KB of labels, words and schemas, of which a dictionary per token would keep a gigabyte."""
    run = run_python("-c", GROWTH, check=True, timeout=600)
    assert int(run.stdout) < 150
