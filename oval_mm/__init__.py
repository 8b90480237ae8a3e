"""OVAL for LLaVA-family models: images live in pages of their own, and a question reads few of them."""

from oval_mm.attach import Handle, attach
from oval_mm.hybrid_router import HybridRouter

__all__ = ["Handle", "HybridRouter", "attach"]
