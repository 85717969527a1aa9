"""Runs in the guest: starts the kernel in its arguments with kexec, with this kernel's command line. x86-64.

Drivers are shut down as for a reboot, but no firmware and no reset of the machine comes between the two kernels.
"""

import ctypes
import os
import sys

KEXEC_FILE_LOAD = 320
LINUX_REBOOT_CMD_KEXEC = 0x4558_4543


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    kernel, initrd = (os.open(path, os.O_RDONLY) for path in sys.argv[1:3])
    with open("/proc/cmdline", "rb") as file:
        words = file.read().strip() + b"\0"
    if libc.syscall(KEXEC_FILE_LOAD, kernel, initrd, ctypes.c_ulong(len(words)), words, 0):
        sys.exit(f"kexec_file_load: {os.strerror(ctypes.get_errno())}")
    libc.reboot(LINUX_REBOOT_CMD_KEXEC)
    sys.exit(f"reboot: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
