"""OVAL for LLaVA-family models: images live in pages of their own, and a question reads few of them."""

from oval_mm.attach import IMAGE_CONFIG, Handle, attach
from oval_mm.hybrid_router import HybridRouter

__all__ = ["IMAGE_CONFIG", "Handle", "HybridRouter", "attach"]
