"""Speculative decoding whose draft and target agree on which pages to read."""

from oval_spec.decode import SpeculativeOutput, speculative_decoding, speculative_generate
from oval_spec.drafters import Drafter, MedusaDrafter, ModelDrafter, PromptLookupDrafter, SparseSelfDrafter
from oval_spec.medusa_heads import MedusaHeads
from oval_spec.stats import SpeculativeStats
from oval_spec.tree import Tree

__all__ = [
    "Drafter",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelDrafter",
    "PromptLookupDrafter",
    "SparseSelfDrafter",
    "SpeculativeOutput",
    "SpeculativeStats",
    "Tree",
    "speculative_decoding",
    "speculative_generate",
]
