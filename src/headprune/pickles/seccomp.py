"""A seccomp filter: the system calls that a process gives up, for good, on Linux.

A deny list, written as classic BPF. Reading files, memory and threads stay; programs, processes,
the network, other processes' memory and every way to change a file by its name go. A call that is
refused fails with EPERM, so that the caller can say so; calls later than this table fail with
ENOSYS, as they would on an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable

# by machine, as in MACHINES; None: there is none
_Numbers = tuple[int | None, int | None]

_REFUSED: dict[str, _Numbers] = {
    # programs and processes
    **{"execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"shmat": (30, 196), "msgsnd": (69, 189), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    # the network, and a way around every filter
    **{"socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200)},
    **{"io_uring_setup": (425, 425), "bpf": (321, 280)},
    # changing files by name
    **{"creat": (85, None), "open_by_handle_at": (304, 265), "truncate": (76, 45)},
    **{"unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None)},
    **{"rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276)},
    **{"mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    # changing who may do what with them, and when they changed
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None)},
    "utimensat": (280, 88),
    # the system itself
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
}
# flags in a struct, which a filter cannot read: libc turns to the older call
_ABSENT: dict[str, _Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
_FIRST_UNKNOWN = 463  # x32, the other set of calls of x86_64, lies beyond it as well

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# numbers, position of an argument, bits of it: refused if any of them is set
_IF_SET: dict[str, tuple[_Numbers, int, int]] = {
    "open": ((2, None), 1, _WRITES),
    "openat": ((257, 56), 2, _WRITES),
    "prlimit64": ((302, 261), 0, 0xFFFFFFFF),  # of another process
}
_CLONE_THREAD = 0x10000
# refused if none is set: a process, not a thread
_UNLESS_SET: dict[str, tuple[_Numbers, int, int]] = {"clone": ((56, 220), 0, _CLONE_THREAD)}

# column of the tables, the kernel's name for the architecture, number of seccomp(2)
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}

# BPF: load a word of struct seccomp_data, compare it with k, return
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # where they lie; an argument has 8 bytes
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000

_SET_MODE_FILTER, _ALL_THREADS = 1, 1


class _Program(ctypes.Structure):
    """As struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install() -> bool:
    """Switches the filter on for all threads of this process. PR_SET_NO_NEW_PRIVS comes first.

    Returns:
        Whether it is on; False where the platform has no such filter, or refuses it.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return False
    instructions = program(machine)
    filter_ = _Program(len(instructions) // 8, instructions)
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = MACHINES[machine][2]
    return bool(call(number, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(filter_)) == 0)


def program(machine: str) -> bytes:
    """The filter for "x86_64" or "aarch64", 8 bytes per instruction."""
    column, architecture, _ = MACHINES[machine]
    refuse, absent = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    rules = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_unless(_EQUAL, architecture, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_if(_AT_LEAST, _FIRST_UNKNOWN, absent),
    ]
    for table, answer in ((_REFUSED, refuse), (_ABSENT, absent)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                rules += _if(_EQUAL, number, answer)
    for by_flags, if_set, if_not in ((_IF_SET, refuse, _ALLOW), (_UNLESS_SET, _ALLOW, refuse)):
        for numbers, position, bits in by_flags.values():
            if (number := numbers[column]) is not None:
                rules += [
                    (_EQUAL, 0, 4, number),  # else four further on
                    (_LOAD, 0, 0, _ARGUMENTS + 8 * position),
                    *_if(_ANY_BIT, bits, if_set),
                    (_RETURN, 0, 0, if_not),
                ]
    return _packed([*rules, (_RETURN, 0, 0, _ALLOW)])


_Instruction = tuple[int, int, int, int]


def _if(test: int, value: int, answer: int) -> list[_Instruction]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, answer)]


def _unless(test: int, value: int, answer: int) -> list[_Instruction]:
    return [(test, 1, 0, value), (_RETURN, 0, 0, answer)]


def _packed(instructions: Iterable[_Instruction]) -> bytes:
    """As struct sock_filter: code, steps if true, steps if false, k."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
