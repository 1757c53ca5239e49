"""Folders that are not adapters of this model: one clear error each, and the model continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import AdapterError, ConfigError, UnknownAdapter
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.adapters.trained import Trained, merged_tokens, save_adapter
from tests.engine.tiny_model import save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 9, 2]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def sound(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(model, tmp_path_factory.mktemp("sound") / "a")


@pytest.fixture(scope="module")
def llm(model: Path, sound: Path) -> LLM:
    return LLM(str(model), adapters=(f"sound={sound}",), skip_tokenizer_init=True, num_kv_blocks=32)


def config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        held = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(held)
        save_file(held, file)

    return apply


def nan(held: dict[str, torch.Tensor]) -> None:
    held[f"{LAYER}.lora_B.weight"][1, 1] = torch.nan


def other_shape(held: dict[str, torch.Tensor]) -> None:
    held[f"{LAYER}.lora_A.weight"] = torch.zeros(8, 48)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "truncated": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x00" * 30),
        "can't load the weights",
    ),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "can't read"),
    "another method": (config(peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "another task": (config(task_type="SEQ_CLS"), "task_type 'SEQ_CLS' is not supported"),
    "DoRA": (config(use_dora=True), "DoRA is not supported"),
    "biases": (config(bias="all"), "biases"),
    "a bias": (config(lora_bias=True), "a separate bias"),
    "whole modules": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "changes the model's own weights"),
    "what is new": (config(use_bdlora={"x": 1}), "'use_bdlora' is not supported"),
    "a forged line": (config(**{"x\n\x1b[2J": 1}), "'x\\n\\x1b[2J' is not supported"),
    "a hostile pattern": (config(alpha_pattern={"(a+)+$": 1}), "only names of layers"),
    "patterns of another type": (config(alpha_pattern=["q_proj"]), "alpha_pattern is not an object"),
    "a mistyped pattern": (config(alpha_pattern={"q_porj": 4}), "'q_porj', which matches no layer of it"),
    "another rank": (config(r=16), "has rank 8, but adapter_config.json says r=16"),
    "no number": (config(lora_alpha="8"), "not a number"),
    "NaN": (tensors(nan), "values that are not finite"),
    "infinite alpha": (config(lora_alpha=1e300), "numbers that torch.float32 does not hold"),
    "another model's": (tensors(other_shape), "48 inputs and 32 outputs, this model has 32 and 32"),
    "a half": (tensors(lambda held: held.pop(f"{LAYER}.lora_A.weight")), "only one of lora_A and lora_B"),
    "ranks that differ": (
        tensors(lambda held: held.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 32)})),
        "lora_A has rank 4 and lora_B 8",
    ),
    "integers": (
        tensors(lambda held: held.update({f"{LAYER}.lora_A.weight": torch.zeros(8, 32, dtype=torch.int8)})),
        "not a matrix of 16-, 32- or 64-bit floats",
    ),
    "8-bit floats": (
        tensors(lambda held: held.update({f"{LAYER}.lora_A.weight": torch.zeros(8, 32).to(torch.float8_e4m3fn)})),
        "not a matrix of 16-, 32- or 64-bit floats",
    ),
    "an alpha of 400 digits": (config(lora_alpha=10**400), "lora_alpha is not a finite number"),
    "a NaN alpha": (config(lora_alpha=float("nan")), "lora_alpha is not a finite number"),
    "nested too deeply": (
        lambda folder: (folder / "adapter_config.json").write_text('{"x": ' * 100_000 + "1" + "}" * 100_000),
        "can't read",
    ),
    "unknown layers": (
        tensors(lambda held: held.update(
            {f"base_model.model.model.layers.7.x.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}
        )),
        "which is not a separate linear layer",
    ),
    "a stray tensor": (
        tensors(lambda held: held.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 8)})),
        "an adapter of embeddings",
    ),
    "other embeddings": (
        tensors(lambda held: held.update({"base_model.model.model.embed_tokens.weight": torch.ones(61, 32)})),
        "model.embed_tokens differs from the model's: merge it",
    ),
    "a resized vocabulary": (
        tensors(lambda held: held.update({"base_model.model.lm_head.weight": torch.ones(64, 32)})),
        "lm_head has the shape [64, 32], the model's has [61, 32]: the vocabulary was resized",
    ),
    "a whole norm": (
        tensors(lambda held: held.update({"base_model.model.model.norm.weight": torch.ones(32)})),
        "model.norm is saved as a whole weight",
    ),
    "the head": (
        tensors(lambda held: held.update({
            "base_model.model.lm_head.lora_A.weight": torch.zeros(8, 32),
            "base_model.model.lm_head.lora_B.weight": torch.zeros(61, 8),
        })),
        "changes lm_head",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_one_clear_error(case: str, llm: LLM, model: Path, sound: Path, tmp_path: Path) -> None:
    spoil, message = WRONG[case]
    folder = tmp_path / "bad"
    shutil.copytree(sound, folder)
    spoil(folder)
    with pytest.raises(AdapterError) as error:
        llm.add_adapter("bad", str(folder))
    assert message in str(error.value)
    assert str(error.value).startswith("adapter bad: ")
    assert "\n" not in str(error.value)
    (output,) = llm.generate([PROMPT], PARAMS, adapter="sound", use_tqdm=False)
    assert output.outputs[0].token_ids == merged_tokens(model, sound, [PROMPT], 4)[0]


def test_ranks_folders_and_names(llm: LLM, model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank of 80 is more than max_adapter_rank"):
        llm.add_adapter("large", str(save_adapter(model, tmp_path / "large", Trained(rank=80))))
    with pytest.raises(AdapterError, match="does not exist"):
        llm.add_adapter("away", str(tmp_path / "away"))
    with pytest.raises(UnknownAdapter, match="unknown adapter 'x'; known: sound"):
        llm.generate([PROMPT], PARAMS, adapter="x", use_tqdm=False)


def test_a_configured_adapter_without_a_folder_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter a: folder .* does not exist"):
        LLM(str(model), adapters=(f"a={tmp_path / 'gone'}",), skip_tokenizer_init=True, num_kv_blocks=32)


def test_a_folder_that_changes_after_it_was_added(model: Path, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(sound, folder)
    llm = LLM(str(model), adapters=(f"a={folder}", f"b={sound}"), skip_tokenizer_init=True, num_kv_blocks=32)
    config(lora_alpha=3)(folder)
    first, second = llm.generate([PROMPT, PROMPT[::-1]], PARAMS, adapter=["a", "b"], use_tqdm=False)
    assert first.error_code == "engine_error"
    assert "have changed since the adapter was added" in (first.error or "")
    assert second.error is None
    llm.add_adapter("a", str(folder))
    (again,) = llm.generate([PROMPT], PARAMS, adapter="a", use_tqdm=False)
    assert again.outputs[0].token_ids == merged_tokens(model, folder, [PROMPT], 4)[0]


@pytest.mark.slow
def test_pickled_weights_are_converted(llm: LLM, model: Path, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(sound, folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    llm.add_adapter("pickled", str(folder))
    (output,) = llm.generate([PROMPT], PARAMS, adapter="pickled", use_tqdm=False)
    assert output.outputs[0].token_ids == merged_tokens(model, sound, [PROMPT], 4)[0]


def test_settings(sound: Path) -> None:
    for text, message in (("a", "is not NAME=FOLDER"), ("a b=x", "1 to 64"), ("=x", "1 to 64")):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model="echo", adapters=(text,))
    assert EngineConfig(model="echo", adapters=f"a={sound} b={sound}").adapters == (
        f"a={sound}",
        f"b={sound}",
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="adapters: a is given more than once"):
        EngineConfig(model="echo", adapters=(f"a={sound}", "b=x", "a=y"))
    with pytest.raises(ConfigError, match=r"adapters=.* with tensor_parallel_size=2 is not supported"):
        EngineConfig(model="echo", adapters=(f"a={sound}",), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="lanes, more than"):
        EngineConfig(model="echo", served_model_name=tuple("abcdefgh"), max_adapters=256)


def test_echo_has_none() -> None:
    llm = LLM("echo")
    with pytest.raises(UnknownAdapter, match="unknown adapter 'a': this model takes none"):
        llm.generate("x", PARAMS, adapter="a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_models_own_embeddings_are_accepted(
    dtype: torch.dtype, llm: LLM, model: Path, sound: Path, tmp_path: Path
) -> None:
    """PEFT saves them with `save_embedding_layers=True`, and by default if it cannot detect a resize."""
    folder = tmp_path / "copies"
    shutil.copytree(sound, folder)
    base = load_file(model / "model.safetensors")
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in base]
    copies = {f"base_model.model.{name}": base[name].to(dtype) for name in names}
    copies.setdefault("base_model.model.lm_head.weight", base["model.embed_tokens.weight"].to(dtype).clone())
    tensors(lambda held: held.update(copies))(folder)
    llm.add_adapter("copies", str(folder))
    (output,) = llm.generate([PROMPT], PARAMS, adapter="copies", use_tqdm=False)
    (expected,) = llm.generate([PROMPT], PARAMS, adapter="sound", use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    "layer", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)
def test_an_adapter_whose_products_overflow_fails_its_requests_alone(
    layer: str, llm: LLM, model: Path, sound: Path, tmp_path: Path
) -> None:
    folder = save_adapter(model, tmp_path / "large", Trained(targets=(layer,)))
    tensors(lambda held: [held[name].sign_().mul_(1e19) for name in held])(folder)
    llm.add_adapter("large", str(folder))
    bad, good = llm.generate([PROMPT, PROMPT], PARAMS, adapter=["large", "sound"], use_tqdm=False)
    assert (bad.error_code, good.error_code) == ("output_invalid", None)
    (alone,) = llm.generate([PROMPT], PARAMS, adapter="sound", use_tqdm=False)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
