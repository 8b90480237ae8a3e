"""What requests of lmms-eval mean for transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from oval_mm.lmms_eval_requests import (
    generation_settings,
    pictures_of,
    stop_strings,
    stopping_criteria,
    text_before,
    user_message,
)
from tests.mm.tiny_vlms import photo, tiny

GREEDY = {"max_new_tokens": 1024, "num_beams": 1, "do_sample": False}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, GREEDY),
        ({"temperature": 0, "do_sample": False, "top_p": None}, GREEDY),
        ({"temperature": 0.0, "do_sample": True, "top_p": 0.9}, GREEDY),
        ({"temperature": 0.7, "do_sample": False, "top_k": 5}, GREEDY),
        ({"max_new_tokens": 16, "until": ["\n"], "image_aspect_ratio": "pad"}, {**GREEDY, "max_new_tokens": 16}),
        ({"num_beams": 3, "repetition_penalty": 1.2}, {**GREEDY, "num_beams": 3, "repetition_penalty": 1.2}),
        ({"do_sample": True}, {**GREEDY, "do_sample": True}),
        ({"temperature": 0.7}, {**GREEDY, "do_sample": True, "temperature": 0.7}),
        (
            {"do_sample": True, "temperature": 1, "top_p": 0.9, "top_k": 5},
            {**GREEDY, "do_sample": True, "temperature": 1, "top_p": 0.9, "top_k": 5},
        ),
    ],
)
def test_generation_settings(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    assert generation_settings(asked) == expected


def test_pictures_are_rgb_images() -> None:
    grey = photo().convert("L")
    assert [picture.mode for picture in pictures_of([photo(), grey])] == ["RGB", "RGB"]
    assert pictures_of(None) == pictures_of([]) == []
    with pytest.raises(TypeError, match=r"doc_to_visual must return PIL images, got str: 'clip\.mp4'"):
        pictures_of([photo(), "clip.mp4"])


def parts(context: str, pictures: list[Image.Image]) -> list[Any]:
    """Texts and pictures of a message, in order."""
    message = user_message(context, pictures)
    assert message["role"] == "user"
    return [part["text"] if part["type"] == "text" else part["image"] for part in message["content"]]


def test_pictures_stand_where_the_text_says_so() -> None:
    one, two = photo(0), photo(1)
    assert parts("what is it?", [one]) == [one, "what is it?"]
    assert parts("what is it?", [one, two]) == [one, two, "what is it?"]
    assert parts("what?", []) == ["what?"]
    assert parts("is <image>like <image>?", [one, two]) == ["is ", one, "like ", two, "?"]
    assert parts("<image>what?", [one]) == [one, "what?"]
    assert parts("is <image>like that?", [one, two]) == [one, two, "is like that?"]
    assert parts("is <image>it?", []) == ["is it?"]


def test_stop_strings() -> None:
    assert stop_strings(None) == stop_strings([]) == stop_strings([""]) == []
    assert stop_strings("\n") == stop_strings(["\n", ""]) == ["\n"]
    with pytest.raises(TypeError, match=r"until must be a string or a list of strings, got \[3\]"):
        stop_strings([3])
    assert text_before(" a b\n\nc;d", ["\n\n", ";"]) == "a b"
    assert text_before(" a;b\n\nc ", ["\n\n", ";"]) == "a"
    assert text_before(" a ", []) == "a"


def test_rows_end_where_they_say_a_stop_string() -> None:
    tokenizer = tiny("llava").processor.tokenizer
    prompt = [3, 4, 5]  # word0 word1 word2
    rows = torch.tensor([[*prompt, 6, 7, 8], [*prompt, 8, 6, 9], [*prompt, 9, 9, 9]])
    (criterion,) = stopping_criteria(tokenizer, ["word3 word4", "word5", "word2"], len(prompt))
    assert criterion(rows[:, :4], None).tolist() == [False, True, False]
    assert criterion(rows[:, :5], None).tolist() == [True, True, False]
    assert list(stopping_criteria(tokenizer, [], len(prompt))) == []
