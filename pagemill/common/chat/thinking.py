"""Reasoning tags: the text between two tags at the start of an output, separate from the rest.

The names are those of vLLM's reasoning parsers. Some templates open the tag in the prompt, with others the model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

ReasoningParser = Literal["harmony", "think", "seed_oss", "magistral", "gemma4", "none"]
"""The names of THINKING; `none` leaves the reasoning in the text."""


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    opening: str
    closing: str
    word: str = ""
    """A string that chat templates contain, if not `closing`."""
    after: str = ""
    """Text between the reasoning and the header of the next message, in a format of messages with headers."""
    answer: str = ""
    """The header of an answer in such a format. A constrained answer follows reasoning, which the prompt opens."""
    stops: tuple[str, ...] = ()
    """Special tokens that end an output, in addition to the model's EOS."""
    efforts: tuple[str, ...] = ()
    """The values of `reasoning_effort` that the models support; empty: any."""

    def is_open_after(self, prompt: str) -> bool:
        """Return True if a prompt ends within the reasoning, as with some templates."""
        return prompt.rfind(self.opening) > prompt.rfind(self.closing) and prompt.rstrip().endswith(
            self.opening
        )


HARMONY: Final = "harmony"
"""The format of gpt-oss, for reasoning and calls together: its messages have channels."""
THINKING: Final[Mapping[str, ThinkingTags]] = {
    HARMONY: ThinkingTags(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        word="<|channel|>",
        after="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        stops=("<|return|>", "<|call|>"),
        efforts=("low", "medium", "high"),
    ),
    "think": ThinkingTags("<think>", "</think>"),
    "seed_oss": ThinkingTags("<seed:think>", "</seed:think>"),
    "magistral": ThinkingTags("[THINK]", "[/THINK]"),
    "gemma4": ThinkingTags("<|channel>thought", "<channel|>"),
}
"""By name. `think` is the form of Qwen3, DeepSeek R1 to V3.2, QwQ, GLM-4.5, MiniMax M2, Kimi K2 and SmolLM3."""


def detect_thinking(template: str) -> str | None:
    """Return the name of a chat template's tags; None if it does not have any."""
    return next((name for name, tags in THINKING.items() if (tags.word or tags.closing) in template), None)
