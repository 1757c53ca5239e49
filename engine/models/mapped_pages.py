"""Releases the memory of a mapped weight file once it has been read; the page cache may retain it."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
# The Hugging Face Hub's cache contains links to files that are named by their hash.
_WEIGHTS = re.compile(r"(\.safetensors|/blobs/[0-9a-f]{40,64})$")


class MappedPages:
    """The address ranges of mapped safetensors files; empty if the system does not report them."""

    def __init__(self) -> None:
        lines = _MAPS.read_text().splitlines() if _MAPS.exists() else []
        ranges = [line.split(maxsplit=1)[0].split("-") for line in lines if _WEIGHTS.search(line)]
        self._ranges = [(int(begin, 16), int(end, 16)) for begin, end in ranges]

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop a tensor's pages from this process, if a file backs them; later reads reload them.

        They have not been written, so the file contains the dropped data.
        """
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and last <= high for low, high in self._ranges):
            drop_pages(tensor)


def drop_pages(tensor: torch.Tensor) -> None:
    """Drop the pages of a contiguous tensor that is mapped from a file and never written to."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
