# NFS over RDMA, from a RAM disk. bash nfs.sh serve | copy ADDRESS | end; all three may run in one guest.
# copy prints the sum of 8 MiB that it wrote and, after a new mount, read back.
set -e

serve() {
    modprobe -a nfsd rpcrdma
    modprobe brd rd_nr=1 rd_size=65536
    mkfs.ext4 -q /dev/ram0
    mkdir -p /tmp/export /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery
    mount /dev/ram0 /tmp/export
    mount -t nfsd nfsd /proc/fs/nfsd
    mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
    pidof rpcbind >/dev/null || rpcbind
    exportfs -o rw,insecure,no_root_squash,fsid=0,no_subtree_check '*:/tmp/export'
    rpc.mountd
    rpc.nfsd -N 3 --rdma=20049 2
    # Nobody has anything to reclaim: do not wait 90 s for them.
    echo Y >/proc/fs/nfsd/v4_end_grace
}

attach() {
    mount -t nfs4 -o rdma,port=20049,minorversion=1 "$1":/ /tmp/nfs
}

copy() {
    modprobe -a rpcrdma nfs nfsv4
    mkdir -p /tmp/nfs
    attach "$1"
    grep -o 'proto=rdma' /proc/mounts
    head -c 8M /dev/urandom >/tmp/nfs.bin
    cp /tmp/nfs.bin /tmp/nfs/file
    umount /tmp/nfs
    echo 3 >/proc/sys/vm/drop_caches
    attach "$1"
    cmp /tmp/nfs.bin /tmp/nfs/file
    sha256sum /tmp/nfs.bin
    umount /tmp/nfs
    rm /tmp/nfs.bin
    modprobe -r nfsv4 nfs
}

# What was just killed or disconnected holds mounts and modules for a moment more.
soon() {
    for _ in $(seq 50); do
        "$@" 2>/dev/null && return
        sleep 0.2
    done
    "$@"
}

end() {
    rpc.nfsd 0
    exportfs -au
    kill $(pidof rpc.mountd) $(pidof rpcbind)
    for mount in /proc/fs/nfsd /tmp/export /var/lib/nfs/rpc_pipefs; do
        soon umount $mount
    done
    for module in nfsd rpcrdma brd; do
        soon modprobe -r $module
    done
}

"$@"
