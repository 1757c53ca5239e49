"""Questions about pictures, compared with transformers: `python -m benchmarks.engines.images`.

A model of Qwen2.5-VL's type with random weights. transformers gets batches of the same processor, padded on the left.

- pictures: one question about each picture.
- questions: ten questions about each of a tenth as many pictures.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from benchmarks import report
from pagemill.engine.images.child import load_processor
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.images.model_folders import encoded, noise
from tests.engine.images.tiny_checkpoint import write_checkpoint

KIND = "qwen2_5_vl"
PIXELS = 28 * 28
"""Of a token."""
Row = tuple[bytes, str]


def save_model(directory: Path, width: int, layers: int, most_tokens: int) -> Any:
    """Save a model and its processor; returns transformers' model."""
    write_checkpoint(KIND, directory)
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = most_tokens * PIXELS
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(directory)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = width, 3 * width, layers
    text.num_attention_heads, text.num_key_value_heads = width // 64, max(1, width // 128)
    text.layer_types = ["full_attention"] * layers
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]}
    vision.depth, vision.hidden_size, vision.num_heads = layers, width // 2, width // 128
    vision.intermediate_size, vision.out_hidden_size = 2 * width, width
    vision.fullatt_block_indexes = [layers - 1]
    torch.manual_seed(0)
    module: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    module.bfloat16().float().save_pretrained(directory)
    return module.eval()


def rows(workload: str, count: int, size: int) -> list[Row]:
    each = 10 if workload == "questions" else 1
    pictures = [encoded(noise(size, size, seed=number)) for number in range(count // each)]
    return [(picture, f"Question {number}: what is it?") for picture in pictures for number in range(each)]


def chats(work: list[Row]) -> list[Any]:
    return [
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]
        for picture, text in work
    ]


def batches(work: list[Row], size: int) -> Iterator[list[Row]]:
    for begin in range(0, len(work), size):
        yield work[begin : begin + size]


def compare(workload: str, directory: Path, module: Any, args: Any) -> dict[str, Any]:
    """Return the rows per second of both, and how many outputs were equal."""
    work: list[Row] = []
    processor, _ = load_processor(directory)
    processor.tokenizer.padding_side, processor.tokenizer.pad_token = "left", processor.tokenizer.eos_token
    llm = LLM(str(directory), dtype="float32", num_threads=args.threads)

    def ours() -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
        return [result.outputs[0].token_ids for result in llm.chat(chats(work), params, use_tqdm=False)]

    @torch.inference_mode()
    def theirs() -> list[list[int]]:
        found: list[list[int]] = []
        for batch in batches(work, args.batch):
            texts = [
                processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                for chat in chats(batch)
            ]
            pictures = [[Image.open(io.BytesIO(picture)).convert("RGB")] for picture, _ in batch]
            inputs = processor(text=texts, images=pictures, padding=True).convert_to_tensors("pt")
            output = module.generate(
                **inputs, max_new_tokens=args.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            found += output[:, inputs["input_ids"].shape[1] :].tolist()
        return found

    sides: dict[str, Callable[[], list[list[int]]]] = {"pagemill": ours, "transformers": theirs}
    outputs = []
    result: dict[str, Any] = {"workload": workload, "rows": args.rows}
    for name, run in sides.items():
        work[:] = [(encoded(noise(args.size, args.size, seed=-1)), "What?")]
        run()  # starts processes, and compiles
        work[:] = rows(workload, args.rows, args.size)
        began, busy = time.perf_counter(), time.process_time()
        outputs.append(run())
        result[name] = len(work) / (time.perf_counter() - began)
        result[f"{name}_per_cpu_second"] = len(work) / (time.process_time() - busy)
    result |= {
        "ratio": result["pagemill"] / result["transformers"],
        "encoded": llm.engine.stats().media.encoded,
    }
    result["equal_outputs"] = sum(one == other for one, other in zip(*outputs, strict=True))
    llm.close()
    return result


def main() -> None:
    parser = report.parser(__doc__, model=False)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--size", type=int, default=448, help="width and height of a picture")
    parser.add_argument("--most-tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    file = report.Report("images", "questions about pictures beside transformers", args)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        module = save_model(directory, args.width, args.layers, args.most_tokens)
        runs = [compare(workload, directory, module, args) for workload in ("pictures", "questions")]
    print(json.dumps(runs, indent=1))
    file.write({"runs": runs})


if __name__ == "__main__":
    main()
