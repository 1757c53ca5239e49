"""The modes that replace a GPU record exactly the operations that a GPU would reject or wait for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pagemill.kernels import dispatch
from pagemill.kernels.types.transfer import to_device
from tests.engine.execution.meta_gpu import META, MIXED, PAGEABLE, READ, meta_gpu

_HOST, _INDEX = torch.arange(4.0), torch.tensor([1, 2])


def _copied(x: torch.Tensor) -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    x.copy_(host, non_blocking=True)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (READ, lambda x: x.tolist()),
        (READ, lambda x: x[0].item()),
        (READ, lambda x: x.cpu().numpy()),
        (READ, lambda x: bool((x > 0).any())),
        (READ, lambda x: x[x > 0]),
        (READ, lambda x: x.nonzero()),
        (READ, lambda x: torch.equal(x, x)),
        (PAGEABLE, lambda x: torch.tensor([1, 2], device=x.device)),
        (PAGEABLE, lambda x: x.new_tensor([1, 2])),
        (PAGEABLE, lambda x: x[[0, 1]]),
        (PAGEABLE, lambda x: x.__setitem__([0, 1], 5.0)),
        (PAGEABLE, lambda x: _HOST.to(x.device)),
        (PAGEABLE, lambda x: x.copy_(_HOST)),
        (PAGEABLE, lambda x: torch.empty(4).copy_(x)),
        (PAGEABLE, lambda x: torch.empty(4, pin_memory=True).copy_(x)),
        (MIXED, lambda x: x[_INDEX]),
        (MIXED, lambda x: dispatch.rms_norm(x[None], _HOST, 1e-6)),
        (None, lambda x: to_device(np.arange(3), x.device)),
        (None, lambda x: x.masked_fill_(x > 0, 1.0)),
        (None, lambda x: x.__setitem__(x > 0, 1.0)),
        (None, lambda x: x[x.long()]),
        (None, lambda x: x * torch.tensor(3.0)),
        (None, lambda x: dispatch.rms_norm(x[None], x, 1e-6)),
        (None, _copied),
        (None, lambda _: _HOST[_INDEX].tolist()),
    ],
)  # fmt: skip
def test_findings(kind: str | None, run: Callable[[torch.Tensor], object], inference: bool) -> None:
    with meta_gpu() as (_, watch), torch.inference_mode(inference):
        x = torch.zeros(4, device=META)
        run(x)
        assert not watch.findings, "outside of a stage"
        with watch.during("step"):
            run(x)
    assert [finding.kind for finding in watch.findings] == [kind] * (kind is not None)
