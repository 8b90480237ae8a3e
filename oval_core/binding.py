"""What an attached attention module knows of its model's handle."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from oval_core.kernels import Kernels, load
from oval_core.stats import Recorder

BINDING = "oval_binding"  # the attribute under which an attached attention module finds its binding


@dataclass
class Binding:
    """Shared by all attention modules of one attached model.

    Attributes:
        impl: name of the resolved kernel implementation.
        dense_impl: the attention that transformers would run.
        recorder: counts what is read.
        hidden_states: input of each attention module by layer index, for routers that need it; a layer that is read
            densely keeps none.
    """

    impl: str
    dense_impl: str
    recorder: Recorder
    hidden_states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def kernels(self) -> Kernels:
        """The implementation; not a field, because a module cannot be copied with the model."""
        return load(self.impl)
