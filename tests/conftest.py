"""What holds for every test: offline, reproducible, on few threads; tests marked `gpu` need a CUDA device."""

import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA starts: deterministic algorithms ask for it

import numpy as np
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

settings.register_profile("oval", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("oval")
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # they share the cores
torch.set_num_threads(max(1, min(4, os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(needs_cuda)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
