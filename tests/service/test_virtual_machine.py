"""The quick start's last sections: a virtual machine as a unit, on the device, with the driver bound in its guest."""

from service.machine import UNIT, Machine

# An emulated guest in an emulated machine.
BOOT_S = 600.0
# A look takes the CPU from the guest.
LOOK_S = 10.0
DROP_IN = "/etc/systemd/system/vm1.service.d/lab.conf"


def test_a_guest_binds_its_driver(running: Machine) -> None:
    """Word for word, but for what this machine lacks: KVM, memory, and a disk with a system on it."""
    words = running.nested_words()
    running.write(
        DROP_IN,
        f'[Service]\nEnvironment=ACCEL=tcg CPU=qemu64 MEMORY=128M "MORE={words}"\n',
    )
    try:
        running.follow("Start the virtual machine")
        assert running.show("vm1.service", "ActiveState")["ActiveState"] == "active"
        # A GID in the device's table: the driver was probed, and the address of its vmxnet3 came through.
        running.wait_for(
            "the guest's GIDs",
            "systemctl is-active vm1.service >/dev/null || exec systemctl status --no-pager vm1.service; "
            "pvrdma-ctl status --json vm1 | grep -i 0a09006f",
            BOOT_S,
            look_s=LOOK_S,
        )
        looked = running.follow("Look at it")
        assert "active (running)" in looked
        assert '"event": "ready"' in looked
    finally:
        running.run("systemctl stop vm1.service")
    # The device outlives its client.
    assert running.show(UNIT, "ActiveState")["ActiveState"] == "active"


def test_the_machine_waits_for_the_socket_only(running: Machine) -> None:
    order = running.show("vm1.service", "Requires", "After")
    assert "pvrdma-server@vm1.socket" in order["Requires"]
    assert "pvrdma-server@vm1.socket" in order["After"]
