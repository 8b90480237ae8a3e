"""Small concept spaces, CLIPs and LLaVAs over the same tower."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from oval_mm.concepts import ConceptSpace
from oval_mm.hybrid_head import HeadSizes, HybridHead
from oval_mm.hybrid_router import HybridRouter
from oval_mm.page_embeddings import ConceptEmbedding, PageEmbedding
from oval_mm.recipes.clip_to_transformers import build_image_processor, build_vision_tower
from oval_mm.recipes.tiny_clip import build_clip, save_clip
from oval_mm.recipes.tiny_llava import build_llava, language_config, make_processor
from tests.mm.test_tiny_clip import TINY


def random_space(tower_width: int = 32, size: int = 8, concepts: int = 6) -> ConceptSpace:
    """Concepts of nothing, for the towers of `tests.mm.tiny_vlms`."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return ConceptSpace(
        concepts=tuple(f"concept {number}" for number in range(concepts)),
        texts=normalize(random(concepts, size), dim=-1),
        norm_weight=1 + 0.1 * random(tower_width),
        norm_bias=0.1 * random(tower_width),
        projection=random(tower_width, size) / tower_width**0.5,
        norm_eps=1e-5,
        scale=10.0,
    )


def make_router(
    model: Any, gate: float, embedding: PageEmbedding | None = None, base: str = "box", kind: Any = HybridRouter
) -> Any:
    """A hybrid router of random weights, all gates alike."""
    embedding = embedding or ConceptEmbedding(random_space())
    head = HybridHead(HeadSizes.of(model, embedding.size, dim=4), seed=1).requires_grad_(False)
    head.gate.fill_(gate)
    return kind(head, embedding, base)


@functools.cache
def clip_folder() -> Path:
    """A CLIP of random weights on disk."""
    torch.manual_seed(0)
    folder = Path(_folder().name) / "clip"
    save_clip(build_clip(TINY), TINY, folder)
    return folder


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory()


def llava_of_clip() -> tuple[Any, Any]:
    """A LLaVA over the tower of that CLIP: 64 px, 16 image tokens."""
    tower = build_vision_tower(clip_folder())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    language = language_config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return build_llava(tower, language), make_processor(build_image_processor(clip_folder()), tower)
