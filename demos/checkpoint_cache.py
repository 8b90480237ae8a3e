"""Directories that are expensive to make: each is either complete and intact, or made again.

A builder fills a sibling named `<name>.partial`. Only when every file in it is listed in a manifest does the directory
get its real name, so an interrupted build leaves nothing that a later run could take for the finished thing.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def cache_root() -> Path:
    """Return where OVAL keeps files between runs: `$OVAL_CACHE`, else `$XDG_CACHE_HOME/oval`, else `~/.cache/oval`."""
    if own := os.environ.get("OVAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oval"


def ensure_built(directory: Path, build: Callable[[Path], None], version: int) -> Path:
    """Return `directory`, built now if it is missing, damaged or made by another version of its builder.

    Args:
        directory: where the finished files live.
        build: writes the files into the empty directory it is given.
        version: raised whenever `build` writes something else than before.
    """
    if find_damage(directory, version) is None:
        return directory
    from filelock import FileLock

    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        damage = find_damage(directory, version)  # another process may have built it while this one waited
        if damage is not None:
            if directory.exists():
                print(f"{directory}: {damage}; building it again", file=sys.stderr)
            _build(directory, build, version)
    return directory


def find_damage(directory: Path, version: int) -> str | None:
    """Say what is wrong with a built directory, or return None if every file in it is as it was written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != version:
            return f"made by version {manifest['version']} of its builder, now {version}"
        for name, expected in manifest["files"].items():
            if damage := _file_damage(directory / name, expected):
                return damage
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"
    return None


def _file_damage(path: Path, expected: dict[str, Any]) -> str | None:
    size_bytes = path.stat().st_size
    if size_bytes != expected["size_bytes"]:
        return f"{path.name} has {size_bytes:,} bytes instead of {expected['size_bytes']:,}"
    if _sha256(path) != expected["sha256"]:
        return f"{path.name} has changed since it was written"
    return None


def _build(directory: Path, build: Callable[[Path], None], version: int) -> None:
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        build(partial)
        _write_manifest(partial, version)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_manifest(directory: Path, version: int) -> None:
    files = {
        str(path.relative_to(directory)): {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = json.dumps({"version": version, "files": files}, indent=2)
    (directory / MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
