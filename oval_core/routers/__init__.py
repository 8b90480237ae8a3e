"""Routers decide which pages are read exactly. One file each; `OvalConfig(router=...)` takes a name or an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oval_core.routers.base import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter
from oval_core.routers.locality import LocalityRouter
from oval_core.routers.mean import MeanRouter
from oval_core.routers.oracle import OracleRouter
from oval_core.routers.quest import QuestRouter
from oval_core.routers.random import RandomRouter
from oval_core.routers.selection_cache import SelectionCacheRouter
from oval_core.routers.window import WindowRouter

if TYPE_CHECKING:
    from oval_core.config import OvalConfig

ROUTERS: tuple[type[Router], ...] = (
    BasisRouter,
    QuestRouter,
    BoxRouter,
    MeanRouter,
    WindowRouter,
    RandomRouter,
    OracleRouter,
    LocalityRouter,
    SelectionCacheRouter,
)
AROUND_BASIS = {kind.name: kind for kind in (LocalityRouter, SelectionCacheRouter)}  # by name they wrap this router

__all__ = ["ROUTERS", "Pages", "Router", "Selection", "check_router", "make_router"]


def check_router(router: Any) -> None:
    """Raise unless `router` is the name of a router or a `Router`."""
    names = ["auto", *(kind.name for kind in ROUTERS)]
    if isinstance(router, Router):
        return
    if not isinstance(router, str):
        raise TypeError(f"router must be a Router or one of {names}, got {router!r} ({type(router).__name__})")
    if router not in names:
        raise ValueError(f"router must be a Router or one of {names}, got {router!r}")


def make_router(config: OvalConfig) -> Router:
    """The router that `config` asks for. Raises ValueError for "auto", which only a device decides."""
    if isinstance(config.router, Router):
        return config.router
    if config.router == "auto":
        raise ValueError("router 'auto' depends on the device: make one from config.for_device(device)")
    basis = BasisRouter(estimate_tail=config.estimate_tail == "shortlist")
    if config.router == BasisRouter.name:
        return basis
    if config.router in AROUND_BASIS:
        return AROUND_BASIS[config.router](basis)
    if config.router == RandomRouter.name:
        return RandomRouter(config.seed)
    kinds: dict[str, Any] = {kind.name: kind for kind in ROUTERS}
    router: Router = kinds[config.router]()
    return router
