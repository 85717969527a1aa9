# NVMe over RDMA, on a RAM disk. bash nvme.sh serve ADDRESS | copy ADDRESS | end; all three may run in one guest.
# copy makes a file system and prints the sum of 8 MiB that it wrote and, after a new mount, read back.
set -e
config=/sys/kernel/config/nvmet

serve() {
    modprobe -a nvmet nvmet-rdma
    modprobe brd rd_nr=1 rd_size=65536
    mkdir $config/subsystems/lab
    echo 1 >$config/subsystems/lab/attr_allow_any_host
    mkdir $config/subsystems/lab/namespaces/1
    echo -n /dev/ram0 >$config/subsystems/lab/namespaces/1/device_path
    echo 1 >$config/subsystems/lab/namespaces/1/enable
    mkdir $config/ports/1
    echo "$1" >$config/ports/1/addr_traddr
    echo rdma >$config/ports/1/addr_trtype
    echo 4420 >$config/ports/1/addr_trsvcid
    echo ipv4 >$config/ports/1/addr_adrfam
    ln -s $config/subsystems/lab $config/ports/1/subsystems/lab
}

copy() {
    modprobe nvme-rdma
    nvme connect -t rdma -a "$1" -s 4420 -n lab -i 2
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    echo "queue pairs: $(rdma resource show qp | grep -c 'type RC')"
    mkfs.ext4 -q /dev/nvme0n1
    mkdir -p /tmp/nvme
    mount /dev/nvme0n1 /tmp/nvme
    head -c 8M /dev/urandom >/tmp/nvme.bin
    cp /tmp/nvme.bin /tmp/nvme/file
    umount /tmp/nvme
    echo 3 >/proc/sys/vm/drop_caches
    mount /dev/nvme0n1 /tmp/nvme
    cmp /tmp/nvme.bin /tmp/nvme/file
    sha256sum /tmp/nvme.bin
    umount /tmp/nvme
    nvme disconnect -n lab
    rm /tmp/nvme.bin
    modprobe -r nvme-rdma
}

# The sum of what lies on the disk itself.
sum() {
    mkdir -p /tmp/disk
    mount -o ro /dev/ram0 /tmp/disk
    sha256sum /tmp/disk/file
    umount /tmp/disk
}

end() {
    rm $config/ports/1/subsystems/lab
    rmdir $config/ports/1 $config/subsystems/lab/namespaces/1 $config/subsystems/lab
    modprobe -r nvmet-rdma brd
}

"$@"
