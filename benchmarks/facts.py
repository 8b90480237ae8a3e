"""Facts to plant in a long text and to ask about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A sentence `opening answer.` and a question that `answer` answers."""

    opening: str
    answer: str
    question: str

    @property
    def sentence(self) -> str:
        """What is planted."""
        return f"{self.opening} {self.answer}."

    def is_answered(self, words: str) -> bool:
        """Whether `words` hold the answer."""
        return self.answer.lower() in words.lower()
