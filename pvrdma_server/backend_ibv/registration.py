"""A region on the host that can be withdrawn and given back under the same keys.

A registered region is pinned, so the host device reaches the pages whatever becomes of our mappings. To end its use
without losing its keys, the region is moved to a protection domain in which no queue pair is (IBV_REREG_MR_CHANGE_PD);
every access then fails as one under a foreign domain's key. Devices that cannot move a region lose its keys.
"""

import ctypes
import errno
import os
import struct
from typing import Any, Final

from pyverbs.pd import PD

from pvrdma_server.backend_ibv.host import HostDevice, giving_back, verb
from pvrdma_server.errors import BackendError

# Source: verbs.h IBV_REREG_MR_CHANGE_PD; ib_user_verbs.h IB_USER_VERBS_CMD_REREG_MR, struct ib_uverbs_rereg_mr (after
# the header: response u64, mr_handle u32, flags u32, start u64, length u64, hca_va u64, pd_handle u32, access u32) and
# struct ib_uverbs_rereg_mr_resp (lkey u32, rkey u32). Sizes in the header are in words of 4 bytes.
_CHANGE_PD: Final = 2
_CMD_REREG_MR: Final = 11
_REREG_MR: Final = struct.Struct("=IHHQIIQQQII")
_RESPONSE_WORDS: Final = 2


class HostRegion:
    """One registered region.

    Attributes:
        lkey: its key for local access.
        rkey: its key for remote access.
        withdrawn: whether its use has ended, for now or for ever.
    """

    __slots__ = ("_device", "_mr", "_pd", "lkey", "rkey", "withdrawn")

    def __init__(self, device: HostDevice, pd: Any, mr: Any) -> None:
        self._device = device
        self._pd = pd
        self._mr = mr
        self.lkey = int(mr.lkey)
        self.rkey = int(mr.rkey)
        self.withdrawn = False

    @property
    def lost(self) -> bool:
        """Whether it had to be deregistered: its keys are gone."""
        return self._mr is None

    def withdraw(self, limbo: Any) -> None:
        """No queue pair reaches the memory once this returns. `limbo` is a domain that has none.

        Raises:
            BackendError: the device cannot move regions, so this one is deregistered.
        """
        if self.withdrawn:
            return
        self.withdrawn = True
        try:
            self._move(limbo)
        except BackendError:
            self.close()
            raise

    def restore(self) -> None:
        """Give it back to its queue pairs.

        Raises:
            BackendError: it was lost when it was withdrawn, or the host refuses.
        """
        if self._mr is None:
            raise BackendError(errno.ENODEV, "ibv_rereg_mr", f"region {self.lkey:#x} is lost")
        self._move(self._pd)
        self.withdrawn = False

    def close(self) -> None:
        """Deregister it."""
        mr, self._mr = self._mr, None
        if mr is not None:
            with giving_back("ibv_dereg_mr"):
                mr.close()

    def _move(self, pd: Any) -> None:
        try:
            with verb("ibv_rereg_mr"):
                self._mr.rereg(_CHANGE_PD, pd=pd)
            keys = (int(self._mr.lkey), int(self._mr.rkey))
        except BackendError as e:
            if e.errno != errno.EOPNOTSUPP:
                raise
            keys = self._ask_kernel(pd)
        if keys != (self.lkey, self.rkey):
            raise BackendError(errno.EIO, "ibv_rereg_mr", "the host gave the region other keys")

    def _ask_kernel(self, pd: Any) -> tuple[int, int]:
        """The kernel's command itself: rxe has it, its library in rdma-core 65 has not."""
        response = (ctypes.c_uint32 * _RESPONSE_WORDS)()
        command = _REREG_MR.pack(
            _CMD_REREG_MR, _REREG_MR.size // 4, _RESPONSE_WORDS, ctypes.addressof(response),
            self._mr.handle, _CHANGE_PD, 0, 0, 0, pd.handle, 0,
        )  # fmt: skip
        with verb("ibv_rereg_mr"):
            os.write(self._device.context.cmd_fd, command)
        return response[0], response[1]


def make_limbo(device: HostDevice) -> Any:
    """A protection domain for regions whose memory is unmapped; no queue pair is ever made in it."""
    with verb("ibv_alloc_pd"):
        return PD(device.context)
