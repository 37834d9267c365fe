"""Which files a run reads."""

from pathlib import Path

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.find import available, find_matrices, known_bad_paths, packaged_dir


@pytest.fixture
def rootdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its own sm120 and lab matrices; the current directory is another one."""
    (tmp_path / "project/matrices").mkdir(parents=True)
    for name in ("sm120", "lab", "sm10x", "known_bad"):
        (tmp_path / f"project/matrices/{name}.yaml").write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "project"


def test_a_name_is_the_projects_matrix_before_the_packaged_one(rootdir):
    assert find_matrices(["sm120", "cpu"], rootdir, []) == [
        rootdir / "matrices/sm120.yaml",
        packaged_dir() / "cpu.yaml",
    ]


def test_a_file_comes_before_a_name(rootdir):
    Path("lab").write_text("")
    assert find_matrices(["lab", "lab"], rootdir, []) == [Path("lab")]


def test_a_folder_of_that_name_is_no_matrix(rootdir):
    Path("lab").mkdir()
    assert find_matrices(["lab"], rootdir, []) == [rootdir / "matrices/lab.yaml"]


def test_auto_is_the_matrices_of_the_archs_here_each_once(rootdir):
    found = find_matrices(["auto", "sm120"], rootdir, ["sm120", "sm103", "sm120"])
    assert found == [rootdir / "matrices/sm120.yaml", rootdir / "matrices/sm10x.yaml"]


@pytest.mark.parametrize(
    ("name", "archs", "message"),
    [
        ("sm12", [], r"there is no matrix 'sm12'; did you mean 'sm12.'\? There are: .*lab.*sm120.*cpu"),
        ("nothing-like-it", [], r"there is no matrix 'nothing-like-it'\. There are: "),
        ("none/sm120.yaml", [], r"the matrix file none/sm120\.yaml does not exist\. There are: "),
        ("..", [], r"there is no matrix '\.\.'"),
        ("./", [], r"the matrix file \./ is a folder"),
        ("known_bad", [], "known_bad is the list of known failures, not a matrix"),
        ("", [], "there is no matrix ''"),
        ("auto", [], "'auto' is the matrix of the GPUs here, and there are none"),
        ("auto", ["sm75"], r"'auto' found sm75 here, for which there is no matrix sm75\.yaml\. There are: "),
    ],
)
def test_what_cannot_be_found(rootdir, name, archs, message):
    with pytest.raises(UsageError, match=message):
        find_matrices([name], rootdir, archs)


@pytest.mark.parametrize("without", ["", "no GPU", "there is no driver. Without a GPU: --gpu-plan, --gpu-sim 8xsm120."])
def test_auto_without_a_gpu_says_why_and_what_can_be_done_instead(rootdir, without):
    with pytest.raises(UsageError) as refused:
        find_matrices(["auto"], rootdir, [], without)
    said = str(refused.value)
    assert without.rstrip(".") in said
    assert "lab" in said
    assert said.count("--gpu-plan") == said.count("--gpu-sim 8xsm120") == 1


def test_the_known_bad_lists_each_once(rootdir, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("")
    ours = rootdir / "matrices/known_bad.yaml"
    assert known_bad_paths(rootdir, [more, ours]) == [packaged_dir() / "known_bad.yaml", ours, more]
    with pytest.raises(UsageError, match=r"the known-bad list .*none\.yaml is not a file"):
        known_bad_paths(rootdir, [tmp_path / "none.yaml"])


def test_a_checkouts_own_root_does_not_double_the_packaged_list():
    root = packaged_dir().parent
    assert known_bad_paths(root) == [root / "matrices/known_bad.yaml"]
    assert "known_bad" not in available(root)
    assert {"cpu", "sm100", "sm120"} <= available(root).keys()
