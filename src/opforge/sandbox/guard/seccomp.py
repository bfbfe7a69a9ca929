"""A system-call filter for a kernel's process, in hand-assembled BPF.

It forbids the network, access to other processes, and administration.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
_CHUNK = 8

_NEW_NAMESPACES = 0x7E020000
_AF_UNIX, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 0xF
_RLIMIT_RTTIME = 15
_PRIVATE_MODE = 0o700
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "clone": (56, 220), "clone3": (435, 435),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "fcntl": (72, 25), "ioctl": (16, 29),
    "fallocate": (285, 47),
    # the rest is refused whatever its arguments
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "acct": (163, 89), "syslog": (103, 116), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_FIRST_ALWAYS_REFUSED = tuple(_NUMBERS).index("ptrace")


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """A test of an argument: whether its lower half (upper, for pointers), masked, has a value."""

    __test__ = False  # not a pytest test, despite the name
    argument: int
    value: int
    mask: int = 0xFFFFFFFF
    expected: bool = True
    upper: bool = False

    def assemble(self, to_next: int) -> list[bytes]:
        """Continue if the outcome is the wanted one; otherwise skip ``to_next`` instructions."""
        load = _instruction(_LOAD, _ARGUMENTS_AT + 8 * self.argument + 4 * self.upper)
        mask = [] if self.mask == 0xFFFFFFFF else [_instruction(_AND, self.mask)]
        jump = (0, to_next) if self.expected else (to_next, 0)
        return [load, *mask, _instruction(_JUMP_EQUAL, self.value, *jump)]


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call that fails with an error, unless all tests of one exception pass."""

    system_call: str
    exceptions: tuple[tuple[ArgumentTest, ...], ...] = ()
    error: int = errno.EPERM

    def assemble(self, number: int) -> list[bytes]:
        body = [piece for exception in self.exceptions for piece in _exception(exception)]
        body.append(_instruction(_RETURN, _ERRNO | self.error))
        return [_instruction(_JUMP_EQUAL, number, 0, len(body)), *body]


def rules(*, own_user: bool) -> list[Rule]:
    """Return the refused calls; more if a worker runs as the user, and so owns the user's files."""
    quick = Rule("fallocate", (), errno.EOPNOTSUPP)  # fills a disk faster than its size is checked
    refused = [*_network(), *_processes(), quick, *(Rule(name) for name in list(_NUMBERS)[_FIRST_ALWAYS_REFUSED:])]
    return refused if own_user else [*refused, *_metadata()]


def _network() -> Iterator[Rule]:
    # A datagram socket can take an address with each message, which no filter sees. Streams need
    # connect.
    local = (ArgumentTest(0, _AF_UNIX), ArgumentTest(1, _SOCK_DGRAM, _SOCK_TYPE_MASK, expected=False))
    yield Rule("socket", (local,), errno.EACCES)
    yield Rule("socketpair", (local,), errno.EACCES)
    yield Rule("connect", (), errno.EACCES)


def _processes() -> Iterator[Rule]:
    yield Rule("clone", ((ArgumentTest(0, 0, _NEW_NAMESPACES),),))
    yield Rule("clone3", (), errno.ENOSYS)  # its flags lie in memory; libc then falls back to clone
    myself, keeps = ArgumentTest(0, 0), ArgumentTest(1, _RLIMIT_RTTIME, expected=False)
    # RLIMIT_RTTIME marks the worker that a process belongs to, and must stay. So must the limits of
    # other processes.
    yield Rule("prlimit64", ((myself, keeps), (myself, ArgumentTest(2, 0), ArgumentTest(2, 0, upper=True))))
    yield Rule("setrlimit", ((ArgumentTest(0, _RLIMIT_RTTIME, expected=False),),))
    yield Rule("setpriority", ((ArgumentTest(1, 0),),))
    yield Rule("sched_setaffinity")  # a timed process stays on its core
    for name in ("sched_setscheduler", "sched_setparam", "sched_setattr"):
        yield Rule(name, ((myself,),))


def _metadata() -> Iterator[Rule]:
    """Yield rules for calls that Landlock does not check, and that could change the user's files.

    Refused calls report success, because compilers and copy tools make them without need. Mode 0700
    takes nothing from the owner and gives nothing to others. It is allowed so that a linker's
    output can be run.
    """
    yield Rule("chmod", ((ArgumentTest(1, _PRIVATE_MODE),),), 0)
    yield Rule("fchmodat", ((ArgumentTest(2, _PRIVATE_MODE),),), 0)
    yield Rule("fchmodat2", (), errno.ENOSYS)
    for name in ("utime", "utimes", "futimesat"):
        yield Rule(name, (), 0)
    yield Rule(
        "utimensat", ((ArgumentTest(1, 0), ArgumentTest(1, 0, upper=True)),), 0
    )  # without a path: on an open file


def signal_rules(pid: int) -> Iterator[Rule]:
    """Refuse signals except to this process and its group, where Landlock cannot scope signals."""
    yield Rule(
        "kill",
        ((ArgumentTest(0, 0),), (ArgumentTest(0, pid),), (ArgumentTest(0, -pid & 0xFFFFFFFF),), (ArgumentTest(1, 0),)),
    )
    yield Rule("tkill", ((ArgumentTest(0, pid),),))
    yield Rule("tgkill", ((ArgumentTest(0, pid),),))
    for name in ("rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"):
        yield Rule(name)
    yield Rule("fcntl", (tuple(ArgumentTest(1, c, expected=False) for c in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),))
    yield Rule("ioctl", (tuple(ArgumentTest(1, c, expected=False) for c in (_FIOSETOWN, _SIOCSPGRP)),))


def supported() -> bool:
    """Whether this system supports filters, and we can write them for its processor."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT  # it tried to read the filter, so it supports filters


def assemble_filter(selected: Sequence[Rule], machine: str) -> bytes:
    """Return the filter for a processor, as BPF instructions."""
    architecture, column = _ARCHITECTURES[machine]
    refuse = _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        refuse,
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [_instruction(_JUMP_AT_LEAST, _X32, 0, 1), refuse]
    numbered = [(number, rule) for rule in selected if (number := _NUMBERS[rule.system_call][column]) is not None]
    for start in range(0, len(numbered), _CHUNK):
        code += _chunk(sorted(numbered, key=lambda pair: pair[0])[start : start + _CHUNK])
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _chunk(numbered: Sequence[tuple[int, Rule]]) -> list[bytes]:
    """Return the rules for some system calls; a call with a higher number jumps over them.

    The system installs a filter faster this way.
    """
    body = [piece for number, rule in numbered for piece in rule.assemble(number)]
    body.append(_instruction(_RETURN, _ALLOW))
    return [_instruction(_JUMP_AT_LEAST, numbered[-1][0] + 1, len(body), 0), *body]


@functools.cache
def _shared_filter(*, own_user: bool) -> bytes:
    """Return the part of the filter that all processes share, assembled once before forking."""
    return assemble_filter(rules(own_user=own_user), platform.machine())


def prepare(*, own_user: bool) -> None:
    """Assemble the filter before the forks that will install it."""
    _shared_filter(own_user=own_user)


def install(*, own_user: bool, signals_scoped: bool) -> None:
    """Install the filter on this thread and all that it starts. Requires ``no_new_privs``.

    A second filter stops signals to the user's processes, where neither a user of the worker's own
    nor Landlock does.
    """
    _install(_shared_filter(own_user=own_user))
    if not own_user and not signals_scoped:
        _install(assemble_filter(list(signal_rules(os.getpid())), platform.machine()))


def _install(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    if _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "Linux rejected the system-call filter")


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _exception(tests: Sequence[ArgumentTest]) -> list[bytes]:
    """Return instructions that allow the call if all tests pass, else continue after them."""
    code = [_instruction(_RETURN, _ALLOW)]
    for test in reversed(tests):
        code = [*test.assemble(len(code)), *code]
    return code
