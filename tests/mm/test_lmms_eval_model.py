"""lmms-eval on tiny vision-language models, dense and with OVAL. Most tests need `pip install -e ".[lmms]"`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from oval_core import OvalConfig
from oval_mm import attach
from tests.mm.tiny_vlms import NAMES, photo, save, tiny, words

FULL: dict[str, Any] = {
    "page_size": 8,
    "budget_ratio": 1.0,
    "always_paged": True,
    "seal_tokens": 1,
    "impl": "reference",
}
SPARSE: dict[str, Any] = {"page_size": 8, "budget_pages": 4, "seal_tokens": 1, "impl": "reference"}
REFERENCE = OvalConfig(impl="reference")  # nothing to compile
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "do_sample": False, "until": ["\n\n"]}
ROOT = Path(__file__).parents[2]


def save_with_template(name: str, folder: Path) -> Path:
    """A tiny model whose chat template writes images and words in order, and "and" after every image."""
    save(name, folder)
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    part = "{{ 'IMAGE and ' if part.type == 'image' else part.text ~ ' ' }}".replace("IMAGE", tiny(name).image)
    loops = "{% for message in messages %}{% for part in message.content %}", "{% endfor %}{% endfor %}"
    processor.chat_template = f"word0 {loops[0]}{part}{loops[1]}"
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_template("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def adapter() -> Any:
    """The module, where lmms-eval is installed."""
    pytest.importorskip("lmms_eval", reason='needs lmms-eval: pip install -e ".[lmms]"')
    return importlib.import_module("oval_mm.lmms_eval_model")


def requests(model: Any, kind: str, *asked: tuple[str, Any, dict[str, Any]]) -> list[Any]:
    """Requests of one task whose documents are what `doc_to_visual` returns."""
    from lmms_eval.api.instance import Instance

    model.task_dict = {"task": {"test": [visuals for _, visuals, _ in asked]}}
    metadata = {"task": "task", "doc_id": 0, "repeats": 1}
    arguments = [
        (context, options, lambda document: document, index, "task", "test")
        for index, (context, _, options) in enumerate(asked)
    ]
    return [Instance(request_type=kind, arguments=some, idx=0, metadata=metadata) for some in arguments]


def answers(model: Any, *asked: tuple[str, Any, dict[str, Any]]) -> list[Any]:
    results: list[Any] = model.generate_until(requests(model, "generate_until", *asked))
    return results


def generated(name: str, prompt: str, pictures: list[Image.Image], **settings: Any) -> str:
    """What the dense model says; `*` in the prompt is a picture, all of them are of one message."""
    vlm = tiny(name)
    text, images = prompt.replace("*", f" {vlm.image} and "), {"images": [pictures]} if pictures else {}
    inputs = vlm.processor(text=[text], return_tensors="pt", **images)
    output = vlm.model.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False, **settings})
    return str(vlm.processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_what_generate_says(adapter: Any, tmp_path: Path, name: str) -> None:
    """No picture, one, several, and several at their places in the text."""
    model = adapter.OvalVlm(str(save_with_template(name, tmp_path)), **FULL)
    two, text = [photo(0), photo(1, 60, 30)], words(30)
    asked = [(text, None), (text, [photo(2)]), (text, two), ("word1 <image> word2 <image> word3", two)]
    results = answers(model, *((context, visuals, GREEDY) for context, visuals in asked))
    prompts = [text, f"* {text}", f"* * {text}", "word1 * word2 * word3"]
    for (_, pictures), prompt, result in zip(asked, prompts, results, strict=True):
        assert result.text == generated(name, f"word0 {prompt}", pictures or [])
        assert result.token_counts.output_tokens == 6
    assert model.dense_steps == {"empty cache": 4}


def test_the_read_ratio_is_reported(adapter: Any, llava: Path) -> None:
    model = adapter.OvalVlm(str(llava), **SPARSE, block=2)
    asked = [(words(40, seed), [photo(seed)], GREEDY) for seed in range(2)]
    ratios = []
    for one in asked:
        answers(model, one)
        ratios.append(model._handle.stats()["read_ratio"])
    assert model.read_ratio == pytest.approx(sum(ratios) / 2)  # contexts are equally long
    assert 0.2 < model.read_ratio < 0.8
    assert model.dense_steps == {"empty cache": 2}
    from lmms_eval.models.model_utils.gen_metrics import get_logged_metrics_history

    last = get_logged_metrics_history()[-1]
    assert last["read_ratio"] == model.read_ratio
    assert last["total_gen_tokens"] == 6
    assert last["dense_steps"] == {"empty cache": 2}


def test_a_dense_model_for_comparison(adapter: Any, llava: Path) -> None:
    model = adapter.OvalVlm(str(llava), oval=False, **SPARSE)
    (result,) = answers(model, (words(40), [photo()], GREEDY))
    assert result.text == generated("llava", f"word0 * {words(40)}", [photo()])
    assert model.read_ratio is None
    with attach(model.model, None, REFERENCE):  # nothing is attached
        pass


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_ends_before_a_stop_string(adapter: Any, llava: Path, beams: int) -> None:
    model = adapter.OvalVlm(str(llava), **FULL)
    text, settings = words(30), {**GREEDY, "max_new_tokens": 12, "num_beams": beams}
    whole = generated("llava", f"word0 * {text}", [photo()], max_new_tokens=12, num_beams=beams)
    third = whole.split()[2]
    (result,) = answers(model, (text, [photo()], {**settings, "until": ["\n\n", third]}))
    said = result.text.split()
    assert third not in result.text
    assert result.token_counts.output_tokens < 12 or beams > 1
    if beams == 1:
        assert said == whole.split()[: whole.split().index(third)]
    (unstopped,) = answers(model, (text, [photo()], {**settings, "until": "never said"}))
    assert unstopped.text == whole


def test_sampling(adapter: Any, llava: Path) -> None:
    model = adapter.OvalVlm(str(llava), **FULL)
    hot = {**GREEDY, "do_sample": True, "temperature": 50.0}
    free, kept, cold = answers(
        model, *((words(30), [photo()], {**hot, **more}) for more in ({}, {"top_p": 1e-6}, {"temperature": 0.0}))
    )
    greedy = generated("llava", f"word0 * {words(30)}", [photo()])
    assert free.text != greedy
    assert kept.text == cold.text == greedy


def test_unused_generation_kwargs_are_named(adapter: Any, llava: Path) -> None:
    from loguru import logger

    model, said = adapter.OvalVlm(str(llava), **SPARSE), list[str]()
    sink = logger.add(said.append, level="WARNING", format="{message}")
    answers(model, ("word1", None, {**GREEDY, "image_aspect_ratio": "pad", "seed": 3}), ("word1", None, GREEDY))
    logger.remove(sink)
    assert said == ["generation kwargs that are not used: image_aspect_ratio, seed\n"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"budget_page": 3}, TypeError, "unknown model_args: budget_page; known are pretrained, .*budget_pages"),
        ({"max_batch_size": 3}, TypeError, "unknown model_args: max_batch_size"),
        ({"batch_size": "2"}, ValueError, "batch_size must be 1, .*; got '2'"),
        ({"oval": "no"}, TypeError, "oval must be true or false, got 'no'"),
        ({"dtype": "int3"}, ValueError, "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"router": "nobody"}, ValueError, "nobody"),
        ({"budget_pages": 3, "budget_ratio": 0.5}, ValueError, "give budget_pages or budget_ratio, not both"),
        ({"block": 5}, ValueError, "block must be"),
    ],
)
def test_bad_arguments_are_named(
    adapter: Any, llava: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        adapter.OvalVlm(str(llava), **settings)


def test_a_chat_template_is_needed(adapter: Any, tmp_path: Path) -> None:
    save("llava", tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        adapter.OvalVlm(str(tmp_path))


def test_what_is_not_supported_says_so(adapter: Any, llava: Path) -> None:
    model = adapter.OvalVlm(str(llava), batch_size="1", **SPARSE)
    with pytest.raises(TypeError, match="doc_to_visual must return PIL images, got str"):
        answers(model, ("word1", ["clip.mp4"], GREEDY))
    for kind in ("loglikelihood", "generate_until_multi_round"):
        with pytest.raises(NotImplementedError, match="choose a task with output_type generate_until"):
            getattr(model, kind)(requests(model, kind, ("word1", None, {})))


def test_precision_and_cleaning_up(adapter: Any, llava: Path) -> None:
    model = adapter.OvalVlm(str(llava), device="cpu", dtype="bfloat16", **SPARSE)
    its_model = model.model
    assert its_model.dtype == torch.bfloat16
    answers(model, (words(40), [photo()], GREEDY))
    model.clean()
    assert not hasattr(model, "model")
    assert model.read_ratio < 1
    with attach(its_model, None, REFERENCE):  # it was detached
        pass


def test_lmms_eval_finds_the_model(adapter: Any) -> None:
    from lmms_eval.models import MODEL_REGISTRY_V2

    assert MODEL_REGISTRY_V2.get_model_class("oval") is adapter.OvalVlm


def write_task(folder: Path) -> None:
    """A task of three documents, data included."""
    datasets: Any = pytest.importorskip("datasets")
    documents = [{"image": photo(seed), "question": words(40, seed), "answer": words(2)} for seed in range(3)]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(documents)}).save_to_disk(str(folder / "data"))
    task = {
        "task": "tiny",
        "dataset_path": str(folder / "data"),
        "dataset_kwargs": {"load_from_disk": True},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_visual": "image",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "generation_kwargs": GREEDY,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny.yaml").write_text(json.dumps(task))


@pytest.mark.slow
def test_a_run_of_lmms_eval(adapter: Any, llava: Path, tmp_path: Path) -> None:
    """From the command line to the files that it writes."""
    pytest.importorskip("filelock._api", reason="lmms-eval 0.7.3 needs filelock < 4.3")
    write_task(tmp_path)
    arguments = ",".join(f"{name}={value}" for name, value in {"pretrained": llava, **FULL, "block": 2}.items())
    command = ["-m", "lmms_eval", "--model", "oval", "--model_args", arguments, "--tasks", "tiny"]
    command += ["--include_path", str(tmp_path), "--log_samples", "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment)
    (results,) = (tmp_path / "out").rglob("*_results.json")
    report = json.loads(results.read_text())
    assert report["throughput"]["total_gen_tokens"] == 18
    assert report["throughput"]["avg_read_ratio"] > 1  # everything is read, and the metadata
    (samples,) = (tmp_path / "out").rglob("*_samples_tiny.jsonl")
    said = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert said == [generated("llava", f"word0 * {words(40, seed)}", [photo(seed)]) for seed in range(3)]


def test_lmms_eval_stays_optional() -> None:
    """`oval_mm` never imports it; the module that does says what to install."""
    program = """
import sys, oval_mm
assert not [name for name in sys.modules if name.startswith("lmms_eval")]
sys.modules["lmms_eval"] = None
try:
    import oval_mm.lmms_eval_model
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == 'this model is run by lmms-eval: pip install "lmms-eval>=0.7.3"'
