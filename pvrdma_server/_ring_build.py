"""cffi API-mode builder of `pvrdma_server._ring`: what rings in shared memory need and Python lacks.

Contract: pure C and libc, no state. Every function has a twin in Python; who calls them, and the contract of each, is
in `backend_soft/native`, the only importer. cffi lets the GIL go around each call.
"""

import os
import shutil
import tempfile
from pathlib import Path

from cffi import FFI

_CDEF = """
void ring_fence(void);
int ring_linger(const uint64_t *head, uint64_t head_seen, const uint64_t *room, uint64_t room_seen,
                const uint8_t *stop, int64_t limit_ns);
"""

_SOURCE = r"""
#include <stdint.h>
#include <time.h>

void ring_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

/* Looks until a word changes (1), `stop` is set (2) or the time is over (0). `room` and `stop` may be NULL. */
int ring_linger(const uint64_t *head, uint64_t head_seen, const uint64_t *room, uint64_t room_seen,
                const uint8_t *stop, int64_t limit_ns)
{
    int64_t end_ns = now_ns() + limit_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (__atomic_load_n(head, __ATOMIC_ACQUIRE) != head_seen)
                return 1;
            if (room && __atomic_load_n(room, __ATOMIC_ACQUIRE) != room_seen)
                return 1;
            if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED))
                return 2;
            relax();
        }
    } while (now_ns() < end_ns);
    return 0;
}
"""

ffibuilder = FFI()
ffibuilder.cdef(_CDEF)
ffibuilder.set_source(
    "pvrdma_server._ring",
    _SOURCE,
    extra_compile_args=["-std=gnu11", "-O2", "-Wall"],
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as build:
        built = Path(ffibuilder.compile(tmpdir=build))
        # The name that setuptools gives it; in one step, for a server that starts meanwhile.
        target = Path(__file__).parent / "_ring.abi3.so"
        shutil.copy(built, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)
