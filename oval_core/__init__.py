"""OVAL: a paged, basis-summarised KV cache that reads only the pages that matter to the output."""

from oval_core.attach import Handle, attach
from oval_core.cache import OvalCache
from oval_core.config import OvalConfig

__all__ = ["Handle", "OvalCache", "OvalConfig", "attach"]
