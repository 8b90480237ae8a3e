"""Medusa heads (Cai et al., 2024): one hidden state of the target, several tokens ahead.

    states[i] = blocks_i(hidden), block: x + SiLU(W x + b)        logits[i] = lm_head(states[i])

The hidden state at position t is what the target's own head turns into token t + 1; head i (from 0) guesses token
t + 2 + i. W and b start at 0: a head that has learned nothing repeats the target's own prediction of token t + 1.

Some models scale or cap their logits after the output head (Cohere, Granite, Gemma 2). Medusa heads do not: drafting
needs only the ranking, which that leaves as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from oval_core.checks import check_count, check_share
from oval_core.tensor_file import read_tensors, require_tensors
from oval_spec.cached_model import head_of

FILE, FORMAT = "medusa_heads.safetensors", "oval medusa heads 1"
SIZES = ("hidden_size", "num_heads", "num_blocks", "vocab_size")
ENTRIES = (*SIZES, "own_heads", "model", "accuracies")
WORDS = "words"
IGNORED = -100  # no label: what torch's cross-entropy leaves out
Accuracies = list[list[float]]


class MedusaHeads(nn.Module):
    """All heads of one target, float32.

    Args:
        hidden_size: of the target.
        num_heads: how many tokens ahead, at least 1.
        num_blocks: residual blocks of each, at least 1.
        vocab_size: of the target; None: it is not checked.
        own_heads: every head has an output head of its own instead of the target's.
        model: name of the target.
        accuracies: by head and rank, how often that candidate is the right one where all earlier heads had the right
            one among theirs; None: nobody measured.

    Attributes:
        words: the tokens that they have learned to choose among, int64 `[W]` in ascending order; None: the vocabulary.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    weight: Tensor  # [heads, blocks, hidden, hidden]
    bias: Tensor  # [heads, blocks, hidden]
    own_weight: Tensor | None  # [heads, V, hidden]
    own_bias: Tensor | None  # [heads, V]
    words: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_blocks: int = 1,
        vocab_size: int | None = None,
        *,
        own_heads: bool = False,
        model: str = "",
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = check_count("hidden_size", hidden_size)
        self.num_heads = check_count("num_heads", num_heads)
        self.num_blocks = check_count("num_blocks", num_blocks)
        self.vocab_size = vocab_size if vocab_size is None else check_count("vocab_size", vocab_size)
        if own_heads and vocab_size is None:
            raise ValueError("own_heads needs vocab_size, got None")
        self.own_heads, self.model = own_heads, model
        self.accuracies = _checked(accuracies, num_heads)
        self.register_buffer("words", None)
        for name, shape in self._shapes().items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if not own_heads:
            self.own_weight, self.own_bias = None, None

    @classmethod
    def for_target(
        cls, target: PreTrainedModel, num_heads: int, num_blocks: int = 1, own_heads: bool = False
    ) -> MedusaHeads:
        """Untrained heads for a model, on the CPU. Raises TypeError or ValueError as the class does."""
        head = head_of(target)
        sizes = head.in_features, num_heads, num_blocks, head.out_features
        made = cls(*sizes, own_heads=own_heads, model=name_of(target))
        if made.own_weight is not None and made.own_bias is not None:
            with torch.no_grad():
                made.own_weight.copy_(head.weight.expand_as(made.own_weight))
                if head.bias is not None:
                    made.own_bias.copy_(head.bias.expand_as(made.own_bias))
        return made

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless `target` has the hidden size and vocabulary that these heads are made for."""
        head = head_of(target)
        expected = (self.hidden_size, head.out_features if self.vocab_size is None else self.vocab_size)
        found = (head.in_features, head.out_features)
        if expected != found:
            raise ValueError(
                f"Medusa heads of {self.model or 'an unnamed model'}: expected a target with hidden size {expected[0]} "
                f"and a vocabulary of {expected[1]}, got {type(target).__name__} with {found[0]} and {found[1]}"
            )

    def states(self, hidden: Tensor, most: int | None = None) -> Tensor:
        """Hidden states `[.., hidden]` -> those of the first `most` heads (default all) `[heads, .., hidden]`."""
        weight, bias = self.weight[:most], self.bias[:most]
        states = hidden.reshape(-1, self.hidden_size).expand(len(weight), -1, -1)
        for block in range(self.num_blocks):
            states = states + silu(torch.baddbmm(bias[:, block, None], states, weight[:, block].mT))
        return states.reshape(len(weight), *hidden.shape)

    def logits(self, states: Tensor, lm_head: Any) -> Tensor:
        """What the first heads say, `[heads, .., V]`: one product for all of them.

        Args:
            states: `[heads, .., hidden]`, of the first or all heads.
            lm_head: the target's output head; heads of their own do not use it.
        """
        if self.own_weight is None or self.own_bias is None:
            logits: Tensor = lm_head(states)
            return logits
        count = len(states)
        flat = torch.baddbmm(self.own_bias[:count, None], states.flatten(1, -2), self.own_weight[:count].mT)
        return flat.reshape(*states.shape[:-1], -1)

    def speaker(self, lm_head: Any) -> Callable[[Tensor], Tensor]:
        """What turns states of the first heads `[heads, .., hidden]` into logits `[heads, .., V]`, or `[.., W]` with
        `words`: it holds a copy of the rows of the target's output head that are needed, so that each use is quick."""
        words = self.words
        if words is None:
            return partial(self.logits, lm_head=lm_head)
        if self.own_heads or type(lm_head.weight) is not nn.Parameter:
            return lambda states: self.logits(states, lm_head)[..., words]
        bias = None if lm_head.bias is None else lm_head.bias[words]
        return partial(linear, weight=lm_head.weight[words], bias=bias)

    def logits_of(self, head: int, states: Tensor, lm_head: Any, words: Tensor | None = None) -> Tensor:
        """What one head says: its states `[.., hidden]` -> `[.., V]`, or of the tokens `words [W]` alone `[.., W]`."""
        if self.own_weight is not None and self.own_bias is not None:
            weight, bias = self.own_weight[head], self.own_bias[head]
        elif words is None or type(lm_head.weight) is not nn.Parameter:  # of a quantised one no rows can be taken
            logits: Tensor = lm_head(states)
            return logits if words is None else logits[..., words]
        else:
            weight, bias = lm_head.weight, lm_head.bias
        if words is not None:
            weight, bias = weight[words], None if bias is None else bias[words]
        return linear(states, weight, bias)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file in float16: to `path` if that ends so, else to `FILE` in that folder."""
        from safetensors.torch import save_file

        file = _file(path)
        about = {name: getattr(self, name) for name in ENTRIES}
        tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in self.named_parameters()}
        if self.words is not None:
            tensors[WORDS] = self.words.cpu().int()
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, {"format": FORMAT, "about": json.dumps(about)})
        return file

    @staticmethod
    def load(path: str | Path) -> MedusaHeads:
        """What `save` wrote there, float32, on the CPU and without gradients.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is another file, or an entry of its metadata, a tensor's name, shape or dtype is not as
                expected.
        """
        file = _file(path)
        metadata, tensors = read_tensors(file, "Medusa heads")
        about = _about(file, metadata)
        try:
            heads = MedusaHeads(**about)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None
        words = tensors.pop(WORDS, None)
        require_tensors(file, tensors, torch.float16, heads._shapes())
        heads.load_state_dict(tensors)
        heads.words = None if words is None else _checked_words(file, words, heads.vocab_size)
        return heads.requires_grad_(False)

    def _shapes(self) -> dict[str, list[int]]:
        """Of the parameters."""
        heads, hidden = self.num_heads, self.hidden_size
        shapes = {"weight": [heads, self.num_blocks, hidden, hidden], "bias": [heads, self.num_blocks, hidden]}
        if self.own_heads and self.vocab_size is not None:
            shapes |= {"own_weight": [heads, self.vocab_size, hidden], "own_bias": [heads, self.vocab_size]}
        return shapes


def name_of(model: PreTrainedModel) -> str:
    """Of a model: as it is called on a hub, or the name of the folder that it was loaded from."""
    name = model.config.name_or_path or ""
    return Path(name).name if Path(name).is_dir() else name


def labels_for(tokens: Tensor, head: int) -> Tensor:
    """What a head should say at every position.

    Args:
        tokens: int64 `[.., t]`; the hidden state at position t belongs to the text up to and with token t.
        head: from 0; at position t it guesses token t + 2 + head.

    Returns: int64 `[.., t]`, `IGNORED` where the text ends before.
    """
    ahead = min(2 + check_count("head", head, least=0), tokens.shape[-1])
    return torch.cat([tokens[..., ahead:], torch.full_like(tokens[..., :ahead], IGNORED)], dim=-1)


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE


def _about(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `MedusaHeads` from the metadata of a file."""
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{file}: expected metadata format {FORMAT!r}, got {metadata.get('format')!r}")
    try:
        about = json.loads(metadata.get("about", ""))
    except ValueError:
        raise ValueError(f"{file}: metadata about cannot be read, got {metadata.get('about')!r}") from None
    if not isinstance(about, dict) or about.keys() != set(ENTRIES):
        found = sorted(about) if isinstance(about, dict) else about
        raise ValueError(f"{file}: expected metadata about {sorted(ENTRIES)}, got {found}")
    return about


def _checked_words(file: Path, words: Tensor, vocab_size: int | None) -> Tensor:
    """Tokens in ascending order, as int64."""
    fits = words.dtype == torch.int32 and words.dim() == 1 and len(words) > 0 and bool((words.diff() > 0).all())
    if not fits or int(words[0]) < 0 or (vocab_size is not None and int(words[-1]) >= vocab_size):
        raise ValueError(
            f"{file}: expected {WORDS} as int32 tokens of a vocabulary of {vocab_size} in ascending order, "
            f"got {words.dtype} {list(words.shape)}"
        )
    return words.long()


def _checked(accuracies: Sequence[Sequence[float]] | None, heads: int) -> Accuracies | None:
    """A share for every head and rank."""
    if accuracies is None:
        return None
    if len(accuracies) != heads or len({len(shares) for shares in accuracies}) != 1:
        lengths = [len(shares) for shares in accuracies]
        raise ValueError(f"accuracies must be {heads} lists of equal length, got lists of lengths {lengths}")
    return [[check_share("an accuracy", share) for share in shares] for shares in accuracies]
