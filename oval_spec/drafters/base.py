"""What every drafter is. To write one, override `draft`; `prompt_lookup.py` is a short example."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from oval_core import OvalConfig
from oval_spec.cached_model import CachedModel
from oval_spec.page_sets import Ask
from oval_spec.text import Text
from oval_spec.tree import Tree


@dataclass(frozen=True)
class Seen:
    """What a drafter may look at.

    Attributes:
        texts: of all rows; each ends in the root, which the target has chosen but not read.
        running: whether the row goes on. A finished row gets an empty tree.
        hidden: what the target's head got to choose the root from, `[B, hidden]`; None unless `needs_hidden`.
        wants_pages: whether `Drafter.expects` is going to be asked.
    """

    texts: Sequence[Text]
    running: Sequence[bool]
    hidden: Tensor | None
    wants_pages: bool = False


class Drafter:
    """Proposes how texts go on.

    Attributes:
        name: in reports.
        needs_hidden: ask for `Seen.hidden`.
        most_tokens: nodes of the largest tree it makes.
        model: that drafts; None: the target, or none at all.
        paging: how it wants the target's cache to be paged; None: it does not look at it.
    """

    name = "drafter"
    needs_hidden = False
    most_tokens = 8
    model: PreTrainedModel | None = None
    paging: OvalConfig | None = None

    def check(self, target: PreTrainedModel) -> None:
        """Raise TypeError or ValueError if it cannot draft for `target`."""

    def begin(
        self, target: CachedModel, model_inputs: dict[str, Any], texts: Sequence[Text]
    ) -> AbstractContextManager[Any]:
        """A new generation; what it returns is entered now, and left when the generation ends.

        Args:
            target: has read the prompts.
            model_inputs: what it was given.
            texts: the prompts.
        """
        return nullcontext()

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """One tree a row, of up to `most` nodes (at least 1)."""
        raise NotImplementedError(f"{type(self).__name__} must override draft")

    def expects(self, layer_idx: int, ask: Ask) -> Tensor | None:
        """The cached tokens that layer `layer_idx` of the target is going to need for the last draft.

        Called after a draft with `Seen.wants_pages`.

        Args:
            ask: the tokens that the target's router would read for queries of that layer: `[B, heads, N, D]` -> bool
                `[B, H, T]`.

        Returns: bool `[B, H or 1, T]`, by KV head of the target or for all; None: no idea.
        """
        return None


def check_vocabulary(drafting: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise ValueError if the two models do not have the same vocabulary size."""
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (drafting, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"a draft model needs the target's tokenizer: {type(drafting).__name__} has a vocabulary of {sizes[0]}, "
            f"{type(target).__name__} of {sizes[1]}"
        )
