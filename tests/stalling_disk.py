"""A disk whose server can be stopped: a file system in a process's memory (FUSE), in a mount namespace of its own.

As with a network file system whose server is gone, whoever asks a stopped disk waits until it is continued. Nothing of
the disk is left when its process has ended.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

_ROOT = 1
_MOST_BYTES = 2**17  # of one write
_MS_NOSUID_NODEV = 6
# the operations of include/uapi/linux/fuse.h
(
    _LOOKUP, _FORGET, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _RMDIR, _RENAME, _OPEN, _READ, _WRITE, _STATFS, _RELEASE,
    _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _FSYNCDIR, _ACCESS, _CREATE, _INTERRUPT, _BATCH_FORGET,
    _RENAME2,
) = (
    1, 2, 3, 4, 9, 10, 11, 12, 14, 15, 16, 17, 18, 20, 25, 26, 27, 28, 29, 30, 34, 35, 36, 42, 45,
)  # fmt: skip
_WITHOUT_REPLY = {_FORGET, _BATCH_FORGET, _INTERRUPT}
_ONLY_SUCCEED = {_RELEASE, _FSYNC, _FLUSH, _RELEASEDIR, _FSYNCDIR, _ACCESS}
_SIZE, _MODE = 1 << 3, 1 << 0  # what an operation SETATTR sets


@dataclass
class StallingDisk:
    """A mounted disk. path: by which every process of this user reaches it."""

    path: Path
    server: subprocess.Popen[str]

    def stop(self) -> None:
        """From now on the disk answers nothing."""
        self.server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.server.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.server.send_signal(signal.SIGCONT)


@contextmanager
def stalling_disk(at: Path, write_s: float = 0.0) -> Iterator[StallingDisk]:
    """write_s: how long each write of at most 128 KiB takes. Skips where this user may not mount such a disk."""
    at.mkdir()
    program = [sys.executable, str(Path(__file__).absolute()), str(at), str(write_s)]
    command = ["unshare", "--mount", *program]
    if os.geteuid() != 0:
        command.insert(1, "--map-root-user")
    root = str(Path(__file__).parents[1])
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert server.stdout
    try:
        if server.stdout.readline() != "mounted\n":
            pytest.skip("this user may not mount a disk of a program's own")
        yield StallingDisk(Path(f"/proc/{server.pid}/root{at}"), server)
    finally:
        server.kill()  # whoever waits for it gets an error
        server.wait()
        server.stdout.close()


@dataclass
class _Node:
    """A file or a folder."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, int] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)


class _Refused(Exception):
    """An operation fails with this errno."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Server:
    """Answers the kernel's requests, one after another."""

    def __init__(self, write_s: float) -> None:
        self._write_s = write_s
        self._nodes = {_ROOT: _Node(stat.S_IFDIR | 0o755)}
        self._numbers = count(_ROOT + 1)
        self._answers: dict[int, Any] = {
            _INIT: self._init, _LOOKUP: self._lookup, _GETATTR: self._getattr, _SETATTR: self._setattr,
            _MKDIR: self._mkdir, _CREATE: self._create, _UNLINK: self._unlink, _RMDIR: self._rmdir,
            _RENAME: self._rename, _RENAME2: self._rename, _OPEN: self._open, _OPENDIR: self._open,
            _READ: self._read, _WRITE: self._write, _READDIR: self._readdir, _STATFS: self._statfs,
        }  # fmt: skip

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, _MOST_BYTES + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue  # a request that was withdrawn
            _, operation, unique, number, *_ = struct.unpack_from("<IIQQIIII", request)
            if operation in _WITHOUT_REPLY:
                continue
            code = 0
            answer = b""
            try:
                if operation not in _ONLY_SUCCEED:
                    if operation not in self._answers:
                        raise _Refused(errno.ENOSYS)
                    answer = self._answers[operation](number, request[40:], operation)
            except _Refused as refused:
                code = refused.number
            os.write(device, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)

    def _init(self, _: int, body: bytes, __: int) -> bytes:
        major, minor, read_ahead, _ = struct.unpack_from("<IIII", body)
        big_writes = 1 << 5
        head = struct.pack(
            "<IIIIHHIIHH",
            major,
            min(minor, 31),
            read_ahead,
            big_writes,
            12,
            9,
            _MOST_BYTES,
            1,
            32,
            0,
        )
        return head + bytes(64 - len(head))

    def _attributes(self, number: int) -> bytes:
        node = self._nodes[number]
        seconds = int(node.time_s)
        size = len(node.data)
        times = (seconds, seconds, seconds, 0, 0, 0)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", number, size, -(-size // 512), *times[:3], *times[3:], node.mode, 1,
            os.getuid(), os.getgid(), 0, 4096, 0,
        )  # fmt: skip

    def _entry(self, number: int) -> bytes:
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self._attributes(number)

    def _child(self, folder: int, name: bytes) -> int:
        try:
            return self._nodes[folder].names[name]
        except KeyError:
            raise _Refused(errno.ENOENT) from None

    def _made(self, folder: int, name: bytes, mode: int) -> int:
        number = next(self._numbers)
        self._nodes[number] = _Node(mode)
        self._nodes[folder].names[name] = number
        return number

    def _lookup(self, number: int, body: bytes, _: int) -> bytes:
        return self._entry(self._child(number, body[:-1]))

    def _getattr(self, number: int, _: bytes, __: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(number)

    def _setattr(self, number: int, body: bytes, _: int) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        (mode,) = struct.unpack_from("<I", body, 68)
        node = self._nodes[number]
        if valid & _SIZE:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        if valid & _MODE:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        node.time_s = time.time()
        return self._getattr(number, b"", 0)

    def _mkdir(self, number: int, body: bytes, _: int) -> bytes:
        (mode,) = struct.unpack_from("<I", body)
        return self._entry(self._made(number, body[8:-1], stat.S_IFDIR | mode))

    def _create(self, number: int, body: bytes, _: int) -> bytes:
        (_, mode) = struct.unpack_from("<II", body)
        return self._entry(self._made(number, body[16:-1], mode)) + self._open(0, b"", 0)

    def _open(self, _: int, __: bytes, ___: int) -> bytes:
        return struct.pack("<QII", 0, 1, 0)  # read and written through, not by the page cache

    def _unlink(self, number: int, body: bytes, _: int) -> bytes:
        self._child(number, body[:-1])
        del self._nodes[number].names[body[:-1]]  # the node stays: somebody may have it open
        return b""

    def _rmdir(self, number: int, body: bytes, _: int) -> bytes:
        if self._nodes[self._child(number, body[:-1])].names:
            raise _Refused(errno.ENOTEMPTY)
        return self._unlink(number, body, 0)

    def _rename(self, number: int, body: bytes, operation: int) -> bytes:
        (folder,) = struct.unpack_from("<Q", body)
        old, new, _ = body[8 if operation == _RENAME else 16 :].split(b"\0")
        moved = self._child(number, old)
        del self._nodes[number].names[old]
        self._nodes[folder].names[new] = moved
        return b""

    def _read(self, number: int, body: bytes, _: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(self._nodes[number].data[offset : offset + size])

    def _write(self, number: int, body: bytes, _: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        time.sleep(self._write_s)
        node = self._nodes[number]
        node.data.extend(bytes(max(0, offset - len(node.data))))
        node.data[offset : offset + size] = body[40 : 40 + size]
        node.time_s = time.time()
        return struct.pack("<II", size, 0)

    def _readdir(self, number: int, body: bytes, _: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        entries = b""
        names = [(b".", number), (b"..", number), *self._nodes[number].names.items()]
        for index, (name, child) in enumerate(names[offset:], start=offset + 1):
            kind = stat.S_IFMT(self._nodes[child].mode) >> 12
            entry = struct.pack("<QQII", child, index, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries

    def _statfs(self, _: int, __: bytes, ___: int) -> bytes:
        blocks = 2**20
        return struct.pack(
            "<QQQQQIIII", blocks, blocks, blocks, blocks, blocks, 4096, 255, 4096, 0
        ) + bytes(24)


def _main(at: str, write_s: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"stalling", at.encode(), b"fuse.stalling", _MS_NOSUID_NODEV, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    _Server(float(write_s)).serve(device)


if __name__ == "__main__":
    _main(*sys.argv[1:])
