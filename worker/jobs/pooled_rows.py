"""The rows of a job for vectors, labels or scores, in the form that its result stores."""

from __future__ import annotations

import base64

from pagemill.engine.outputs import PooledRows
from pagemill.producer.wire.schema.outputs import Rows, RowsDtype


def rows_of(pooled: PooledRows, dtype: RowsDtype) -> Rows:
    """Encode the rows, as float32 if a value is too large for float16."""
    import numpy as np  # a worker without model libraries does not have it

    rows = np.frombuffer(pooled.data, "<f4").reshape(-1, pooled.width)
    data = pooled.data
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = rows.astype("<f2")
        if np.isfinite(halves).all():
            data = halves.tobytes()
        else:
            dtype = "float32"
    shape = (len(rows), pooled.width)
    return Rows.model_construct(dtype=dtype, shape=shape, data=base64.b64encode(data).decode())


def encoded_bytes(num_rows: int, width: int, dtype: RowsDtype) -> int:
    """Return the length of the rows' base64."""
    return -(-num_rows * width * (2 if dtype == "float16" else 4) // 3) * 4
