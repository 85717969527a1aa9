"""cffi API-mode builder of `pvrdma_server._vfu` over libvfio-user's own header.

Contract: only what `vfio_user` uses is declared; the C compiler checks every declaration against the header, because
libvfio-user promises neither API nor ABI. Callbacks are `extern "Python"`: one per BAR, since libvfio-user does not
tell a region callback its region.

The library is looked for in $LIBVFIO_USER_PREFIX, then in the newest build in the project's cache, then by pkg-config
or the system's compiler paths. Where it is in none of them, scripts/build-libvfio-user fetches and builds it (Debian
and its like), so that `pip install .` is all that it takes.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cffi import FFI

_CDEF = """
typedef struct vfu_ctx vfu_ctx_t;
typedef int64_t loff_t;
struct iovec { void *iov_base; size_t iov_len; ...; };
typedef struct { struct iovec iova; void *vaddr; struct iovec mapping; size_t page_size; uint32_t prot; ...; }
    vfu_dma_info_t;
typedef struct { ...; } vfu_pci_config_space_t;

typedef enum { VFU_TRANS_SOCK, ... } vfu_trans_t;
typedef enum { VFU_DEV_TYPE_PCI, ... } vfu_dev_type_t;
typedef enum { VFU_PCI_TYPE_CONVENTIONAL, VFU_PCI_TYPE_EXPRESS, ... } vfu_pci_type_t;
typedef enum vfu_reset_type { VFU_RESET_DEVICE, VFU_RESET_LOST_CONN, VFU_RESET_PCI_FLR, ... } vfu_reset_type_t;
enum vfu_dev_irq_type { VFU_DEV_INTX_IRQ, VFU_DEV_MSIX_IRQ, ... };

#define LIBVFIO_USER_FLAG_ATTACH_NB ...
#define VFU_REGION_FLAG_RW ...
#define VFU_REGION_FLAG_MEM ...
#define VFU_REGION_FLAG_ALWAYS_CB ...
#define VFU_PCI_DEV_BAR0_REGION_IDX ...
#define VFU_PCI_DEV_CFG_REGION_IDX ...

typedef void (vfu_log_fn_t)(vfu_ctx_t *, int, const char *);
typedef ssize_t (vfu_region_access_cb_t)(vfu_ctx_t *, char *, size_t, loff_t, bool);
typedef int (vfu_device_quiesce_cb_t)(vfu_ctx_t *);
typedef int (vfu_reset_cb_t)(vfu_ctx_t *, vfu_reset_type_t);
typedef void (vfu_dma_register_cb_t)(vfu_ctx_t *, vfu_dma_info_t *);
typedef void (vfu_dma_unregister_cb_t)(vfu_ctx_t *, vfu_dma_info_t *);
typedef void (vfu_dev_irq_state_cb_t)(vfu_ctx_t *, uint32_t, uint32_t, bool);

vfu_ctx_t *vfu_create_ctx(vfu_trans_t, const char *, int, void *, vfu_dev_type_t);
int vfu_realize_ctx(vfu_ctx_t *);
int vfu_attach_ctx(vfu_ctx_t *);
int vfu_get_poll_fd(vfu_ctx_t *);
int vfu_run_ctx(vfu_ctx_t *);
void vfu_destroy_ctx(vfu_ctx_t *);
int vfu_setup_log(vfu_ctx_t *, vfu_log_fn_t *, int);
int vfu_setup_region(vfu_ctx_t *, int, size_t, vfu_region_access_cb_t *, int, struct iovec *, uint32_t, int, uint64_t);
void vfu_setup_device_quiesce_cb(vfu_ctx_t *, vfu_device_quiesce_cb_t *);
int vfu_setup_device_reset_cb(vfu_ctx_t *, vfu_reset_cb_t *);
int vfu_setup_device_dma(vfu_ctx_t *, vfu_dma_register_cb_t *, vfu_dma_unregister_cb_t *);
int vfu_setup_device_nr_irqs(vfu_ctx_t *, enum vfu_dev_irq_type, uint32_t);
int vfu_setup_irq_state_callback(vfu_ctx_t *, enum vfu_dev_irq_type, vfu_dev_irq_state_cb_t *);
int vfu_irq_trigger(vfu_ctx_t *, uint32_t);
int vfu_pci_init(vfu_ctx_t *, vfu_pci_type_t, int, int);
void vfu_pci_set_id(vfu_ctx_t *, uint16_t, uint16_t, uint16_t, uint16_t);
void vfu_pci_set_class(vfu_ctx_t *, uint8_t, uint8_t, uint8_t);
vfu_pci_config_space_t *vfu_pci_get_config_space(vfu_ctx_t *);
ssize_t vfu_pci_add_capability(vfu_ctx_t *, size_t, int, void *);

extern "Python" {
    void pvrdma_log(vfu_ctx_t *, int, const char *);
    ssize_t pvrdma_bar0(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_bar1(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_bar2(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_bar3(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_bar4(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_bar5(vfu_ctx_t *, char *, size_t, loff_t, bool);
    ssize_t pvrdma_config(vfu_ctx_t *, char *, size_t, loff_t, bool);
    int pvrdma_reset(vfu_ctx_t *, vfu_reset_type_t);
    void pvrdma_dma_register(vfu_ctx_t *, vfu_dma_info_t *);
    void pvrdma_dma_unregister(vfu_ctx_t *, vfu_dma_info_t *);
    void pvrdma_intx_state(vfu_ctx_t *, uint32_t, uint32_t, bool);
    void pvrdma_msix_state(vfu_ctx_t *, uint32_t, uint32_t, bool);
}
int pvrdma_quiesce(vfu_ctx_t *);
"""

_SOURCE = """
#include <stdbool.h>
#include <stddef.h>
#include <libvfio-user.h>

/* The device core is synchronous: between two requests it is always quiet. */
static int pvrdma_quiesce(vfu_ctx_t *ctx)
{
    (void)ctx;
    return 0;
}
"""

_MISSING = """\
libvfio-user is not to be found, and could not be built here. On a machine with Debian's or Ubuntu's apt run
scripts/build-libvfio-user and see what it says; elsewhere build libvfio-user, and set LIBVFIO_USER_PREFIX to the folder
that holds its include/ and lib/, or install your distribution's development package of it."""
_BUILD_SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "build-libvfio-user"


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PVRDMA_CACHE") or Path(base) / "pvrdma-server")


def _prefix() -> Path | None:
    if named := os.environ.get("LIBVFIO_USER_PREFIX"):
        if not (Path(named) / "include" / "libvfio-user.h").exists():
            raise SystemExit(
                f"LIBVFIO_USER_PREFIX={named}: no include/libvfio-user.h there. {_MISSING}"
            )
        return Path(named)
    builds = [p.parent.parent for p in _cache_dir().glob("libvfio-user-*/include/libvfio-user.h")]
    return max(builds, key=lambda p: p.stat().st_mtime, default=None)


def _pkg_config(option: str) -> list[str]:
    if not shutil.which("pkg-config"):
        return []
    done = subprocess.run(
        ["pkg-config", option, "libvfio-user"], capture_output=True, text=True, check=False
    )
    return done.stdout.split() if done.returncode == 0 else []


def _from_prefix(prefix: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"include_dirs": [str(prefix / "include")]}
    archive = prefix / "lib" / "libvfio-user.a"
    if archive.exists():
        # The extension carries the library (and its json-c), and shows none of it to other libraries.
        return options | {
            "extra_objects": [str(archive)],
            "extra_link_args": ["-Wl,--exclude-libs,ALL"],
        }
    lib = str(prefix / "lib")
    return options | {
        "libraries": ["vfio-user"],
        "library_dirs": [lib],
        "runtime_library_dirs": [lib],
    }


def _from_system() -> dict[str, Any] | None:
    includes = [flag[2:] for flag in _pkg_config("--cflags-only-I")]
    candidates = [*includes, "/usr/include", "/usr/local/include"]
    if not any((Path(d) / "libvfio-user.h").exists() for d in candidates):
        return None
    return {
        "include_dirs": includes,
        "libraries": ["vfio-user"],
        "library_dirs": [flag[2:] for flag in _pkg_config("--libs-only-L")],
    }


def _built_now() -> Path:
    # A source archive without scripts/, or a machine without apt.
    if not _BUILD_SCRIPT.exists() or not shutil.which("apt-get"):
        raise SystemExit(_MISSING)
    done = subprocess.run([_BUILD_SCRIPT], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(_MISSING)
    return Path(done.stdout.splitlines()[-1])


def library_licenses() -> list[Path]:
    """The licenses of what is linked into the extension; none where a shared library is used."""
    prefix = _prefix()
    return sorted(prefix.glob("LICENSE.*")) if prefix else []


def _options() -> dict[str, Any]:
    if prefix := _prefix():
        return _from_prefix(prefix)
    return _from_system() or _from_prefix(_built_now())


def _builder() -> FFI:
    options = _options()
    builder = FFI()
    builder.cdef(_CDEF)
    builder.set_source(
        "pvrdma_server._vfu",
        _SOURCE,
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=["-Werror=incompatible-pointer-types", "-Werror=int-conversion"],
        **options,
    )
    return builder


ffibuilder = _builder()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as build:
        built = Path(ffibuilder.compile(tmpdir=build))
        shutil.copy(built, Path(__file__).parent / built.name)
