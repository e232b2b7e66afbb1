"""Tests of the limits that a control group sets."""

from pathlib import Path

import pytest

from quantflow import control_group


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write files of a process's /proc and of /sys/fs/cgroup, by path."""
    monkeypatch.setattr(control_group, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(control_group, "_MOUNTED", tmp_path / "cgroup")
    (tmp_path / "cgroup").mkdir()

    def write(own: str, files: dict[str, str]) -> None:
        for path, text in {"proc/self/cgroup": own, **files}.items():
            file = Path(tmp_path / path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_without_files_nothing_is_limited(system):
    assert control_group.cpu_quota() is None
    assert control_group.memory_limit() is None
    assert control_group.memory_left() is None
    system("0::/\n", {"cgroup/cpu.max": "max 100000\n", "cgroup/memory.max": "max\n"})
    assert control_group.cpu_quota() is None
    assert control_group.memory_limit() is None


def test_a_container_sees_its_own_group_as_the_root(system):
    # /proc names the group by the host's path, which the container does not have
    system("0::/kubepods/pod1/x\n", {"cgroup/cpu.max": "150000 100000\n"})
    assert control_group.cpu_quota() == 1.5


def test_the_tightest_of_the_groups_above_counts(system):
    system(
        "0::/user.slice/run.scope\n",
        {
            "cgroup/user.slice/run.scope/cpu.max": "max 100000\n",
            "cgroup/user.slice/cpu.max": "200000 100000\n",
            "cgroup/cpu.max": "800000 100000\n",
            "cgroup/user.slice/memory.max": "1000\n",
            "cgroup/user.slice/memory.current": "900\n",
            "cgroup/user.slice/memory.stat": "anon 1\ninactive_file 300\n",
            "cgroup/user.slice/run.scope/memory.max": "2000\n",
            "cgroup/user.slice/run.scope/memory.current": "800\n",
        },
    )
    assert control_group.cpu_quota() == 2
    assert control_group.memory_limit() == 1000
    assert control_group.memory_left() == 1000 - (900 - 300)


def test_a_group_beyond_its_limit_has_nothing_left(system):
    system("0::/\n", {"cgroup/memory.max": "100\n", "cgroup/memory.current": "150\n"})
    assert control_group.memory_left() == 0


@pytest.mark.parametrize("mounted", ["cpu,cpuacct", "cpu"])
def test_version_1_has_a_tree_for_each_controller(system, mounted):
    system(
        "9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n",
        {
            f"cgroup/{mounted}/docker/a/cpu.cfs_quota_us": "50000\n",
            f"cgroup/{mounted}/docker/a/cpu.cfs_period_us": "100000\n",
            f"cgroup/{mounted}/cpu.cfs_quota_us": "-1\n",
            f"cgroup/{mounted}/cpu.cfs_period_us": "100000\n",
            "cgroup/memory/docker/a/memory.limit_in_bytes": "4096\n",
            "cgroup/memory/docker/a/memory.usage_in_bytes": "4000\n",
            "cgroup/memory/docker/a/memory.stat": "cache 3000\ntotal_inactive_file 2000\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert control_group.cpu_quota() == 0.5
    assert control_group.memory_limit() == 4096
    assert control_group.memory_left() == 4096 - 2000


def test_a_file_that_is_no_number_is_no_limit(system):
    system("no group\n", {"cgroup/cpu.max": "much\n", "cgroup/memory.max": "\n"})
    assert control_group.cpu_quota() is None
    assert control_group.memory_limit() is None
