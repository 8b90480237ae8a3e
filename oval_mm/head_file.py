"""A routing head in a safetensors file, with all that its page embeddings are made with: using it takes no CLIP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oval_core.tensor_file import read_tensors, require_tensors
from oval_mm.concepts import TENSORS, ConceptSpace
from oval_mm.hybrid_head import HeadSizes, HybridHead
from oval_mm.page_embeddings import (
    CLIP_TEXT,
    KINDS,
    MEAN_KEY,
    RANDOM,
    ConceptEmbedding,
    MeanKeyEmbedding,
    PageEmbedding,
    PlaceEmbedding,
)

FORMAT = "oval hybrid head 1"
PARAMETERS = ("query", "key", "gate")
SIZES = tuple(field.name for field in fields(HeadSizes))
# Entries of the metadata, by how they are read.
ENTRIES: dict[str, Any] = {"format": str, "kind": str} | dict.fromkeys(SIZES, int)
CONCEPT_ENTRIES: dict[str, Any] = {"concepts": json.loads, "tower_width": int, "norm_eps": float, "scale": float}
About = dict[str, Any]


def save_head(path: Path, head: HybridHead, embedding: PageEmbedding) -> None:
    """Write a head and its page embeddings, float32. Raises ValueError if they do not fit each other."""
    from safetensors.torch import save_file

    if embedding.size != head.sizes.embedding_size:
        raise ValueError(f"page embeddings must have {head.sizes.embedding_size} dimensions, got {embedding.size}")
    about: About = {"format": FORMAT, "kind": embedding.kind, **asdict(head.sizes)}
    tensors = {f"head.{name}": getattr(head, name) for name in PARAMETERS}
    if isinstance(embedding, ConceptEmbedding):
        space = embedding.space
        about |= {"concepts": json.dumps(space.concepts), "tower_width": len(space.projection)}
        about |= {"norm_eps": space.norm_eps, "scale": space.scale}
        tensors |= {f"concepts.{name}": tensor for name, tensor in space.tensors().items()}
    ready = {name: tensor.detach().cpu().float().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(ready, path, {name: str(value) for name, value in about.items()})


def load_head(path: Path) -> tuple[HybridHead, PageEmbedding]:
    """What `save_head` wrote, on the CPU and without gradients.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another file, or an entry of its metadata, a tensor's name, shape or dtype is not as expected.
    """
    metadata, tensors = read_tensors(path, "a hybrid head")
    about = _about(path, metadata)
    require_tensors(path, tensors, torch.float32, _shapes(about))
    head = HybridHead(HeadSizes(**{name: about[name] for name in SIZES}))
    head.load_state_dict({name: tensors[f"head.{name}"] for name in PARAMETERS})
    return head.requires_grad_(False), _embedding(about, tensors)


def _about(path: Path, metadata: Mapping[str, str]) -> About:
    """The metadata, read and checked."""
    got = (metadata.get("format"), metadata.get("kind"))
    if got[0] != FORMAT or got[1] not in KINDS:
        raise ValueError(f"{path}: expected metadata format {FORMAT!r} and kind one of {KINDS}, got {got}")
    entries = ENTRIES | (CONCEPT_ENTRIES if got[1] in (CLIP_TEXT, RANDOM) else {})
    if entries.keys() != metadata.keys():
        raise ValueError(f"{path}: expected metadata {sorted(entries)}, got {sorted(metadata)}")
    about = {}
    for name, read in entries.items():
        try:
            about[name] = read(metadata[name])
        except ValueError:
            raise ValueError(f"{path}: metadata {name} cannot be read, got {metadata[name]!r}") from None
    return about


def _shapes(about: About) -> dict[str, list[int]]:
    """The tensors that there must be."""
    heads, dim, size = [about["layers"], about["kv_heads"]], about["dim"], about["embedding_size"]
    shapes = {"query": [*heads, dim, about["hidden_size"]], "key": [*heads, dim, size], "gate": heads}
    expected = {f"head.{name}": shapes[name] for name in PARAMETERS}
    if about["kind"] in (CLIP_TEXT, RANDOM):
        width = about["tower_width"]
        of_space = dict(zip(TENSORS, ([len(about["concepts"]), size], [width], [width], [width, size]), strict=True))
        expected |= {f"concepts.{name}": shape for name, shape in of_space.items()}
    return expected


def _embedding(about: About, tensors: Mapping[str, Tensor]) -> PageEmbedding:
    if about["kind"] == MEAN_KEY:
        return MeanKeyEmbedding(about["embedding_size"])
    if about["kind"] not in (CLIP_TEXT, RANDOM):
        return PlaceEmbedding()
    parts = {name: tensors[f"concepts.{name}"] for name in TENSORS}
    space = ConceptSpace(tuple(about["concepts"]), norm_eps=about["norm_eps"], scale=about["scale"], **parts)
    return ConceptEmbedding(space, about["kind"])
