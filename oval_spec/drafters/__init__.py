"""Drafters, one a file."""

from oval_spec.drafters.base import Drafter, Seen
from oval_spec.drafters.model import ModelDrafter
from oval_spec.drafters.prompt_lookup import PromptLookupDrafter
from oval_spec.drafters.self_draft import SparseSelfDrafter

__all__ = ["Drafter", "ModelDrafter", "PromptLookupDrafter", "Seen", "SparseSelfDrafter"]
