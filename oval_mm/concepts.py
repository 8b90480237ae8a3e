"""Words that pictures are described with, and where CLIP puts them and the patches of a picture.

    patch -> ln_post -> proj -> similarity to the text of each concept -> softmax -> how much it shows of each

A `ConceptSpace` holds all that this takes; only making one needs a CLIP and the package `open_clip_torch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

SCENE, GENERAL = LISTS = ("scene", "general")
_GENERAL_THINGS = """
a person; a man; a woman; a child; a face; hands; a crowd; a dog; a cat; a horse; a cow; a bird; a fish; an insect;
a wild animal; a car; a bus; a truck; a bicycle; a motorcycle; a train; an airplane; a boat; a street; a road sign;
a traffic light; a building; a house; a window; a door; a wall; a floor; stairs; a bridge; furniture; a chair; a table;
a bed; a lamp; a screen; a computer; a phone; a book; paper; printed text; handwriting; a number; a logo; a chart;
a diagram; a map; a painting; a clock; a bottle; a cup; a plate; food; fruit; vegetables; bread; meat; a cake; a drink;
clothes; shoes; a hat; glasses; a bag; a ball; a toy; a tool; a machine; a weapon; jewellery; the sky; clouds; the sun;
water; a river; the sea; a beach; snow; ice; fire; smoke; rocks; a mountain; a field; grass; a flower; a tree; a forest;
sand; metal; wood; glass; cloth; something red; something green; something blue; something yellow; something black;
something white; something brown; a pattern; a shadow; a light; a blurred background; nothing
"""


def concept_list(name: str | Path) -> tuple[str, ...]:
    """The concepts of a list.

    Args:
        name: "scene" (what there is in the scenes of `oval_mm.recipes`), "general" (of photos), or a text file that has
            a concept a line.

    Raises:
        FileNotFoundError: neither a list nor a file.
        ValueError: the file holds fewer than two concepts, or one twice.
    """
    if name == SCENE:
        return _scene_concepts()
    if name == GENERAL:
        return tuple(f"a photo of {' '.join(thing.split())}" for thing in _GENERAL_THINGS.split(";"))
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"concepts must be one of {list(LISTS)} or a text file, got {str(name)!r}")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return check_concepts([line for line in lines if line])


def check_concepts(concepts: Sequence[str]) -> tuple[str, ...]:
    """The same as a tuple. Raises ValueError unless they are two or more, each once."""
    twice = sorted({concept for concept in concepts if concepts.count(concept) > 1})
    if len(concepts) < 2 or twice:
        raise ValueError(f"concepts must be two or more, each once, got {len(concepts)}; more than once: {twice}")
    return tuple(concepts)


def _scene_concepts() -> tuple[str, ...]:
    from oval_mm.recipes.clip_captions import GLYPHS, NAMES, NOTHING
    from oval_mm.recipes.shapes import COLOURS, SHAPES

    return (*COLOURS, *SHAPES, *(one.words for one in (*NAMES, *GLYPHS, NOTHING)))


@dataclass(frozen=True)
class ConceptSpace:
    """N concepts in the J dimensions that a CLIP's images and texts share, and the way there from its W wide tower.

    Args:
        concepts: N words.
        texts: float32 `[N, J]`, their text embeddings, of length 1.
        norm_weight, norm_bias, norm_eps: of the tower's last LayerNorm, `[W]`.
        projection: float32 `[W, J]`.
        scale: what similarities are multiplied by before the softmax: CLIP's own.
    """

    concepts: tuple[str, ...]
    texts: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    projection: Tensor
    norm_eps: float
    scale: float

    def weights(self, states: Tensor) -> Tensor:
        """How much of each concept patches show, `[..., N]`; `states [..., W]` leave the tower's last layer."""
        shape = self.norm_weight.shape
        states = layer_norm(states.float(), shape, self.norm_weight, self.norm_bias, self.norm_eps)
        return (self.scale * normalize(states @ self.projection, dim=-1) @ self.texts.T).softmax(-1)

    def describe(self, states: Tensor) -> Tensor:
        """Patches `states [..., W]` as weighted means of the concepts' texts, `[..., J]`.

        Texts lie close together in CLIP: here their mean is subtracted, and they are scaled to a mean square of 1.
        """
        return self.weights(states) @ self._spread_texts

    @cached_property
    def _spread_texts(self) -> Tensor:
        centred = self.texts - self.texts.mean(0)
        return centred / centred.square().mean().sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: part for name, part in vars(self).items() if name in TENSORS}

    def to(self, device: torch.device | str) -> ConceptSpace:
        """The same on another device."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def with_random_texts(self, seed: int) -> ConceptSpace:
        """The same with random directions in place of the texts, to see what the text encoder is good for."""
        generator = torch.Generator().manual_seed(seed)
        texts = torch.randn(self.texts.shape, generator=generator).to(self.texts.device)
        return dataclasses.replace(self, texts=normalize(texts, dim=-1))


TENSORS = ("texts", "norm_weight", "norm_bias", "projection")


def make_concept_space(clip: str | Path, concepts: Sequence[str]) -> ConceptSpace:
    """Put concepts into the space of a CLIP, float32, on the CPU.

    Args:
        clip: a folder in open_clip's format, or what open_clip calls a model: "local-dir:DIR", "hf-hub:REPO", or
            "NAME@WEIGHTS" for weights that it knows, "ViT-L-14-336@openai" for example.
        concepts: two or more, each once.

    Raises:
        ImportError: open_clip_torch is not installed.
        ValueError: no weights are named, or the vision tower has no `ln_post` and `proj` to bring patches to texts.
    """
    concepts = check_concepts(list(concepts))
    model, tokenizer = _load(clip)
    visual = model.visual
    norm, projection = getattr(visual, "ln_post", None), getattr(visual, "proj", None)
    if not isinstance(norm, torch.nn.LayerNorm) or not isinstance(projection, Tensor):
        raise ValueError(f"CLIP {clip} must have a vision tower with ln_post and proj, got {type(visual).__name__}")
    with torch.no_grad():
        parts = [model.encode_text(tokenizer([concept])) for concept in concepts]
    return ConceptSpace(
        concepts,
        normalize(torch.cat(parts).float(), dim=-1),
        norm.weight.detach().float(),
        norm.bias.detach().float(),
        projection.detach().float(),
        norm.eps,
        model.logit_scale.exp().item(),
    )


def _load(clip: str | Path) -> tuple[Any, Any]:
    """Model, in evaluation mode, and tokenizer."""
    try:
        import open_clip
    except ImportError as error:
        message = "texts of concepts need the package open_clip_torch: pip install open_clip_torch"
        raise ImportError(message) from error
    name, _, weights = str(clip).partition("@") if not Path(clip).is_dir() else (f"local-dir:{clip}", "", "")
    if not weights and not name.startswith(("local-dir:", "hf-hub:")):
        known = open_clip.list_pretrained_tags_by_model(name)
        raise ValueError(f"CLIP must be a folder, local-dir:DIR, hf-hub:REPO or NAME@WEIGHTS, got {clip}; of {known}")
    model = open_clip.create_model(name, weights or None, require_pretrained=True)
    return model.eval(), open_clip.get_tokenizer(name)
