"""A column of labels for a pandas frame: `python -m examples.label_dataframe`. Polars differs by a line or two."""

from __future__ import annotations

import os

import pandas as pd

from pagemill import Producer

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
REVIEWS = pd.DataFrame({"text": ["Works as it should.", "Broke after a day.", "I would buy it again."]})


def label(frame: pd.DataFrame, column: str, labels: list[str]) -> pd.Series:
    """One of `labels` for each row, None where a row failed. Rows keep the frame's index."""
    jobs = (
        {
            "messages": [{"role": "user", "content": f"Answer with {' or '.join(labels)}: {text}"}],
            "model": MODEL,
            "temperature": 0.0,
            "structured_outputs": {"choice": labels},
            "key": str(position),
        }
        for position, text in enumerate(frame[column])
    )
    with Producer() as queue:
        found = {item.key: item.result for item in queue.submit_many(jobs).results()}
    values = [result.text if (result := found[str(position)]) else None for position in range(len(frame))]
    return pd.Series(values, index=frame.index, name="label")


if __name__ == "__main__":
    print(REVIEWS.assign(label=label(REVIEWS, "text", ["good", "bad"])))
