"""Pages that size themselves: a `PagePolicy` that cuts prefilled text into short pages where keys differ."""

from oval_core.page_sizing.head import SizingHead
from oval_core.page_sizing.self_sized import ByScore, SelfSizedPages, entropy, spread

__all__ = ["ByScore", "SelfSizedPages", "SizingHead", "entropy", "spread"]
