import json
from collections.abc import Callable
from pathlib import Path

import pytest

from demos.checkpoint_cache import MANIFEST, cache_root, ensure_built, find_damage

CONTENT = b"weights " * 1000


class Builder:
    """Writes two files and counts how often it had to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, target: Path) -> None:
        self.calls += 1
        (target / "model.bin").write_bytes(CONTENT)
        (target / "sub").mkdir()
        (target / "sub" / "config.json").write_text("{}")


def _flip_a_bit(directory: Path) -> None:
    content = bytearray((directory / "model.bin").read_bytes())
    content[4321] ^= 4
    (directory / "model.bin").write_bytes(content)


def _truncate(directory: Path) -> None:
    (directory / "model.bin").write_bytes(CONTENT[:-1])


def _remove_file(directory: Path) -> None:
    (directory / "sub" / "config.json").unlink()


def _remove_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


def _cut_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text((directory / MANIFEST).read_text()[:50])


def _strange_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text(json.dumps({"version": 1, "files": {"model.bin": 3}}))


DAMAGES: dict[Callable[[Path], None], str] = {
    _flip_a_bit: "model.bin has changed since it was written",
    _truncate: "model.bin has 7,999 bytes instead of 8,000",
    _remove_file: "No such file",
    _remove_manifest: "No such file",
    _cut_manifest: "manifest.json is unreadable",
    _strange_manifest: "manifest.json is unreadable",
}


def test_an_intact_directory_is_built_once(tmp_path: Path) -> None:
    builder = Builder()
    for _ in range(3):
        directory = ensure_built(tmp_path / "deep" / "model", builder, version=1)
    assert builder.calls == 1
    assert (directory / "model.bin").read_bytes() == CONTENT
    assert find_damage(directory, 1) is None


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_damage_is_named_and_repaired(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = Builder()
    directory = ensure_built(tmp_path / "model", builder, version=1)
    damage(directory)
    ensure_built(directory, builder, version=1)
    message = capsys.readouterr().err
    assert DAMAGES[damage] in message
    assert "building it again" in message
    assert builder.calls == 2
    assert find_damage(directory, 1) is None


def test_another_version_of_the_builder_builds_again(tmp_path: Path) -> None:
    builder = Builder()
    directory = ensure_built(tmp_path / "model", builder, version=1)
    ensure_built(directory, builder, version=2)
    assert builder.calls == 2
    assert find_damage(directory, 1) == "made by version 2 of its builder, now 1"


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(target: Path) -> None:
        (target / "model.bin").write_bytes(CONTENT[:10])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_built(tmp_path / "model", interrupted, version=1)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "junk.bin").write_bytes(b"half")
    directory = ensure_built(tmp_path / "model", Builder(), version=1)
    assert not (tmp_path / "model.partial").exists()
    assert not (directory / "junk.bin").exists()


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OVAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() == Path.home() / ".cache" / "oval"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/oval")
    monkeypatch.setenv("OVAL_CACHE", "/mine")
    assert cache_root() == Path("/mine")
