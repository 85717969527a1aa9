"""Every object of the ABI on a real server over rxe: each is made, asked about, changed, destroyed."""

from typing import Any

import pytest
from guest import Driver, Kernel, Qp, Srq, UserProcess, connect

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Cmd
from pvrdma_server.abi.pvrdma_verbs import PortState, QpState

pytestmark = pytest.mark.host


def ask_port(driver: Driver) -> None:
    request = api.CmdQueryPort(1)
    port = driver.call(Cmd.QUERY_PORT, api.CMD_QUERY_PORT, request, api.CMD_QUERY_PORT_RESP)
    assert port.attrs.state == PortState.ACTIVE
    asked = api.CmdQueryPkey(1, 0)
    answer = driver.call(Cmd.QUERY_PKEY, api.CMD_QUERY_PKEY, asked, api.CMD_QUERY_PKEY_RESP)
    assert answer.pkey == 0xFFFF


def test_every_object_comes_and_goes(server: Any) -> None:
    bus = server.connect()
    driver = bus.boot()
    kernel = Kernel(driver)
    before = server.status()["objects"]
    kernel.add_gid(server.gid)
    ask_port(driver)
    process = UserProcess(driver)
    memory, srq = process.mr(8192), Srq(process)
    assert srq.query().srq_limit == 0
    for number in range(4):
        srq.post_recv(memory.sge(), wr_id=number)
    srq.arm_limit(3)
    assert srq.query().srq_limit == 3
    pair = Qp(process), Qp(process, srq=srq)
    connect(*pair, server.gid, server.gid)
    assert {qp.query().qp_state for qp in pair} == {QpState.RTS}
    assert server.status()["objects"]["qps"] == before["qps"] + 2
    for qp in pair:
        qp.destroy()
        qp.send_cq.destroy()
    srq.destroy()
    process.pd.dereg(memory.handle)
    process.pd.destroy()
    process.exit()
    kernel.del_gid(0)
    status = server.status()
    assert status["objects"] == before
    # No driver sends RESIZE_CQ, and the device has none.
    used = {name.lower() for name, count in status["device"]["commands"].items() if count}
    assert used == {cmd.name.lower() for cmd in Cmd} - {"resize_cq"}
    bus.close()
