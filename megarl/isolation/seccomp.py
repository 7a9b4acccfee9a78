"""The system calls that a program in the sandbox may not make, as the filter that `bwrap --seccomp` takes. Pure.

seccomp(2), "Filter programs": classic BPF over struct seccomp_data {nr, arch, instruction_pointer, args[6]}.
"""

from __future__ import annotations

import os
import struct

# Calls that look into other processes, make mounts or namespaces, load code into the kernel, or take memory that no
# limit of a process counts (memfd, System V segments).
_REFUSED_X86 = {
    "shmget": 29, "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155, "chroot": 161, "acct": 163,
    "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_REFUSED_ARM = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117,
    "reboot": 142, "shmget": 194, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "memfd_create": 279, "bpf": 280,
    "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
_REFUSED_BOTH = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435
# machine -> (audit architecture, refused, clone, socket)
_MACHINES = {
    "x86_64": (0xC000003E, _REFUSED_X86, 56, 41),
    "aarch64": (0xC00000B7, _REFUSED_ARM, 220, 198),
}
_X32_BIT = 0x40000000  # x86_64's other numbering of the same calls
# CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWTIME
_NEW_NAMESPACES = 0x7E020080
# AF_UNIX, AF_INET, AF_INET6; AF_VSOCK, for one, reaches a hypervisor past any namespace
_FAMILIES = (1, 2, 10)

_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_EPERM = 1
_ENOSYS = 38
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16  # offsets in seccomp_data, little-endian

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def filter_program(machine: str = os.uname().machine) -> bytes | None:
    """The filter as an array of struct sock_filter; None for a machine whose call numbers are not known here."""
    if machine not in _MACHINES:
        return None
    architecture, refused, clone, socket = _MACHINES[machine]
    deny = (_RETURN, 0, 0, _ERRNO | _EPERM)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        deny,
        # The C library falls back to clone, whose flags a filter can read.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for number in sorted({*refused.values(), *_REFUSED_BOTH.values()}):
        program += [(_EQUAL, 0, 1, number), deny]
    program += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        deny,
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 2 + len(_FAMILIES), socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *[(_EQUAL, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)],
        deny,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
