"""Long real texts for demos and benchmarks, none of which needs a network.

`novel` is kept in the repository; `reference` and `code` come with every Python installation, so their exact words
follow the version of Python that runs.

    python -m demos.texts DIR

writes all of them to files.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

_NOVEL = Path(__file__).parent / "data" / "pride_and_prejudice.txt"
_CODE_MODULES = (
    "argparse", "inspect", "typing", "dataclasses", "ast", "difflib", "tarfile", "pathlib", "statistics", "textwrap",
)  # fmt: skip


def load_text(name: str) -> str:
    """Return one whole text.

    Args:
        name: one of `TEXTS`: `novel` (*Pride and Prejudice*), `reference` (the Python language reference, English
            prose with some markup) or `code` (Python source).

    Raises:
        ValueError: if there is no text of that name.
    """
    if name not in _LOADERS:
        raise ValueError(f"unknown text {name!r}: expected one of {', '.join(TEXTS)}")
    return _LOADERS[name]()


def _novel() -> str:
    return _NOVEL.read_text(encoding="utf-8")


def _reference() -> str:
    from pydoc_data.topics import topics

    # Topics overlap: a passage that occurs twice would let a model copy instead of read.
    paragraphs = (paragraph for _, topic in sorted(topics.items()) for paragraph in topic.strip().split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def _code() -> str:
    return "\n".join(_module_source(name) for name in _CODE_MODULES)


def _module_source(name: str) -> str:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"text 'code': this Python has no source file for the module {name!r}")
    return Path(spec.origin).read_text(encoding="utf-8")


_LOADERS: dict[str, Callable[[], str]] = {"novel": _novel, "reference": _reference, "code": _code}
TEXTS = tuple(_LOADERS)


def write_texts(folder: Path) -> None:
    """Write every text to `folder/<name>.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        (folder / f"{name}.txt").write_text(load_text(name), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m demos.texts DIR")
    write_texts(Path(sys.argv[1]))
