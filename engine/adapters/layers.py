"""The linear layers of a loaded model for adapters: the layer of each change, and the shared slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.copies import check_copies
from pagemill.engine.adapters.folder import LowRank, read_adapter
from pagemill.engine.errors import AdapterError
from pagemill.engine.layers.linear import Linear
from pagemill.engine.models.families.family import Family, unchanged
from pagemill.kernels.types.low_rank import ENTRY_NUMBERS, LowRankTable, Matrices


@dataclass(frozen=True, slots=True)
class ReadyAdapter:
    """An adapter's matrices on the device, in the order of the model's parts."""

    adapter: Adapter
    matrices: list[Matrices | None]
    entries: torch.Tensor
    """int64 [num_parts, ENTRY_NUMBERS], on the host."""


@dataclass(frozen=True, slots=True)
class _Part:
    linear: Linear
    in_features: int
    width: int
    index: int
    """Among all parts of the model."""


class AdaptedLayers:
    """The linear layers of one model, with tables for `num_slots` adapters."""

    def __init__(
        self,
        module: Any,
        family: Family,
        directory: Path,
        warm_up: Callable[[], None],
        *,
        num_slots: int,
        max_rank: int,
    ) -> None:
        """`module`: a causal language model that its device has rewritten; `warm_up`: `warm_up_adapters` of that."""
        self._directory, self._warm_up = directory, warm_up
        self._family, self._config = family, module.config
        self._max_rank = max_rank
        self._parts: dict[str, _Part] = {}
        self._linears: list[tuple[Linear, slice]] = []
        head = module.get_output_embeddings()
        self._head = {path for path, child in module.named_modules() if child is head}
        self._embeddings = {path for path, child in module.named_modules() if isinstance(child, nn.Embedding)}
        outside = _outside_decoder(module)
        for linear in module.modules():
            if (
                not isinstance(linear, Linear)
                or linear is head
                or not all(path for path, _ in linear.sources)
            ):
                continue
            if linear in outside:  # a layer of the head, which only sees the rows that are sampled
                self._head |= {path for path, _ in linear.sources}
            else:
                self._add(linear)
        self._device = next(module.parameters()).device
        self._dtype: torch.dtype = module.dtype
        self._entries = torch.zeros(
            num_slots, len(self._parts), ENTRY_NUMBERS, dtype=torch.int64, device=self._device
        )
        for linear, parts in self._linears:
            widths = [width for _, width in linear.sources]
            linear.adapters = LowRankTable.of_widths(self._entries[:, parts], widths, max_rank)

    def _add(self, linear: Linear) -> None:
        first = len(self._parts)
        for index, (path, width) in enumerate(linear.sources):
            self._parts[path] = _Part(linear, linear.in_features, width, first + index)
        self._linears.append((linear, slice(first, len(self._parts))))

    def read(self, adapter: Adapter) -> ReadyAdapter:
        """Read an adapter's folder, check it against this model, and load its matrices. Safe on any thread.

        `adapter.rank` and `num_bytes` are not inspected: the result's adapter has them.

        Raises:
            AdapterError: the folder is unreadable, or its matrices do not fit this model.
        """
        folder = read_adapter(adapter.directory)
        if adapter.digest != folder.digest:  # after an eviction it has been checked
            self._check_copies(folder.copies)
        matrices: list[Matrices | None] = [None] * len(self._parts)
        entries = torch.zeros(len(self._parts), ENTRY_NUMBERS, dtype=torch.int64)
        num_bytes, rank = 0, max(change.rank for change in folder.layers.values())
        if rank > self._max_rank:
            raise AdapterError(f"the rank of {rank} is more than max_adapter_rank ({self._max_rank})")
        for trained_path, trained in folder.layers.items():
            for path, change in self._converted(trained_path, trained):
                part = self._part(path, change)
                a, b = pair = self._placed(change)
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise AdapterError(f"{path} has numbers that {self._dtype} does not hold")
                matrices[part.index] = pair
                entries[part.index] = torch.tensor(_entry(pair))
                num_bytes += a.nbytes + b.nbytes
        self._warm_up()
        found = Adapter(adapter.name, adapter.directory, folder.digest, rank, num_bytes)
        return ReadyAdapter(found, matrices, entries)

    def install(self, slot: int, ready: ReadyAdapter) -> None:
        """Put an adapter into a slot that no row uses. Call it on the engine's thread, between two steps."""
        for linear, parts in self._linears:
            assert linear.adapters is not None
            linear.adapters.matrices[slot] = ready.matrices[parts]
        self._entries[slot].copy_(ready.entries)

    @contextmanager
    def random_adapter(self) -> Iterator[None]:
        """Put random matrices of the highest rank into slot 0 for the block: for steps before a model serves."""
        generator = torch.Generator().manual_seed(0)
        by_size: dict[tuple[int, int], Matrices] = {}
        for part in self._parts.values():
            size = part.in_features, part.width
            if size not in by_size:
                a, b = (torch.randn(n, self._max_rank, generator=generator) for n in size)
                by_size[size] = self._placed(LowRank(a.t(), b, (part.in_features * self._max_rank) ** -0.5))
        matrices = [by_size[part.in_features, part.width] for part in self._parts.values()]
        entries = torch.tensor([_entry(pair) for pair in matrices]).reshape(-1, ENTRY_NUMBERS)
        adapter = Adapter("random", self._directory, "", self._max_rank, 0)
        self.install(0, ReadyAdapter(adapter, [*matrices], entries))
        try:
            yield
        finally:
            self.clear(0)

    def clear(self, slot: int) -> None:
        """Remove the adapter of a slot."""
        self._entries[slot] = 0
        for linear, _ in self._linears:
            assert linear.adapters is not None
            linear.adapters.matrices.pop(slot, None)

    def _check_copies(self, copies: Mapping[str, torch.Tensor]) -> None:
        for path in copies:
            if path not in self._head | self._embeddings:
                raise AdapterError(f"{path} is saved as a whole weight: only linear layers can be adapted")
        check_copies(copies, self._directory, next(iter(self._embeddings)))

    def _placed(self, change: LowRank) -> Matrices:
        b = (change.b.float() * change.scale).t()
        return tuple(  # type: ignore[return-value]
            matrix.to(self._dtype).contiguous().clone().to(self._device) for matrix in (change.a, b)
        )

    def _part(self, path: str, change: LowRank) -> _Part:
        if path in self._head or path in self._embeddings:
            raise AdapterError(
                f"the adapter changes {path}, which is not supported: train the linear layers inside the decoder only"
            )
        if ".experts." in path:
            raise AdapterError(f"the adapter changes {path}: adapters of experts are not supported")
        part = self._parts.get(path)
        if part is None:
            known = sorted({known.rpartition(".")[2] for known in self._parts})
            raise AdapterError(
                f"the adapter changes {path}, which is not a separate linear layer of this model; "
                f"those are {', '.join(known)}"
            )
        shape = (change.b.shape[0], change.a.shape[1])
        if shape != (part.width, part.in_features):
            raise AdapterError(
                f"{path}: it was trained on {shape[1]} inputs and {shape[0]} outputs, this model has "
                f"{part.in_features} and {part.width} there; it belongs to another model"
            )
        return part

    def _converted(self, path: str, change: LowRank) -> Sequence[tuple[str, LowRank]]:
        """Return the change as changes of the layers in the running model.

        A family that renames or splits a checkpoint's weights rearranges rows, and B's rows are the weight's.
        """
        if path not in self._parts and self._family.text_name is not None:
            name = self._family.text_name(f"{path}.weight")
            path = path if name is None else name.removesuffix(".weight")
        if path in self._parts or self._family.convert_tensors is unchanged:
            return [(path, change)]
        try:
            tensors = self._family.convert_tensors({f"{path}.weight": change.b}, self._config)
        except Exception as error:  # it may need tensors that are not present
            raise AdapterError(f"{path} can't be converted to this model's layers: {error}") from error
        converted = [
            (name.removesuffix(".weight"), LowRank(change.a, b, change.scale)) for name, b in tensors.items()
        ]
        rows = sum(len(part.b) for _, part in converted)
        if rows != len(change.b) or any(part.b.shape[1] != change.rank for _, part in converted):
            raise AdapterError(f"{path} can't be converted to this model's layers")
        return converted


def _entry(matrices: Matrices) -> list[int]:
    """Return the entry of a part in `LowRankTable.entries`."""
    a, b = matrices
    return [a.data_ptr(), b.data_ptr(), len(a), 0]


def _outside_decoder(module: Any) -> set[nn.Module]:
    """Return the modules outside the decoder: those of the head."""
    names = dict(module.named_children())
    if module.base_model_prefix not in names:
        return set()
    return {
        part for name, child in names.items() if name != module.base_model_prefix for part in child.modules()
    }
