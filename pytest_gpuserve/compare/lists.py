"""The known-bad lists that a comparison's patch is for: where they are, and the patch to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.patch import make_patch
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.find import known_bad_paths
from pytest_gpuserve.matrix.known_bad import read_known_bad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.compare.patch import Patch
    from pytest_gpuserve.compare.values import Comparison

__all__ = ["KNOWN_BAD", "patch_of", "repository_above", "repository_of"]

KNOWN_BAD = Path("matrices/known_bad.yaml")


def repository_above(folder: Path, otherwise: Path) -> Path:
    """The repository that holds `folder`, else `otherwise`: `git apply` takes a patch's names from its top."""
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), otherwise)


def repository_of(project: Path, known_bad: Sequence[Path] = ()) -> Path:
    """The repository that holds the list, else the project: what the patch's paths are relative to."""
    start = (known_bad[0].absolute() if known_bad else project / KNOWN_BAD).parent
    return repository_above(start, project)


def patch_of(comparison: Comparison, after: dict[str, Any], project: Path, known_bad: Sequence[Path] = ()) -> Patch:
    """The patch for the lists `known_bad` (or the `project`'s own), paths relative to their repository's root.

    New entries go to the first list. Lists below the root that the record's entries come from are patched too.
    UsageError for a list in `known_bad` that is not there, or in another repository.
    """
    root = repository_of(project, known_bad)
    files: dict[str, str | None] = {}
    for path in known_bad:
        if not path.absolute().is_relative_to(root):
            raise UsageError(f"{path} is outside of {root}: one patch cannot be for two repositories.")
        if not path.is_file():
            raise UsageError(f"{path}: no such known-bad list.")
    # Only the list that nobody named may be missing: then the patch makes it.
    for path in [*(known_bad or [_default(project, root)]), *_named(after, root)]:
        files.setdefault(path.absolute().relative_to(root).as_posix(), _text(path))
    # All of these are read together, and an id that is there twice refuses the next run.
    beside = [entry.id for entry, _ in read_known_bad(known_bad_paths(project))[0]]
    return make_patch(comparison, after, files, next(iter(files)), beside)


def _default(project: Path, root: Path) -> Path:
    here = project / KNOWN_BAD
    return here if here.is_relative_to(root) else root / KNOWN_BAD


def _named(record: dict[str, Any], root: Path) -> list[Path]:
    """The lists that hold the entries of a record's cells, as far as they are here and below `root`."""
    names = {str((cell.get("known_bad") or {}).get("file") or "") for cell in record["cells"]} - {""}
    return [path for path in sorted(map(Path, names)) if path.absolute().is_relative_to(root) and path.is_file()]


def _text(path: Path) -> str | None:
    try:
        # Bytes, not text: newlines must stay as they are, or the patch does not apply.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from error
