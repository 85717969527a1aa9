"""What `scripts/bench guests` makes of its figures."""

from pvrdma_lab.bench_guests_report import DEVICE, Figure, goals, markdown

MIB = 1 << 20


def test_goals_are_ratios_of_the_figures_they_name() -> None:
    figures = [
        Figure(DEVICE, "ib_write_bw", MIB, mib_per_s=1000.0),
        Figure(DEVICE, "ib_write_bw", 65536, mib_per_s=600.0),
        Figure("rxe/virtio-net", "ib_write_bw", MIB, mib_per_s=50.0),
        Figure("tcp/vmxnet3", "iperf3", MIB, mib_per_s=250.0),
        Figure(DEVICE, "ib_write_lat", 4096, usec=100.0),
        Figure("rxe/vmxnet3", "ib_write_lat", 4096, usec=450.0),
    ]
    ratios = [goal.ratio for goal in goals(figures)]
    assert ratios == [20.0, None, None, 4.0, None, 4.5, 0.6]


def test_markdown_has_a_column_for_each_network_that_was_measured() -> None:
    figures = [
        Figure(DEVICE, "ib_write_lat", 4096, usec=100.0),
        Figure("rxe/vmxnet3", "ib_write_lat", 4096, usec=450.0),
    ]
    lines = markdown(figures).splitlines()
    assert lines[:3] == [
        "| program | size | pvrdma | rxe/vmxnet3 |",
        "|---|---:|---:|---:|",
        "| ib_write_lat | 4 KiB | 100.0 us | 450.0 us |",
    ]
    assert "| latency of 4 KiB of rxe on vmxnet3 over ours | 3 | 4.5 |" in lines
