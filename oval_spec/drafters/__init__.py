"""Drafters, one a file."""

from oval_spec.drafters.base import Drafter, Seen
from oval_spec.drafters.medusa import MedusaDrafter
from oval_spec.drafters.model import ModelDrafter
from oval_spec.drafters.prompt_lookup import PromptLookupDrafter
from oval_spec.drafters.self_draft import SparseSelfDrafter

__all__ = ["Drafter", "MedusaDrafter", "ModelDrafter", "PromptLookupDrafter", "Seen", "SparseSelfDrafter"]
