"""Prompts with pictures: the tokens and arrays of one complete call of transformers' processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill.engine.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagemill.engine.images.processor import ImageProcessor
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.tokenizer import load_tokenizer
from tests.engine.images.model_folders import TYPES, encoded, noise, write_folder
from tests.engine.images.tiny_checkpoint import whole_call

PARAMS = SamplingParams(max_tokens=4)
PICTURES = [encoded(noise(80, 60)), encoded(noise(31, 97, seed=1)), encoded(noise(200, 20, seed=2))]
QUICK = {"smolvlm"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "What?"}]}],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Left:\n"},
                {"type": "image", "image": PICTURES[1]},
                {"type": "text", "text": "\nright: "},
                {"type": "image", "image": PICTURES[0]},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A \n\n B"}]},
        {
            "role": "user",
            "content": [{"type": "image", "image": PICTURES[2]}, {"type": "text", "text": "\n\nand this?"}],
        },
    ],
]  # fmt: skip


def inputs_of(directory: Path, images: ImageProcessor | str, max_model_len: int = 2000) -> InputProcessor:
    limits = InputLimits(60_000, max_model_len, 100_000, 8)
    return InputProcessor(load_tokenizer(directory), limits, images=images)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InputProcessor]:
    directory = write_folder("llava", tmp_path_factory.mktemp("llava"))
    images = ImageProcessor(directory)
    yield inputs_of(directory, images)
    images.close()


def user(*parts: str | bytes) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_tokens_and_arrays_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    directory = write_folder(model_type, tmp_path)
    images = ImageProcessor(directory)
    inputs = inputs_of(directory, images)
    for chat in CHATS:
        try:
            messages = inputs.read_images(chat)
        except UnsupportedFeature as error:
            if "torchvision" not in str(error):
                raise
            pytest.skip("this release of transformers prepares the type's images with torchvision alone")
        expected = whole_call(directory, chat)
        token_ids, _ = inputs.process(messages=messages, params=PARAMS)
        assert token_ids == list(expected["input_ids"][0])
        media = inputs.media_of(token_ids, messages)
        for name in ("pixel_values", "image_grid_thw"):
            if name not in expected:
                continue
            rows = [np.asarray(row) for row in expected[name]]
            if model_type in ("smolvlm", "idefics3"):  # one sample, with all tiles
                rows = list(rows[0])
                own = [tile for item in media for tile in item.inputs[name][0]]
            else:
                own = [row for item in media for row in item.inputs[name]]
            assert len(own) == len(rows)
            for mine, theirs in zip(own, rows, strict=True):
                crop = tuple(slice(size) for size in mine.shape)  # others pad it to the largest of the call
                assert np.array_equal(mine, theirs[crop])
        places = [place for item in media for place in range(item.offset, item.offset + item.length)]
        placeholder = images.markers.placeholder_id
        assert {at for at, token in enumerate(token_ids) if token == placeholder} <= set(places)
        assert all(token_ids[item.offset] == placeholder for item in media)
        assert all(token_ids[item.offset + item.length - 1] == placeholder for item in media)
    images.close()


@pytest.mark.slow
def test_a_text_with_the_mark_is_not_a_picture(llava: InputProcessor) -> None:
    for text in ("<image>", "a <image> b"):
        messages = llava.read_images(user(PICTURES[0], text))
        with pytest.raises(
            InvalidRequest, match=r"has <image> 2 times for 1 images: texts must not contain it"
        ):
            llava.process(messages=messages, params=PARAMS)
    token_ids, _ = llava.process(messages=user("a <image> b"), params=PARAMS)
    assert llava.media_of(token_ids, user("a <image> b")) == ()


def test_texts_alone_are_rendered_as_parts_for_templates_that_read_parts(tmp_path: Path) -> None:
    directory = write_folder("smolvlm", tmp_path)
    inputs = inputs_of(directory, "no")
    chat = [{"role": "user", "content": "Hello"}]
    token_ids, _ = inputs.process(messages=chat, params=PARAMS)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>User: Hello<end_of_utterance>\nAssistant:"


def test_placeholders_count_as_prompt_tokens(llava: InputProcessor, tmp_path: Path) -> None:
    messages = llava.read_images(user(PICTURES[0], "What?"))
    plain, _ = llava.process(messages=user("What?"), params=PARAMS)
    token_ids, _ = llava.process(messages=messages, params=PARAMS)
    assert len(token_ids) > len(plain) + 3
    images = llava._images
    assert isinstance(images, ImageProcessor)
    short = inputs_of(images.directory, images, max_model_len=10)
    with pytest.raises(PromptTooLong, match="image 3 brings the prompt to 12 image tokens"):
        short.read_images(user(*PICTURES))
    messages = short.read_images(user(*PICTURES[:2]))
    with pytest.raises(PromptTooLong):
        short.process(messages=messages, params=PARAMS)


def test_a_picture_is_not_cut(llava: InputProcessor) -> None:
    messages = llava.read_images(user(PICTURES[0], "What is this?"))
    token_ids, _ = llava.process(messages=messages, params=PARAMS)
    (item,) = llava.media_of(token_ids, messages)
    for most, is_cut in ((len(token_ids) - item.offset, False), (len(token_ids) - item.offset - 1, True)):
        shortened, _ = llava.process(
            messages=messages, params=SamplingParams(max_tokens=4, truncate_prompt_tokens=most)
        )
        if is_cut:
            with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must not cut an image"):
                llava.media_of(shortened, messages)
        else:
            assert llava.media_of(shortened, messages)[0].offset == 0


def test_other_roles_and_models_are_refused(llava: InputProcessor) -> None:
    chat = user(PICTURES[0])
    with pytest.raises(UnsupportedFeature, match="role system; use user"):
        llava.read_images([{**chat[0], "role": "system"}])
    with pytest.raises(UnsupportedFeature, match="qwen2 does not read"):
        inputs_of(llava._images.directory, "qwen2 does not read images").read_images(chat)  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="must be texts and images"):
        llava.read_images([{"role": "user", "content": [{"type": "audio", "audio": b""}]}])
