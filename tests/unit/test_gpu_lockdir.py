"""The lock directory: what is made, and what is refused with which words."""

from __future__ import annotations

import os
import stat
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import lockdir
from pytest_gpuserve.gpu.lockdir import default_lock_dir, filesystem_of, is_network, prepare, stem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 0:30 / /home rw shared:5 - nfs4 filer:/home rw,vers=4.2
31 30 0:31 / /home/alice/fast rw - xfs /dev/nvme0n1 rw
32 22 0:32 / /mnt/my\040disk rw master:1 propagate_from:2 - fuse.sshfs alice@host: rw
33 22 0:33 / /data rw - ext4 /dev/sdb rw
34 33 0:34 / /data rw - lustre mgs:/data rw
a line of no sense
"""


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_missing_directory_is_made_for_everybody_whatever_the_umask(tmp_path: Path) -> None:
    made = prepare(tmp_path / "deep" / "locks")
    assert stat.S_IMODE(made.stat().st_mode) == 0o777
    assert prepare(made) == made
    assert [path.name for path in made.parent.iterdir()] == ["locks"]


def test_directory_of_a_group_is_accepted_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.mkdir()
    path.chmod(0o2770)
    assert stat.S_IMODE(prepare(path).stat().st_mode) == 0o2770


def test_sticky_directory_is_refused_with_a_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UsageError, match=rf"{tmp_path} is sticky \(mode 1777\).*{tmp_path}/gpuserve.*--gpu-lock-dir"):
        prepare(tmp_path)
    assert prepare(tmp_path / "gpuserve").is_dir()


def test_symlink_is_refused_even_if_it_leads_to_a_good_directory(tmp_path: Path) -> None:
    good = prepare(tmp_path / "good")
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(UsageError, match="is a symlink"):
        prepare(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a symlink"):
        prepare(tmp_path / "dangling")


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        prepare(tmp_path / "file")
    with pytest.raises(MachineError, match=r"cannot be (made|read)"):
        prepare(tmp_path / "file" / "below")


def test_directory_that_cannot_be_written_to_names_owner_mode_and_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root may write anywhere, so what the kernel answers is stood in for; test_lease_users.py does it as another user.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(MachineError, match=rf"{tmp_path} \(owner uid \d+, mode 700\) is not writable.*chmod 0777"):
        prepare(tmp_path)


def test_network_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockdir, "filesystem_of", lambda _path, _mounts: "nfs4")
    with pytest.raises(UsageError, match=r"network file system \(nfs4\)"):
        prepare(tmp_path / "locks")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/tmp/locks", "ext4"),
        ("/home/bob/locks", "nfs4"),
        ("/homework", "ext4"),
        ("/home/alice/fast/locks", "xfs"),
        ("/mnt/my disk/locks", "fuse.sshfs"),
        ("/data", "lustre"),
    ],
)
def test_longest_mount_point_decides_and_the_later_of_two(path: str, kind: str) -> None:
    assert filesystem_of(PurePosixPath(path), MOUNTS) == kind


NETWORK = ["nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.ceph-fuse", "lustre", "gpfs", "9p", "fuse.sshfs", "beegfs"]
LOCAL = ["ext4", "xfs", "tmpfs", "overlay", "btrfs", "zfs", "f2fs", "fuse.lxcfs", "fuseblk", "nfsd", "virtiofs"]


@pytest.mark.parametrize("kind", [*NETWORK, *LOCAL])
def test_network_file_systems_by_type(kind: str) -> None:
    assert is_network(kind) == (kind in NETWORK)


@given(st.text())
def test_mountinfo_of_no_sense_is_no_error(text: str) -> None:
    filesystem_of(PurePosixPath("/x"), text)


@given(st.text(min_size=1, max_size=60))
def test_any_uuid_gives_a_plain_file_name(uuid: str) -> None:
    name = stem(uuid)
    assert name
    assert "/" not in name
    assert not name.startswith(".")


def test_default_directory_is_machine_wide_and_below_a_fixed_path() -> None:
    assert str(default_lock_dir()) in {"/run/lock/gpuserve", "/var/tmp/gpuserve-locks"}
