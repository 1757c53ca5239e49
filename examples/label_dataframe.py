"""A column of labels for a data frame: `python -m examples.label_dataframe`. Polars and Arrow are no different."""

from __future__ import annotations

import os

import pandas as pd

from pagemill.producer.dataset.pipeline import Pipeline

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
REVIEWS = pd.DataFrame({"text": ["Works as it should.", "Broke after a day.", "I would buy it again."]})


def label(frame: pd.DataFrame, column: str, labels: list[str]) -> pd.Series:
    """One of `labels` for each row, null where a row failed. Rows keep the frame's index."""
    template = f"Answer with {' or '.join(labels)}: {{{{ row[{column!r}] }}}}"
    return Pipeline(template, model=MODEL, choices=labels).run(frame).frame["output"]


if __name__ == "__main__":
    print(REVIEWS.assign(label=label(REVIEWS, "text", ["good", "bad"])))
