"""What `scripts/bench old` reads in perftest's output, and makes of its figures."""

import pytest
from old_bench import mean
from pvrdma_lab.bench_old import rows

# As the rxe host's perftest printed them.
BANDWIDTH = """\
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 {}               {}               {}   \t\t     {}
"""
LATENCY = """\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 64      500          90.55          5467.53      470.36   \t       735.16      \t699.43 \t\t3518.62 \t\t5467.53
"""


@pytest.mark.parametrize(
    ("size", "line", "found"),
    [
        (65536, ("65536      500", "0.00", "22.62", "0.000362"), 22.62),
        (64, ("64         500", "0.00", "0.06", "0.001031"), 1031 * 64 / 2**20),
        (64, ("64         500", "0.00", "0.00", "0.000000"), None),
        (64, ("4096       500", "0.00", "6.72", "0.001721"), None),
    ],
    ids=["mean", "small", "no_clock", "another_size"],
)
def test_bandwidth(size: int, line: tuple[str, ...], found: float | None) -> None:
    assert mean("ib_send_bw", size, BANDWIDTH.format(*line)) == pytest.approx(found)


def test_latency_is_the_mean() -> None:
    assert mean("ib_send_lat", 64, LATENCY) == 735.16
    assert mean("ib_send_lat", 64, LATENCY.replace("735.16", "inf")) is None


def test_rows_are_of_medians_for_each_program_and_size() -> None:
    def figure(device: str, program: str, value: float, server_s: float = 0.0) -> dict[str, object]:
        of, other = ("mib_per_s", "usec") if program == "ib_send_bw" else ("usec", "mib_per_s")
        who = {"device": device, "program": program, "size_bytes": 4096, "messages": 1000}
        return {**who, of: value, other: None, "server_s": server_s}

    figures = [
        *(figure("old", "ib_send_bw", value) for value in (8.0, 2.0, 4.0)),
        *(figure("ours", "ib_send_bw", value, 0.5) for value in (1.0, 6.0, 90.0)),
        figure("old", "ib_send_lat", 500.0),
        figure("ours", "ib_send_lat", 2000.0, 0.25),
    ]
    assert rows(figures)[1:] == [
        ["4 KiB", "ib_send_bw", "4.00 MiB/s", "6.00 MiB/s", "1.50", "500"],
        ["4 KiB", "ib_send_lat", "500.00 us", "2000.00 us", "4.00", "250"],
    ]
