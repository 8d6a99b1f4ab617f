"""One heap for all threads, and a trim that frees, in its own process since heaps stay."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, re, sys, threading
from pathlib import Path
from staddle.coordinator import heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "one":
    heap.one_heap()
ready, go = threading.Barrier(5), threading.Event()

def work():
    held = [libc.malloc(64 * 1024) for _ in range(256)]  # 16 MiB in pieces that are not mapped
    for address in held:
        ctypes.memset(address, 1, 64 * 1024)
    for address in held[:-1]:  # the last one keeps the heap's end where it is
        libc.free(address)
    ready.wait()
    go.wait()

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
ready.wait()
before = resident()
heap.trim()
freed = before - resident()
libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(len(re.findall(r"<heap nr", Path(sys.argv[2]).read_text())), freed)
go.set()
"""


def measured(how: str, place: str) -> tuple[int, int]:
    """Heaps of a process with four threads that allocate, and the bytes that a trim gave back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, place], capture_output=True, text=True, check=True
    )
    heaps, freed = done.stdout.split()
    return int(heaps), int(freed)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's calls")
def test_all_threads_share_one_heap_and_a_trim_gives_back_what_they_freed(tmp_path):
    apart, _ = measured("each", str(tmp_path / "each.xml"))
    shared, freed = measured("one", str(tmp_path / "one.xml"))
    assert apart > 1  # what we are about would not be seen otherwise
    assert shared == 1
    assert freed > 16 * 1024 * 1024
