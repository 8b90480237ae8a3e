"""Talk about a picture in the browser: answers, what was read for them, and where OVAL looked.

`python -m demos.web` serves a page on this machine; it fetches nothing from elsewhere. Needs the extra `web`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from demos.image_qa import IMAGES, SAMPLES, add_model_options, draw, figures, make_config
from demos.tiny_llava import Answer, Reader, load
from oval_core import OvalConfig
from oval_mm.pictures import PictureError, load_picture

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before anything imports gradio

OVAL, DENSE = MODES = ("OVAL", "dense")
FORGOTTEN_AFTER_S = 3600  # conversations of pages that were closed
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"  # the browser refuses what is not of this host
CSS = """#picture img {min-width: 220px}
#mode label.selected {outline: 2px solid #c2410c}
button[title=Share], button[aria-label=Share] {display: none}"""
HEAD = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


@dataclass
class Talk:
    """One person's conversation about one picture.

    Args:
        picture: RGB; None: not chosen yet.
        turns: questions and answers so far.
        readers: by mode; a reader that comes late reads the turns that it has missed.
    """

    picture: Any = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    readers: dict[str, Reader] = field(default_factory=dict)


class Room:
    """What the page does, without the page. One question at a time is answered.

    Args:
        model, processor: see `demos.tiny_llava.Reader`.
        config: of the mode OVAL.
        folder: for heat pictures.
    """

    def __init__(self, model: Any, processor: Any, config: OvalConfig, folder: Path) -> None:
        self.model, self.processor, self.folder = model, processor, folder
        self._configs = {OVAL: config, DENSE: None}
        self._turn = threading.Lock()

    def choose(self, file: str | Path | None) -> Talk:
        """Begin to talk about a picture file. Raises PictureError if it cannot be shown."""
        if file is None:
            raise PictureError("choose a picture first")
        return Talk(load_picture(file))

    def ask(self, talk: Talk, question: str, mode: str) -> tuple[Answer, Path | None]:
        """The answer, added to the conversation, and its heat picture if pages were left out.

        Raises:
            ValueError: no picture or no question.
        """
        if talk.picture is None:
            raise PictureError("choose a picture first")
        with self._turn:
            if mode not in talk.readers:
                talk.readers[mode] = Reader(self.model, self.processor, [talk.picture], self._configs[mode])
            answer = talk.readers[mode].answer(talk.turns, question)
            path = Path(tempfile.mkdtemp(dir=self.folder)) / "heat.png"
            is_drawn = draw(answer, question, path)
        talk.turns.append((question.strip(), answer.text))
        return answer, path if is_drawn else None

    def forget(self, talk: Talk | None) -> None:
        """Begin the conversation again, about the same picture."""
        if talk is not None:
            with self._turn:
                talk.turns.clear()
                talk.readers.clear()


def describe(answer: Answer, mode: str) -> str:
    """An answer and what was read for it, Markdown."""
    text = answer.text or "(no words)"
    if mode == DENSE:
        return f"**{text}**\n\ndense: everything was read"
    bytes_read, image_pages = figures(answer)
    reasons = "; ".join(f"{count} dense steps: {reason}" for reason, count in answer.dense_steps.items())
    return f"**{text}**\n\nOVAL read {bytes_read} of the KV bytes, {image_pages} of the image pages {reasons}".strip()


def shown_messages(question: str, answer: Answer, heat: Path | None, mode: str) -> list[dict[str, Any]]:
    """What a chat window adds for one turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": describe(answer, mode)})
    if heat is not None:
        messages.append({"role": "assistant", "content": {"path": str(heat), "alt_text": "pages read"}})
    return messages


def build_page(room: Room) -> Any:
    """The page as `gradio.Blocks`."""
    import gradio

    samples = [str(IMAGES / name) for name in SAMPLES]
    with gradio.Blocks(title="OVAL: ask about a picture", analytics_enabled=False) as page:
        talk = gradio.State(time_to_live=FORGOTTEN_AFTER_S)
        gradio.Markdown("# Ask about a picture\nOVAL reads few pages of it; the heat shows which.")
        question = gradio.Textbox(label="question", submit_btn=True, elem_id="question", render=False)
        with gradio.Row():
            with gradio.Column(scale=1):
                upload, picture, gallery, problem = _picture_side(samples)
                examples = [[asked] for turns in SAMPLES.values() for asked, _ in turns]
                gradio.Examples(examples, question, label="for example, in the order of these pictures")
            with gradio.Column(scale=2):
                chat, mode = _chat_side(question)
        choose, pick, ask = _actions(room, samples)
        begun = [talk, picture, chat, problem]
        upload.upload(choose, [upload, talk], begun, show_progress="hidden")
        gallery.select(pick, [talk], begun, show_progress="hidden")
        question.submit(ask, [talk, question, mode, chat], [chat, question, problem], concurrency_limit=1)
        chat.clear(room.forget, [talk])
    return page


def _picture_side(samples: list[str]) -> tuple[Any, ...]:
    """Where a picture is chosen, and where it says what is wrong."""
    import gradio

    return (
        gradio.UploadButton("Upload a picture, or pick one below", elem_id="upload"),
        gradio.Image(label="picture", interactive=False, elem_id="picture", height=280, buttons=["fullscreen"]),
        gradio.Gallery(
            samples, show_label=False, columns=3, height=150, elem_id="samples", allow_preview=False, buttons=[]
        ),
        gradio.Markdown(elem_id="problem"),
    )


def _chat_side(question: Any) -> tuple[Any, ...]:
    """Where questions are asked, below their answers."""
    import gradio

    chat = gradio.Chatbot(label="conversation", elem_id="chat", height=560, buttons=[])  # a turn with heat fits
    question.render()
    return chat, gradio.Radio(MODES, value=OVAL, label="how to read", elem_id="mode")


def _actions(room: Room, samples: list[str]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What happens when a file comes, a sample is picked, and a question is asked."""
    import gradio

    def choose(file: str, talk: Talk | None) -> tuple[Any, ...]:
        try:
            begun = room.choose(file)
        except PictureError as error:
            return talk, gradio.skip(), gradio.skip(), f"⚠️ {error}"
        return begun, begun.picture, [], ""

    def pick(talk: Talk | None, event: gradio.SelectData) -> tuple[Any, ...]:
        return choose(samples[event.index], talk)

    def ask(talk: Talk | None, question: str, mode: str, chat: list[Any]) -> tuple[Any, ...]:
        try:
            answer, heat = room.ask(talk or Talk(), question, mode)
        except ValueError as error:
            return gradio.skip(), gradio.skip(), f"⚠️ {error}"
        return [*chat, *shown_messages(question, answer, heat, mode)], "", ""

    pick.__annotations__["event"] = gradio.SelectData  # gradio looks for it
    return choose, pick, ask


def serve(room: Room, port: int | None = None, wait: bool = True) -> Any:
    """Serve the page on this machine alone; returns the page, whose `local_url` tells where."""
    import gradio

    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page = build_page(room)
    page.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        prevent_thread_lock=not wait,
        quiet=not wait,
        allowed_paths=[str(IMAGES), str(room.folder)],
        theme=theme,
        head=HEAD,
        css=CSS,
        ssr_mode=False,
        footer_links=[],
    )
    return page


def main(arguments: list[str] | None = None) -> None:
    """Serve until interrupted; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m demos.web", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    options = parser.parse_args(arguments)
    config = make_config(parser, options)
    if find_spec("gradio") is None:
        sys.exit('web: needs gradio, which is not installed: pip install -e ".[web]"')
    try:
        model, processor = load(options.model)
    except (OSError, ValueError) as error:
        sys.exit(f"web: {error}")
    with tempfile.TemporaryDirectory(prefix="oval_web_") as folder:
        serve(Room(model, processor, config, Path(folder)), options.port)


if __name__ == "__main__":
    main()
