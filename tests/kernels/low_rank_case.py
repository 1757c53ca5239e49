"""Random adapters of a layer in their table, and a step's rows that use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagemill.kernels.types.low_rank import ENTRY_NUMBERS, AdapterRows, LowRankTable, Matrices, tiled


@dataclass
class LowRankCase:
    x: torch.Tensor
    out: torch.Tensor
    table: LowRankTable
    rows: AdapterRows

    def expected(self) -> torch.Tensor:
        """The outputs in float64, row by row."""
        wanted, starts = self.out.double(), self.table.starts.tolist()
        for row, slot in enumerate(self.rows.slots.tolist()):
            for part, matrices in enumerate(self.table.matrices[slot] if slot >= 0 else ()):
                if matrices is not None:
                    a, b = matrices
                    wanted[row, starts[part] : starts[part + 1]] += (
                        self.x[row].double() @ a.double().t() @ b.double()
                    )
        return wanted


def adapter_rows(slots: list[int]) -> AdapterRows:
    array = np.array(slots, dtype=np.int32)
    return AdapterRows(*(torch.from_numpy(each) for each in (array, *tiled(array))))


def low_rank_case(
    slots: list[int],
    ranks: list[list[int]],
    *,
    in_features: int,
    widths: list[int],
    dtype: torch.dtype = torch.float32,
) -> LowRankCase:
    """Create a case. `ranks`: for each part, for each slot; 0: the adapter does not have this part."""
    torch.manual_seed(3)
    starts = [0, *np.cumsum(widths).tolist()]
    entries = torch.zeros(len(ranks), len(widths), ENTRY_NUMBERS, dtype=torch.int64)
    table = LowRankTable.of_widths(entries, widths, max(map(max, ranks)))
    for slot, parts in enumerate(ranks):
        matrices: list[Matrices | None] = []
        for part, rank in enumerate(parts):
            if not rank:
                matrices.append(None)
                continue
            a, b = torch.randn(rank, in_features).to(dtype), torch.randn(rank, widths[part]).to(dtype)
            matrices.append((a, b))
            entries[slot, part, :3] = torch.tensor([a.data_ptr(), b.data_ptr(), rank])
        table.matrices[slot] = matrices
    x = torch.randn(len(slots), 2 * in_features).to(dtype)[:, :in_features]
    out = torch.randn(len(slots), starts[-1] + 8).to(dtype)[:, : starts[-1]]
    return LowRankCase(x, out, table, adapter_rows(slots))
