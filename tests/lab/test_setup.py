"""The set-up's own logic: keys, building beside, steps and their failures, module order."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pvrdma_lab import bootstrap, paths, process, steps
from pvrdma_lab.guest_image import module_name, module_order
from pvrdma_lab.steps import StepError, StepLog


class FakeStep:
    name = "fake"
    title = "something"

    def __init__(self, target: Path, command: str = "echo built >result") -> None:
        self.target = target
        self.command = command
        self.builds = 0

    def find(self) -> Path | None:
        return self.target if self.target.exists() else None

    def build(self, log: StepLog) -> None:
        self.builds += 1
        with steps.built_beside(self.target) as beside:
            log.run(["sh", "-c", self.command], cwd=beside)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PVRDMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_key_tells_parts_apart() -> None:
    assert paths.key("ab", "c") != paths.key("a", "bc")
    assert paths.key("a", b"b") == paths.key("a", "b")


def test_run_folder_leaves_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVRDMA_CACHE", "/short")
    assert paths.run_folder() == Path("/short/run")
    monkeypatch.setenv("PVRDMA_CACHE", f"/{'long/' * 20}")
    assert len(str(paths.run_folder())) < 50


def test_step_is_built_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = FakeStep(cache / "thing" / "key")
    steps.run_step(step, "[1/1]")
    steps.run_step(step, "[1/1]")
    assert step.builds == 1
    assert (step.target / "result").read_text() == "built\n"
    assert "fake: done in" in capsys.readouterr().err
    assert [path.name for path in step.target.parent.iterdir()] == ["key"]


def test_failed_step_leaves_nothing_and_says_what_to_do(cache: Path) -> None:
    step = FakeStep(cache / "thing" / "key", "echo half >result; echo the reason; exit 7")
    with pytest.raises(StepError) as caught:
        steps.run_step(step, "[1/1]")
    last = str(caught.value).splitlines()[-1]
    assert "the reason" in str(caught.value)
    assert "step fake failed: sh ended with status 7" in last
    assert str(cache / "logs" / "fake.log") in last
    assert "scripts/bootstrap --only fake" in last
    assert list(step.target.parent.iterdir()) == []


def test_what_a_killed_run_left_is_removed(cache: Path) -> None:
    step = FakeStep(cache / "thing" / "key")
    stale = step.target.with_name(".key.tmp-1")
    (stale / "half").mkdir(parents=True)
    steps.run_step(step, "[1/1]")
    assert not stale.exists()


def test_missing_program_is_a_step_error(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log")
    with pytest.raises(StepError, match="cannot run /no/such"):
        log.run(["/no/such"])
    log.close()


def test_only_brings_what_it_needs() -> None:
    assert [step.name for step in bootstrap.chosen_steps(["initrd"])] == [
        "host",
        "kernel",
        "initrd",
    ]
    everything = bootstrap.chosen_steps([])
    assert [s.name for s in bootstrap.STEPS if s not in everything] == ["old-qemu"]


def test_environment_of_an_empty_cache(cache: Path) -> None:
    found = bootstrap.environment()
    assert found["cache"] == str(cache)
    assert found["kernel"] is None


MODULES_DEP = """\
kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/fs/mbcache.ko.xz
kernel/fs/jbd2/jbd2.ko.xz: kernel/lib/crc16.ko.xz
kernel/fs/mbcache.ko.xz:
kernel/lib/crc16.ko.xz:
kernel/drivers/block/virtio-blk.ko.xz:
kernel/drivers/net/other.ko.xz:
"""


def test_modules_come_after_what_they_need() -> None:
    order = [
        module_name(path) for path in module_order(MODULES_DEP, ("virtio_blk", "builtin", "ext4"))
    ]
    assert order == ["virtio_blk", "crc16", "jbd2", "mbcache", "ext4"]


def test_no_module_at_all_is_an_error() -> None:
    with pytest.raises(StepError):
        module_order(MODULES_DEP, ("builtin",))


def test_interrupted_step_ends_its_children_and_leaves_nothing(cache: Path) -> None:
    """A run that is ended from outside takes the commands below it along."""
    target = cache / "thing" / "key"
    script = f"""
import signal, sys
import os
import re
import subprocess
import sys
import time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.default_int_handler)
from pvrdma_lab import steps
log = steps.StepLog(Path({str(cache / "log")!r}))
with steps.built_beside(Path({str(target)!r})):
    log.run(["sh", "-c", "sleep 60 & echo started $!; wait"])
"""
    environment = {**os.environ, "PYTHONPATH": str(paths.REPOSITORY / "scripts")}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 20
        while not (match := re.search(r"started (\d+)\n", read_if_there(cache / "log"))):
            assert time.monotonic() < deadline
        run.terminate()
        assert run.wait(30)
    # The orphan is pid 1's to reap, which may take its time: a zombie has ended, too.
    deadline = time.monotonic() + 20
    while process._start_time(int(match[1])) is not None:
        assert time.monotonic() < deadline
    assert list(target.parent.iterdir()) == []


def read_if_there(path: Path) -> str:
    return path.read_text() if path.exists() else ""
