"""The system calls that a program in the sandbox may not make, as the filter that `bwrap --seccomp` takes. Pure.

seccomp(2), "Filter programs": classic BPF over struct seccomp_data {nr, arch, instruction_pointer, args[6]}.
"""

from __future__ import annotations

import os
import struct

# Calls that look into other processes, make mounts or namespaces, load code into the kernel, or take memory that no
# limit of a process counts (memfd, System V segments).
# name, number on x86_64, number on aarch64
_REFUSED = """
shmget                 29    194
ptrace                101    117
syslog                103    116
personality           135     92
pivot_root            155     41
chroot                161     51
acct                  163     89
mount                 165     40
umount2               166     39
swapon                167    224
swapoff               168    225
reboot                169    142
init_module           175    105
delete_module         176    106
quotactl              179     60
kexec_load            246    104
add_key               248    217
request_key           249    218
keyctl                250    219
unshare               272     97
perf_event_open       298    241
name_to_handle_at     303    264
open_by_handle_at     304    265
setns                 308    268
process_vm_readv      310    270
process_vm_writev     311    271
finit_module          313    273
memfd_create          319    279
kexec_file_load       320    294
bpf                   321    280
userfaultfd           323    282
io_uring_setup        425    425
io_uring_enter        426    426
io_uring_register     427    427
open_tree             428    428
move_mount            429    429
fsopen                430    430
fsconfig              431    431
fsmount               432    432
fspick                433    433
mount_setattr         442    442
memfd_secret          447    447
"""
_CLONE3 = 435
# machine -> (audit architecture, column of _REFUSED, clone, socket)
_MACHINES = {
    "x86_64": (0xC000003E, 1, 56, 41),
    "aarch64": (0xC00000B7, 2, 220, 198),
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
    architecture, column, clone, socket = _MACHINES[machine]
    rows = map(str.split, _REFUSED.strip().splitlines())
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
    for number in sorted(int(row[column]) for row in rows):
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
