"""Limits are configuration: what is asked for is advertised, except where the guest would be corrupted."""

import click
import pytest
from click.testing import CliRunner
from unit.fake_backend import LIMITS, FakeBackend

from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, make_caps, survivable
from pvrdma_server.cli import main
from pvrdma_server.guest_memory import MAX_PDIR_PAGES, PAGE_SIZE
from pvrdma_server.qp_ops import rq_entry_size, sq_entry_size

HUGE = DeviceConfig(2, False, **dict.fromkeys(LIMIT_NAMES, 0xFFFF_FFFF))
SMALL = DeviceConfig(2, False, **dict.fromkeys(LIMIT_NAMES, 1))


def test_the_defaults_survive() -> None:
    assert survivable(DeviceConfig()) == DeviceConfig()


@pytest.mark.parametrize("max_sge", [1, 2, 16, 128, 1 << 31])
def test_the_largest_queues_fit_into_one_directory(max_sge: int) -> None:
    config = survivable(HUGE._replace(max_sge=max_sge))
    sq, rq = sq_entry_size(config.max_sge), rq_entry_size(config.max_sge)
    pages = 1 + -(-config.max_qp_wr * sq // PAGE_SIZE) + -(-config.max_qp_wr * rq // PAGE_SIZE)
    assert pages <= 0xFFFF  # CREATE_QP's total_chunks
    assert 1 + 2 * -(-config.max_qp_wr * rq // PAGE_SIZE) <= MAX_PDIR_PAGES  # rdma-core's SRQ
    assert 1 + config.max_cqe * 64 // PAGE_SIZE <= MAX_PDIR_PAGES
    assert sq <= PAGE_SIZE


def test_handles_fit_into_what_the_guest_indexes() -> None:
    config = survivable(HUGE)
    assert max(config.max_qp, config.max_cq, config.max_srq) <= 0xFFFF
    assert max(config.max_pd, config.max_mr) < 1 << 24
    assert config.gid_table_len <= 256


@pytest.mark.parametrize("config", [SMALL, DeviceConfig(max_uar=255, max_qp_wr=1000, max_cqe=1000)])
def test_sizes_that_drivers_round_up_are_powers_of_two(config: DeviceConfig) -> None:
    config = survivable(config)
    for size in (config.max_uar, config.max_qp_wr, config.max_sge, config.max_cqe):
        assert size & (size - 1) == 0
    assert config.max_uar >= 2  # the kernel's page and one more


def test_what_is_configured_is_advertised() -> None:
    config = DeviceConfig(max_qp=9, max_cq=8, max_mr=7, max_pd=6, max_srq=5, gid_table_len=4)
    caps = make_caps(FakeBackend(), config)
    assert (caps.max_qp, caps.max_cq, caps.max_mr, caps.max_pd) == (9, 8, 7, 6)
    assert (caps.max_srq, caps.gid_tbl_len) == (5, 4)
    assert make_caps(FakeBackend(), HUGE).max_qp == LIMITS.max_qp


@pytest.mark.parametrize("text", ["max_qp", "max_qp=", "max_qp=0", "max_qp=-1", "roce_version=3"])
def test_limits_that_are_none(text: str) -> None:
    result = CliRunner().invoke(main, ["--socket-path", "unused", "--limit", text])
    assert result.exit_code == click.UsageError.exit_code
    assert text in result.output


def test_a_limit_that_the_backend_cannot_live_with() -> None:
    result = CliRunner().invoke(main, ["--socket-path", "unused", "--limit", "max_qp=1"])
    assert result.exit_code == 78
    assert "max_qp 1 is not in 3..65535" in result.output
