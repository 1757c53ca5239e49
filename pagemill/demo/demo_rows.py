"""The demo's rows, and the job of each.

`demo_rows.jsonl` holds 200 sentences of customers' reviews with the mean rating (-4 to 4) that at least 20 people
gave each sentence. They come from the data of "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
Social Media Text" (Hutto and Gilbert, 2014), file amazonReviewSnippets_GroundTruth.txt, as shipped in the source
distribution of vaderSentiment 3.3.2 (MIT licence, Copyright (c) 2016 C.J. Hutto; full text in
demo_rows.LICENSE). Of the sentences with 30 to 140 characters and a clear rating (1.5 or more from 0), 100 above
and 100 below were drawn at random; none of them was used to write the prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "smollm2"
LABELS = ("good", "bad")
ROWS_FILE = Path(__file__).with_name("demo_rows.jsonl")

# A small model follows examples better than instructions. As turns of a chat they are the same tokens in every
# job, so that all jobs after the first find them in the prefix cache.
_INSTRUCTION = "Classify each product review as good or bad."
_EXAMPLES = (
    ("the zoom is excellent and the pictures are sharp.", "good"),
    ("it stopped working after two days and support never answered.", "bad"),
    ("easy to set up, and i use it every day.", "good"),
    ("the battery is weak and the buttons feel cheap.", "bad"),
    ("the screen scratches far too easily.", "bad"),
    ("best phone i have owned so far, highly recommended.", "good"),
    ("the manual is useless and the menus are confusing.", "bad"),
    ("sound quality is great for the price.", "good"),
    ("i returned it and asked for my money back.", "bad"),
    ("small, light and very well made.", "good"),
)


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    text: str
    rating: float
    """Mean of human raters, -4 to 4."""

    @property
    def expected(self) -> str:
        return "good" if self.rating > 0 else "bad"


def load_rows(limit: int | None = None) -> list[Row]:
    """The shipped rows, or the first `limit` of them."""
    with ROWS_FILE.open(encoding="utf-8") as lines:
        rows = [Row(**json.loads(line)) for line in lines]
    return rows[:limit]


def job_fields(row: Row) -> dict[str, Any]:
    """The labeling job of one row: the shared turns first, the row last."""
    messages = [{"role": "system", "content": _INSTRUCTION}]
    for text, label in _EXAMPLES:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": label}]
    return {
        "key": row.id,
        "model": MODEL,
        "messages": [*messages, {"role": "user", "content": row.text}],
        "structured_outputs": {"choice": list(LABELS)},
        "temperature": 0.0,
        "max_tokens": 8,
    }
