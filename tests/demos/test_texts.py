import pytest

from demos.texts import TEXTS, load_text


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_is_long_and_always_the_same(name: str) -> None:
    text = load_text(name)
    assert len(text) > 200_000
    assert "\0" not in text
    assert text == load_text(name)


def test_the_novel_is_complete() -> None:
    lines = load_text("novel").splitlines()
    assert len(lines) == 13_030
    assert lines[0] == "PRIDE AND PREJUDICE"
    assert lines[-1] == "her into Derbyshire, had been the means of uniting them."
    assert sum(line.startswith("Chapter ") for line in lines) == 61


def test_the_reference_repeats_no_paragraph() -> None:
    paragraphs = load_text("reference").split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_an_unknown_text_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown text 'poem': expected one of novel, reference, code"):
        load_text("poem")
