"""Which libucp is loaded, and what the user is told about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlink.errors import UcxUnavailable
from kvlink.transport import find_ucx, rdma_devices

WHEEL = find_ucx({}).path


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """An empty file system: no RDMA device, no system UCX, nothing loaded."""
    return tmp_path


def add_system_ucx(host: Path, *, verbs: bool) -> Path:
    folder = host / "usr/lib64"
    (folder / "ucx").mkdir(parents=True)
    if verbs:
        (folder / "ucx/libuct_ib.so.0").touch()
    library = folder / "libucp.so.0"
    library.touch()
    return library


def add_rdma_device(host: Path) -> None:
    (host / "sys/class/infiniband/mlx5_0").mkdir(parents=True)


def add_loaded_ucx(host: Path, library: str) -> Path:
    (host / "proc/self").mkdir(parents=True)
    path = host / library
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    (host / "proc/self/maps").write_text(
        f"7f0000000000-7f0000001000 r--p 00000000 fe:00 1  /usr/lib/libc.so.6\n"
        f"7f0000002000-7f0000003000 r-xp 00000000 fe:00 2  {path}\n"
    )
    return path


def test_the_wheel_is_taken_where_there_is_nothing_to_gain_by_another(host: Path) -> None:
    add_system_ucx(host, verbs=True)
    choice = find_ucx({}, root=host)
    assert choice.path == WHEEL
    assert not choice.warnings


def test_a_system_ucx_with_verbs_is_taken_on_a_host_with_rdma_devices(host: Path) -> None:
    library = add_system_ucx(host, verbs=True)
    add_rdma_device(host)
    choice = find_ucx({}, root=host)
    assert choice.path == library
    assert choice.can_use_rdma
    assert not choice.warnings
    assert rdma_devices(root=host) == ("mlx5_0",)


@pytest.mark.parametrize("wish", ["auto", "wheel"])
def test_rdma_devices_that_the_library_cannot_use_are_warned_of(host: Path, wish: str) -> None:
    add_rdma_device(host)
    add_system_ucx(host, verbs=False)
    choice = find_ucx({"KVLINK_UCX": wish}, root=host)
    assert choice.path == WHEEL
    assert not choice.can_use_rdma
    assert "mlx5_0" in choice.warnings[0]
    assert "KVLINK_UCX=system" in choice.warnings[0]


def test_the_user_may_insist_on_the_system(host: Path) -> None:
    library = add_system_ucx(host, verbs=False)
    assert find_ucx({"KVLINK_UCX": "system"}, root=host).path == library


def test_a_library_path_of_the_environment_comes_before_the_usual_folders(host: Path) -> None:
    add_system_ucx(host, verbs=False)
    own = host / "opt/mine"
    own.mkdir(parents=True)
    (own / "libucp.so.0").touch()
    env = {"KVLINK_UCX": "system", "LD_LIBRARY_PATH": "/nowhere:/opt/mine"}
    assert find_ucx(env, root=host).path == own / "libucp.so.0"


@pytest.mark.parametrize("named", [".", "lib", "lib/libucp.so.0"])
def test_a_path_may_name_the_library_or_a_folder(tmp_path: Path, named: str) -> None:
    library = tmp_path / "lib/libucp.so.0"
    library.parent.mkdir()
    library.touch()
    assert find_ucx({"KVLINK_UCX": str(tmp_path / named)}, root=tmp_path / "host").path == library


@pytest.mark.parametrize("wish", ["system", "/nowhere/at/all"])
def test_a_library_that_is_not_there_is_refused_with_what_to_do(host: Path, wish: str) -> None:
    with pytest.raises(UcxUnavailable, match=r"libucp\.so\.0") as refused:
        find_ucx({"KVLINK_UCX": wish}, root=host)
    assert f"KVLINK_UCX={wish}" in str(refused.value)


def test_a_library_that_the_process_has_loaded_is_used_with_a_warning(host: Path) -> None:
    loaded = add_loaded_ucx(host, "other/lib/libucp.so.0.0.0")
    choice = find_ucx({}, root=host)
    assert choice.path == loaded
    assert "already loaded" in choice.warnings[0]
    assert str(WHEEL) in choice.warnings[0]


def test_a_second_library_beside_the_loaded_one_is_refused(host: Path) -> None:
    loaded = add_loaded_ucx(host, "other/lib/libucp.so.0.0.0")
    with pytest.raises(UcxUnavailable, match="two UCX libraries") as refused:
        find_ucx({"KVLINK_UCX": str(WHEEL)}, root=host)
    assert str(loaded) in str(refused.value)


def test_the_loaded_library_itself_is_no_reason_to_warn(host: Path) -> None:
    loaded = add_loaded_ucx(host, "other/lib/libucp.so.0")
    choice = find_ucx({"KVLINK_UCX": str(loaded)}, root=host)
    assert choice.path == loaded
    assert not choice.warnings
