"""Put OVAL on a stock transformers model, and take it off again."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import nn
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from oval_core import kernels
from oval_core.attention import oval_attention
from oval_core.binding import BINDING, Binding
from oval_core.cache import OvalCache, page_layers
from oval_core.config import OvalConfig
from oval_core.layer import OvalLayer
from oval_core.routers import make_router
from oval_core.stats import Recorder, TraceEntry

NAME = "oval"
NO_CACHE = "no cache"
CACHE_ARGUMENTS = ("cache", "past_key_values")  # the second is transformers' old name of the first

AttentionInterface.register(NAME, oval_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without a mask function transformers would drop padding silently


def attach(model: PreTrainedModel, config: OvalConfig | None = None) -> Handle:
    """Make `model` read only the KV pages that matter. `model.generate` and pipelines work as before.

    Args:
        model: any transformers model that generates with a KV cache.
        config: default `OvalConfig()`.

    Returns: a handle with `stats()`, `trace()` and `detach()`; also a context manager.

    Raises:
        TypeError, ValueError, RuntimeError: not such a model, a config that cannot work, or already attached.
            The model is unchanged then.
    """
    config = config or OvalConfig()
    _check_model(model, config)
    handle = Handle(model, config.for_device(model.device))
    try:
        handle._install()
    except BaseException:
        handle.detach()
        raise
    return handle


def binding_of(model: nn.Module) -> Binding | None:
    """What the attention modules of an attached model share; None if `model` is not attached."""
    return next((getattr(module, BINDING) for module in model.modules() if hasattr(module, BINDING)), None)


class Handle:
    """An attached model; made by `attach`. Leaving it as a context manager detaches.

    Attributes:
        model: as given to `attach`.
        config: as given to `attach`, with a router and a budget in place of "auto" and None.
        impl: the kernel implementation that `config.impl` resolved to.
    """

    def __init__(self, model: PreTrainedModel, config: OvalConfig) -> None:
        self.model, self.config = model, config
        self.impl = kernels.resolve(config.impl, model.device)
        self._text_config = model.config.get_text_config(decoder=True)
        self._recorder = Recorder(config)
        self._router = make_router(config)
        self._signature = inspect.signature(model.forward)
        self._configs = _decoder_configs(model)
        self._before: list[str] = []
        self._bound: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._feeds = False  # hidden states to the routers

    def stats(self) -> dict[str, Any]:
        """What was read since the cache was last empty; the keys are explained in the README."""
        kinds = [_kind(layer) for layer in DynamicCache(config=self._text_config).layers]
        for index, reason in self._recorder.unpageable.items():
            kinds[index] = f"dense: {reason}" if reason else kinds[index]
        layers = Counter(kinds)
        return {**self._recorder.report(), "layers": dict(layers), "impl": self.impl}

    def detach(self) -> None:
        """Restore the model: attention implementation, hooks, attributes. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        for module in self._bound:
            delattr(module, BINDING)
        if self._before:
            self._set_attention(self._before[0])
        for config, implementation in zip(self._configs, self._before, strict=False):
            config._attn_implementation = implementation
        self._hooks, self._bound, self._before, self._feeds = [], [], [], False

    def trace(self) -> AbstractContextManager[list[TraceEntry]]:
        """Collect every selection made inside the `with` block, one `TraceEntry` a layer and step."""
        return self._recorder.tracing()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _install(self) -> None:
        """Change the model. If this raises, `detach` undoes what was done."""
        self._before = [config._attn_implementation for config in self._configs]
        self._set_attention(NAME)
        if any(config._attn_implementation != NAME for config in self._configs):
            raise TypeError(f"{type(self.model).__name__} does not let its attention implementation be set")
        binding = Binding(self.impl, self._before[0] or "sdpa", self._recorder)
        for module in self.model.modules():
            if not isinstance(module, PreTrainedModel) and _has_config(module, self._configs):
                setattr(module, BINDING, binding)
                self._bound.append(module)
        if hasattr(binding.kernels, "warm_up"):
            binding.kernels.warm_up(self.model.dtype, self.model.device, self._text_config, self.config)
        self._hooks.append(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        if self._router.needs_hidden_states:
            self._feed_hidden_states()

    def _feed_hidden_states(self) -> None:
        """Let routers know what goes into the attention modules, from the next one on."""
        if not self._feeds:
            self._feeds = True
            attention = [module for module in self._bound if _is_attention(module)]
            self._hooks += [_feed_hidden_states(module, getattr(module, BINDING)) for module in attention]

    def _set_attention(self, name: str) -> None:
        """Set the decoder's attention implementation; a vision tower keeps its own."""
        path = _path(self.model.config, self._configs[0])
        request: Any = name
        for key in reversed(path):
            request = {key: request}
        self.model.set_attn_implementation(request)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Page the cache that this forward pass is going to use."""
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        _check_tokens(arguments)
        name = next((key for key in CACHE_ARGUMENTS if arguments.get(key) is not None), None)
        cache = None if name is None else arguments[name]
        reason = self._reason_to_leave(cache, arguments.get("use_cache"))
        if reason != NO_CACHE and (cache is None or cache.get_seq_length() == 0):
            self._recorder.reset()
        self._recorder.next_step()
        if reason is not None:
            self._recorder.note(reason)
            return None
        if cache is None:
            return _with_cache(list(self._signature.parameters), args, kwargs, self._new_cache())
        self._page(_self_attention(cache))
        return None

    def _reason_to_leave(self, cache: Cache | None, use_cache: bool | None) -> str | None:
        """Why the cache stays as it is, or None if it is to be paged."""
        if self.model.training:
            return "training"
        for config in self._configs:
            if config._attn_implementation != NAME:
                return f"attention implementation {config._attn_implementation} was set after attach"
        if cache is None:
            wanted = getattr(self._text_config, "use_cache", True) if use_cache is None else use_cache
            return None if wanted else NO_CACHE
        own = _self_attention(cache)
        if type(own) not in (DynamicCache, OvalCache) or own.offloading:
            return f"{'offloaded ' if own.offloading else ''}{type(own).__name__}"
        return None

    def _new_cache(self) -> Cache:
        paged = OvalCache(self._text_config, self.config)
        if not self.model.config.is_encoder_decoder:
            return paged
        return EncoderDecoderCache(paged, DynamicCache(config=self._text_config))

    def _page(self, cache: DynamicCache) -> None:
        """Page an empty cache, or take over the tokens of a filled one."""
        expected = DynamicCache(config=self._text_config).layers
        if not cache.layers:
            cache.layers, cache.layer_class_to_replicate = expected, None
        if len(cache.layers) != len(expected):
            raise ValueError(
                f"the cache has {len(cache.layers)} layers, {type(self.model).__name__} has {len(expected)}: "
                "it was built for another model"
            )
        if any(type(layer) is DynamicLayer for layer in cache.layers):
            page_layers(cache, self.config, self._router)
        if any(isinstance(layer, OvalLayer) and layer.needs_hidden_states for layer in cache.layers):
            self._feed_hidden_states()  # the cache may come from a model that was attached with another router


def _check_model(model: PreTrainedModel, config: OvalConfig) -> None:
    """Refuse what cannot be attached."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if not isinstance(config, OvalConfig):
        raise TypeError(f"config must be an OvalConfig, got {type(config).__name__}")
    if binding_of(model) is not None:
        raise RuntimeError(f"{type(model).__name__} is already attached; call handle.detach() first")
    if any(config._attn_implementation == NAME for config in _decoder_configs(model)):
        raise RuntimeError(
            f"{type(model).__name__} shares its config object with a model that is attached; "
            "build it from a copy of the config (copy.deepcopy) to attach both"
        )
    text_config = model.config.get_text_config(decoder=True)
    takes_cache = bool({*inspect.signature(model.forward).parameters} & {*CACHE_ARGUMENTS})
    layers = DynamicCache(config=text_config).layers if takes_cache and model.can_generate() else []
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise TypeError(f"{type(model).__name__} does not generate with a KV attention cache: there is nothing to page")
    heads = getattr(text_config, "num_attention_heads", None)
    head_dim = getattr(text_config, "head_dim", None) or (heads and text_config.hidden_size // heads)
    if head_dim and config.rank > head_dim:
        raise ValueError(f"rank must be at most the head dimension {head_dim}, got {config.rank}")


def _check_tokens(arguments: dict[str, Any]) -> None:
    """Refuse a prompt without tokens; transformers fails somewhere inside the first attention module."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"):
        tokens = arguments.get(name)
        if tokens is not None and tokens.shape[1] == 0:
            raise ValueError(f"{name} is empty: expected at least one token, got shape {list(tokens.shape)}")


def _with_cache(parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache) -> Any:
    """The arguments of a forward pass that was given no cache, with `cache` in its place."""
    name = next(key for key in CACHE_ARGUMENTS if key in parameters)
    at = parameters.index(name)
    if at < len(args):
        return (*args[:at], cache, *args[at + 1 :]), kwargs
    return args, {**{key: value for key, value in kwargs.items() if key not in CACHE_ARGUMENTS}, name: cache}


def _decoder_configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The config objects that the decoder's attention modules look at."""
    text_config = model.config.get_text_config(decoder=True)
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    if any(config is text_config for config in configs) or _path(model.config, text_config):
        return [text_config]
    unique = {id(config): config for config in [model.config, *configs]}  # encoder and decoder stacks hold copies
    return list(unique.values())


def _path(config: PretrainedConfig, wanted: PretrainedConfig) -> list[str]:
    """Names of the sub-configs that lead from `config` to `wanted`; empty if it is `config` itself or not below it."""
    for key in config.sub_configs:
        below = getattr(config, key, None)
        if below is None:
            continue
        if below is wanted:
            return [key]
        if path := _path(below, wanted):
            return [key, *path]
    return []


def _has_config(module: nn.Module, configs: list[PretrainedConfig]) -> bool:
    own = getattr(module, "config", None)
    return any(own is config for config in configs)


def _self_attention(cache: Cache) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _kind(layer: object) -> str:
    """How `stats()` names a cache layer."""
    return "paged" if type(layer) in (DynamicLayer, OvalLayer) else type(layer).__name__


def _is_attention(module: nn.Module) -> bool:
    return getattr(module, "layer_idx", None) is not None and hasattr(module, "is_causal")


def _feed_hidden_states(module: nn.Module, binding: Binding) -> Any:
    """Remember what goes into an attention module."""
    layer_idx, config = int(module.layer_idx), cast("Any", module.config)  # type: ignore[arg-type]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if config._attn_implementation != NAME:
            return  # set after `attach`: no router will look
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        binding.hidden_states[layer_idx] = hidden.detach()

    return module.register_forward_pre_hook(hook, with_kwargs=True)
