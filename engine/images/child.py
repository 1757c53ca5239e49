"""The process in which pictures are decoded and prepared: see `processor.py`.

It runs the model's transformers processor on one picture at a time, with the Pillow and numpy backend. Once that is
loaded, the process cannot open files or sockets.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

from pagemill.engine.child_process import limit_memory
from pagemill.engine.limited_server import LimitedServer

LOAD_S = 60.0
"""Seconds of CPU time to load a processor."""
CALL_S = 20.0
"""Seconds of CPU time for one picture."""
MEMORY_MIB = 3072
"""Memory in addition to that of the started process."""
MAX_RESULT_BYTES = 512 << 20
"""Limit of the arrays of one picture."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NICENESS = 5


class ImageServer(LimitedServer):
    """Prepares pictures with one processor."""

    def __init__(self, connection: socket.socket, call_s: float, max_pixels: int) -> None:
        super().__init__(connection)
        self._call_s, self._max_pixels = call_s, max_pixels
        self._processor: Any = None

    def _load(self, directory: str) -> tuple[str, int, str, bool]:
        """Load the processor of a model's folder.

        Returns:
            The text that represents a picture, the id of the tokens whose embeddings its vectors replace, the
            tokenizer's token for the start of a text, which may be empty, and whether the processor prepares a
            picture differently if the prompt has others.
        """
        from PIL import Image

        self._arm(LOAD_S)
        Image.init()
        self._processor, placeholder_id = load_processor(Path(directory))
        self._sees_others = "batch_num_images" in self._processor.image_processor.model_input_names
        self._placeholder = self._processor.tokenizer.convert_ids_to_tokens(placeholder_id)
        self._prepare(Image.new("RGB", (64, 64)), True)  # imports the modules for pictures
        _forbid_files()
        bos = self._processor.tokenizer.bos_token or ""
        return self._processor.image_token, placeholder_id, bos, self._sees_others

    def _read(self, data: bytes, is_alone: bool) -> tuple[str, int, list[tuple[str, str, Any, bytes]]]:
        """Prepare a picture.

        Returns:
            The text that represents it in the prompt, the number of placeholders in it, and the encoder's arguments:
            name, dtype, shape and bytes.
        """
        self._arm(self._call_s)
        return self._prepare(decoded(data, self._max_pixels), is_alone)

    def _prepare(self, image: Any, is_alone: bool) -> tuple[str, int, list[tuple[str, str, Any, bytes]]]:
        import numpy as np

        # Only the number of other pictures matters.
        count = 1 if is_alone or not self._sees_others else 2
        outputs = self._processor(
            images=[[image] * count],
            text=[self._processor.image_token * count],
            return_text_replacement_offsets=True,
            return_tensors=None,
        )
        text = outputs.pop("text_replacement_offsets")[0][0]["replacement"]
        arrays = []
        for name in self._processor.image_processor.model_input_names:
            if name in outputs:
                array = np.asarray(outputs[name])
                if len(array) % count == 0:
                    array = array[: len(array) // count]
                arrays.append((name, array.dtype.str, array.shape, array.tobytes()))
        if sum(len(array[-1]) for array in arrays) > MAX_RESULT_BYTES:
            raise ValueError(
                f"the picture's arrays for the model have more than {MAX_RESULT_BYTES >> 20} MiB"
            )
        return text, text.count(self._placeholder), arrays


def decoded(data: bytes, max_pixels: int) -> Any:
    """Return a picture as displayed: the first frame, upright, in RGB, on white if it is transparent.

    Raises:
        ValueError: it has too many pixels, or is not a picture of a supported format.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # compared below
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"the file is not a picture in one of the formats {', '.join(FORMATS)}") from None
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(
            f"the picture has {width} x {height} pixels, the limit is {max_pixels:,} pixels (max_image_pixels)"
        )
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256, "L")  # conversion to RGB would cut off values over 255
    if image.has_transparency_data:
        image = image.convert("RGBA")  # conversion to RGB would show the colors of transparent pixels
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def load_processor(directory: Path) -> tuple[Any, int]:
    """Return the model's processor without the parts for videos and sound, and the id of its placeholders.

    Raises:
        ValueError: it does not exist, or requires a package that is missing.
    """
    from transformers import AutoConfig
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    from pagemill.engine.text.tokenizer_files import read_tokenizer

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    cls = name and _without_videos(name)
    if not cls:
        raise ValueError(f"transformers has no processor for pictures of model type {config.model_type!r}")
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            directory, backend="pil", local_files_only=True
        ),
        "tokenizer": read_tokenizer(directory),
    }
    settings, _ = cls.get_processor_dict(str(directory), local_files_only=True)
    processor = cls.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], settings)
    placeholder_id = getattr(config, "image_token_id", None)
    return processor, processor.image_token_id if placeholder_id is None else placeholder_id


def _without_videos(name: str) -> Any:
    """Return a class of transformers' processors that only needs the parts for texts and pictures."""
    import importlib

    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    if name == "PixtralProcessor":  # it imports a function from the backend that needs torchvision
        folder = "transformers.models.pixtral"
        same = importlib.import_module(f"{folder}.image_processing_pil_pixtral")
        sys.modules.setdefault(f"{folder}.image_processing_pixtral", same)
        found = importlib.import_module(f"{folder}.processing_pixtral").PixtralProcessor
    else:
        found = processor_class_from_name(name)

    class Parts(ProcessorMixin):  # type: ignore[misc]
        """Replaces the base class, which rejects an incomplete processor."""

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, *_: Any, **__: Any) -> None:
            self.image_processor, self.tokenizer = image_processor, tokenizer
            self.video_processor = self.feature_extractor = self.chat_template = None

    module = importlib.import_module(found.__module__)
    if vars(module).get("num2words", str) is None:
        vars(module)["num2words"] = str  # the package is needed to describe videos
    return type(name, (found, Parts), {})


def _forbid_files() -> None:
    """Prevent the process from opening further files or sockets."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def main(connection: socket.socket, call_s: float, memory_mib: int, max_pixels: int) -> None:
    """Serve one connection."""
    os.nice(_NICENESS)
    # Loading torch takes longer than everything else, and pictures only need numpy.
    for name in ("torch", "torchvision"):
        sys.modules[name] = None  # type: ignore[assignment]
    import transformers  # noqa: F401

    limit_memory(memory_mib << 20, is_final=True)
    ImageServer(connection, call_s, max_pixels).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
