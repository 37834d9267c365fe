"""Versions of an environment, read without importing anything of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.serve.environment import newest_tag, origin_of, read_versions

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, **versions: str) -> dict[str, str]:
    """Distributions as pip leaves them, each with a module that must not be imported. Returns the environment."""
    for name, version in versions.items():
        info = folder / f"{name}-{version.replace('+', '_')}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nSummary: x\n\nName: no\nVersion: 0\n"
        )
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
    return {"PYTHONPATH": str(folder)}


def test_canonical_names_and_our_words(tmp_path: Path) -> None:
    env = install(
        tmp_path,
        sglang="0.5.23",
        sgl_kernel="0.4.5",
        flashinfer_python="0.6.15.post1",
        torch="2.11.0+cu130",
        nvidia_nccl_cu13="2.28.9",
    )
    versions = read_versions(sys.executable, env)
    assert versions["sglang"] == "0.5.23"
    assert versions["sgl-kernel"] == versions["sglang-kernel"] == "0.4.5"
    assert versions["flashinfer-python"] == versions["flashinfer"] == "0.6.15.post1"
    assert versions["nccl"] == "2.28.9"
    assert versions["cuda"] == "13.0"
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("torch", "runtime", "cuda"),
    [
        ("2.11.0+cu130", {}, "13.0"),
        ("2.9.0+cu128", {}, "12.8"),
        ("2.13.0+cpu", {}, None),
        ("2.13.0", {"nvidia_cuda_runtime": "13.1.80"}, "13.1.80"),
        ("2.9.0+cu128", {"nvidia_cuda_runtime_cu12": "12.8.90"}, "12.8.90"),
    ],
)
def test_cuda(tmp_path: Path, torch: str, runtime: dict[str, str], cuda: str | None) -> None:
    assert read_versions(sys.executable, install(tmp_path, sglang="1", torch=torch, **runtime)).get("cuda") == cuda


def test_the_first_of_two_on_the_path_counts_and_damaged_ones_do_not(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    install(first, sglang="0.5.23")
    install(second, sglang="0.5.10.post1")
    (first / "broken-1.dist-info").mkdir()
    (first / "odd-1.dist-info").mkdir()
    (first / "odd-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00Name")
    (first / "none.egg-info").write_text("Name: Old.Egg\nVersion: 3\n")
    versions = read_versions(sys.executable, {"PYTHONPATH": f"{first}:{second}:/nowhere"})
    assert versions["sglang"] == "0.5.23"
    assert versions["old-egg"] == "3"
    assert "broken" not in versions


def test_it_is_asked_once_and_the_answer_is_the_callers_own(tmp_path: Path) -> None:
    env = install(tmp_path, sglang="0.5.23")
    read_versions(sys.executable, env)["sglang"] = "changed"
    install(tmp_path / "later", sglang="9")
    assert read_versions(sys.executable, env)["sglang"] == "0.5.23"


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_no_such_interpreter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist: .*/gone; name .* with --gpu-server-python"):
        read_versions(str(tmp_path / "gone"), {})


def test_not_executable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not executable"):
        read_versions(script(tmp_path / "p", "", 0o644), {})


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read_versions(str(tmp_path), {})


def test_a_script_without_its_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the program its first line names does not exist"):
        read_versions(script(tmp_path / "p", "#!/nowhere/python\n"), {})


def test_not_a_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a Python interpreter: it answered 'hello'"):
        read_versions(script(tmp_path / "p", "#!/bin/sh\necho hello\n"), {})


def test_an_interpreter_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be asked for its versions: libpython3\.so: cannot open"):
        read_versions(script(tmp_path / "p", "#!/bin/sh\necho libpython3.so: cannot open >&2\nexit 127\n"), {})


def test_a_python_without_sglang(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no SGLang: none of its .* distributions is called sglang"):
        read_versions(sys.executable, install(tmp_path, torch="2.13.0"))


def checkout(folder: Path, *tags: str) -> str:
    """A project in a git repository with these tags, all but the last two commits back; its commit."""
    project = folder / "python"
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text("[project]\nname = 'sglang'\n")

    def git(*words: str) -> str:
        given = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y", *words]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    for tag in tags:
        git("tag", tag)
    git("commit", "-qm", "two", "--allow-empty")
    return git("rev-parse", "--short=9", "HEAD").strip()


def test_the_newest_version_among_a_checkouts_tags(tmp_path: Path) -> None:
    """By the order of versions, not of letters; another part's tags, and what is not merged, do not count."""
    commit = checkout(tmp_path / "a", "v0.5.9", "v0.5.10.post1", "gateway-v0.9.0", "v0.0.0", "nightly")
    assert newest_tag(tmp_path / "a/python") == ("0.5.10.post1", commit)
    commit = checkout(tmp_path / "b")
    assert newest_tag(tmp_path / "b/python") == ("", commit)
    (tmp_path / "a/other").mkdir()
    assert newest_tag(tmp_path / "a/other") == ("", ""), "it merely lies inside of a repository"
    assert newest_tag(tmp_path / "nowhere") == ("", "")


def test_where_a_distribution_was_installed_from(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    env = install(site, sglang="0.0.0.dev1+g1a2b3c4", torch="2", triton="3")
    url = {"url": (tmp_path / "my checkout/python").as_uri(), "dir_info": {"editable": True}}
    (site / "sglang-0.0.0.dev1_g1a2b3c4.dist-info/direct_url.json").write_text(json.dumps(url))
    archive = {"url": "https://x.y/torch.whl", "archive_info": {}}
    (site / "torch-2.dist-info/direct_url.json").write_text(json.dumps(archive))
    assert origin_of("sglang", sys.executable, env) == tmp_path / "my checkout/python"
    assert origin_of("torch", sys.executable, env) is origin_of("triton", sys.executable, env) is None
    # A source folder on the path, with the metadata that a build in place leaves there.
    env = install(tmp_path / "src", sglang="0.0.0")
    assert origin_of("sglang", sys.executable, env) == tmp_path / "src"
