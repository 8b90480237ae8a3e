"""The page about pictures: its logic without a browser, and the page itself in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from demos import web
from demos.image_qa import IMAGES, SAMPLES
from demos.tiny_llava import load
from demos.web import DENSE, OVAL, Room, Talk, describe, shown_messages
from oval_core import OvalConfig
from oval_mm import IMAGE_CONFIG
from oval_mm.pictures import PictureError
from tests.demos.test_image_qa import FULL_BUDGET, SPARSE, TURNS, talking

SAMPLE = IMAGES / next(iter(SAMPLES))
TEXT_MESSAGE = "notes.png is not a picture but a text file"
PATIENCE_S = 300


def make_room(folder: Path, config: OvalConfig = SPARSE) -> Room:
    vlm = talking("llava")
    return Room(vlm.model, vlm.processor, config, folder)


def test_a_conversation_goes_on_in_either_mode(tmp_path: Path) -> None:
    room = make_room(tmp_path)
    talk = room.choose(SAMPLE)
    first, heat = room.ask(talk, TURNS[0], OVAL)
    assert 0 < first.read_ratio < 1
    assert heat is not None
    assert heat.read_bytes().startswith(b"\x89PNG")
    second, nothing = room.ask(talk, f" {TURNS[1]} ", DENSE)
    assert nothing is None
    assert talk.turns == [(TURNS[0], first.text), (TURNS[1], second.text)]
    fresh = Talk(talk.picture, talk.turns[:1])
    assert room.ask(fresh, TURNS[1], DENSE)[0].text == second.text
    room.ask(talk, "word1", OVAL)
    assert len(talk.turns) == 3
    room.forget(talk)
    assert room.ask(talk, TURNS[0], OVAL)[0].text == first.text
    assert len(talk.turns) == 1


def test_what_is_shown_says_what_was_read(tmp_path: Path) -> None:
    room = make_room(tmp_path)
    talk = room.choose(SAMPLE)
    answer, heat = room.ask(talk, TURNS[0], OVAL)
    asked, answered, picture = shown_messages(TURNS[0], answer, heat, OVAL)
    assert asked == {"role": "user", "content": TURNS[0]}
    assert f"OVAL read {answer.read_ratio:.1%} of the KV bytes, {answer.image_pages:.1%}" in answered["content"]
    assert picture["content"]["path"] == str(heat)
    assert "everything was read" in describe(answer, DENSE)
    everything, nothing = make_room(tmp_path, FULL_BUDGET).ask(Talk(talk.picture), "word1", OVAL)
    assert nothing is None
    assert " dense steps: " in describe(everything, OVAL)


def test_bad_input_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    room = make_room(tmp_path)
    (tmp_path / "notes.png").write_text("some text")
    with pytest.raises(PictureError, match=TEXT_MESSAGE):
        room.choose(tmp_path / "notes.png")
    for missing in (lambda: room.choose(None), lambda: room.ask(Talk(), "word1", OVAL)):
        with pytest.raises(PictureError, match="choose a picture first"):
            missing()
    talk = room.choose(SAMPLE)
    with pytest.raises(ValueError, match="expected a question, got nothing"):
        room.ask(talk, " ", OVAL)
    assert talk.turns == []
    assert not hasattr(room.model, "_oval")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "find_spec", lambda name: True)
    with pytest.raises(SystemExit, match=r"web: .*nothing"):
        web.main(["--model", str(tmp_path / "nothing")])
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="web: needs gradio"):
        web.main([])


@contextmanager
def serving(room: Room) -> Iterator[str]:
    """Address of the page, served on this machine."""
    pytest.importorskip("gradio", reason="needs gradio: pip install gradio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradio's own
        served = web.serve(room, wait=False)
        try:
            yield served.local_url
        finally:
            served.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1100"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(paths[1]))
    yield driver
    driver.quit()


def wait_for(look: Callable[[], Any]) -> Any:
    """What `look` gives as soon as that is not empty."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing came within {PATIENCE_S} s")
        time.sleep(0.2)
    return found


def requested_hosts(driver: Any) -> set[str]:
    """Hosts that the page has asked for anything."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    ours = [one["request"]["url"] for one in sent if not one.get("documentURL", "").startswith("chrome")]
    return {urlparse(url).hostname or "" for url in ours if urlparse(url).scheme.startswith(("http", "ws"))}


def find(driver: Any, selector: str) -> list[Any]:
    return list(driver.find_elements("css selector", selector))


def heats_shown(driver: Any, least: int) -> list[Any]:
    """The pictures in the conversation, once there are enough that are drawn."""
    is_drawn = "return arguments[0].naturalWidth > 300"
    drawn = [image for image in find(driver, "#chat img") if driver.execute_script(is_drawn, image)]
    return drawn if len(drawn) >= least else []


def upload(driver: Any, file: Path) -> None:
    wait_for(lambda: find(driver, "input[type=file]"))[0].send_keys(str(file))


def upload_text(driver: Any, folder: Path) -> None:
    """Upload a text file as a picture, and wait until the page says what is wrong."""
    (folder / "notes.png").write_text("some text")
    upload(driver, folder / "notes.png")
    wait_for(lambda: TEXT_MESSAGE in driver.page_source)


def ask(driver: Any, question: str) -> None:
    find(driver, "#question textarea")[0].send_keys(question + "\n")


def is_said(driver: Any, text: str, least: int) -> bool:
    return str(find(driver, "#chat")[0].text).count(text) >= least


def ask_dense(driver: Any, *questions: str) -> None:
    find(driver, "#mode input")[1].click()
    for turn, question in enumerate(questions, 1):
        ask(driver, question)
        wait_for(partial(is_said, driver, "everything was read", turn))


def answers(driver: Any) -> list[str]:
    """The answers in the conversation, without what was read for them."""
    script = "return [...document.querySelectorAll('#chat strong')].map(one => one.innerText)"
    return list(driver.execute_script(script))


def check_logs(driver: Any) -> None:
    """Nothing came from another host, and nothing went wrong."""
    assert requested_hosts(driver) == {"127.0.0.1"}
    assert [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    with serving(make_room(tmp_path)) as page:
        browser.get(page)
        upload_text(browser, tmp_path)
        upload(browser, SAMPLE)
        wait_for(lambda: find(browser, "#picture img"))
        wait_for(lambda: TEXT_MESSAGE not in browser.page_source)
        for turn, question in enumerate(TURNS, 1):
            ask(browser, question)
            assert len(wait_for(partial(heats_shown, browser, turn))) == turn
            assert browser.page_source.count("of the KV bytes") >= turn
        ask_dense(browser, "word1")
        browser.save_screenshot(str(tmp_path / "page.png"))
        check_logs(browser)


@pytest.mark.slow
def test_the_small_llava_answers_in_a_browser(browser: Any, tmp_path: Path) -> None:
    questions, right = zip(*SAMPLES[SAMPLE.name], strict=True)
    with serving(Room(*load(), IMAGE_CONFIG, tmp_path)) as page:
        browser.get(page)
        wait_for(lambda: find(browser, "#samples button img"))[0].click()
        wait_for(lambda: find(browser, "#picture img"))
        for turn, question in enumerate(questions, 1):
            ask(browser, question)
            assert len(wait_for(partial(heats_shown, browser, turn))) == turn
        assert answers(browser) == list(right)
        ratios = re.findall(r"OVAL read ([\d.]+)% of the KV bytes", find(browser, "#chat")[0].text)
        assert [0 < float(ratio) < 100 for ratio in ratios] == [True] * len(questions)
        find(browser, "#chat button[title=Clear]")[0].click()
        wait_for(lambda: not answers(browser))
        ask_dense(browser, *questions)
        assert answers(browser) == list(right)
        upload_text(browser, tmp_path)
        check_logs(browser)
