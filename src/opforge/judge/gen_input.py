"""Process that runs users' ``gen_input.py`` in workers, and stores the inputs as cases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opforge.cases import Case, Device, Dtype, Layout, MemoryFormat, Phase, TensorSpec, Value
from opforge.cases.case_files import BlobWriter
from opforge.cases.text import format_arguments
from opforge.cases.values import DTYPES, LAYOUTS, contiguous_strides
from opforge.cases.wire import json_tree
from opforge.errors import CaseSyntaxError
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.worker_folders import WorkerFolders
from opforge.procs.channel import Channel
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import MALFORMED_REPLY, InputTestsReply, MalformedReplyError, fault

_MAX_DEATHS = 3
_FILE = "gen_input.py"


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Make the cases of one operator after another, until a request without a file."""
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    workers = WorkerConfig(config["device"], config["timeout_s"], config["memory_bytes"])
    worker_folders = WorkerFolders(spawner, **config["confine"]) if config.get("confine") else None
    blob = BlobWriter(Path(config["blob"]))
    while "file" in (request := channel.receive()):
        cases = _CaseMaker(
            spawner, workers, worker_folders, blob, config["blob_name"], request["op"], request["file"]
        ).cases()
        channel.send([_row(case) for case in cases])
    blob.close()
    channel.send({"done": True})


class _NoCaseError(Exception):
    """Reason why a test, or a whole file, gives no case."""


class _CaseMaker:
    """Makes the cases of one operator."""

    def __init__(
        self,
        spawner: Spawner,
        config: WorkerConfig,
        worker_folders: WorkerFolders | None,
        blob: BlobWriter,
        blob_name: str,
        op: str,
        file: str,
    ) -> None:
        self._spawner = spawner
        self._config = config
        self._worker_folders = worker_folders
        self._blob = blob
        self._blob_name = blob_name
        self._op = op
        self._file = file
        self._worker: KernelWorker | None = None
        self._deaths = 0

    def cases(self) -> list[Case]:
        """Return a case for each test; failed tests and files without tests give a reason."""
        try:
            return list(self._cases_of_tests(InputTestsReply.from_wire(self._load_file())))
        except (_NoCaseError, MalformedReplyError) as error:
            return [self._lost_case(Phase.CORRECTNESS, _FILE, str(error))]
        finally:
            if self._worker is not None:
                self._worker.close()

    def _load_file(self) -> Any:
        """Load the file in a new worker, and return its description of the tests."""
        confinement = None if self._worker_folders is None else self._worker_folders.reference_confinement(self._file)
        self._worker = KernelWorker(self._spawner, self._config, confinement)
        try:
            reply = self._worker.ask({"do": "tests", "file": self._file})
        except WorkerDiedError as death:
            self._worker = None
            raise _NoCaseError(f"{_FILE}: {_death_reason(death)}") from None
        if reason := fault(reply):
            raise _NoCaseError(reason)
        return reply

    def _cases_of_tests(self, reply: InputTestsReply) -> Iterator[Case]:
        counts, errors = reply.counts, reply.errors
        if not errors and not any(counts.values()):
            raise _NoCaseError(f"{_FILE} gives no tests: both of its lists are empty")
        for phase in Phase:
            if phase in errors:
                yield self._lost_case(phase, _FILE, errors[phase])
            for test in range(counts.get(phase, 0)):
                source = f"{phase} test {test}"
                try:
                    yield self._make_case(phase, test, source)
                except (_NoCaseError, MalformedReplyError, CaseSyntaxError) as error:
                    yield self._lost_case(phase, source, f"{source} of {_FILE}: {error}")

    def _make_case(self, phase: Phase, test: int, source: str) -> Case:
        if self._worker is None:
            if self._deaths >= _MAX_DEATHS:
                raise _NoCaseError(f"not made: its process died {self._deaths} times")
            self._load_file()
        worker = self._worker
        if worker is None:
            raise _NoCaseError("its process died")
        try:
            reply = worker.ask({"do": "make", "phase": phase, "test": test})
        except WorkerDiedError as death:
            self._worker = None
            self._deaths += 1
            raise _NoCaseError(_death_reason(death)) from None
        if reason := fault(reply):
            raise _NoCaseError(reason)
        decoder = _InputDecoder(worker, self._config, self._blob)
        try:
            args = tuple(decoder.value(v) for v in reply["args"])
            kwargs = {str(name): decoder.value(v) for name, v in reply["kwargs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _NoCaseError(f"{MALFORMED_REPLY}: {error}") from None
        text = format_arguments(args, kwargs)
        fields = {"phase": phase, "source": source, "blob": self._blob_name, "tree": json_tree(text)}
        return Case.make(self._op, text, contents=f"{decoder.digest.hexdigest()} {source}", **fields)

    def _lost_case(self, phase: Phase, source: str, reason: str) -> Case:
        return Case.make(self._op, f"({source})", contents=reason, phase=phase, source=source, lost=reason)


class _InputDecoder:
    """Decodes a worker's description of its inputs, and stores the bytes of tensors."""

    def __init__(self, worker: KernelWorker, config: WorkerConfig, blob: BlobWriter) -> None:
        self._worker = worker
        self._config = config
        self._blob = blob
        self.digest = hashlib.blake2b(digest_size=16)

    def value(self, tree: Any) -> Value:
        """Decode a JSON tree; raise ValueError if opforge's own code cannot have written it."""
        match tree:
            case list():
                return [self.value(v) for v in tree]
            case None | bool() | int() | float() | str():
                return tree
            case {"T": row}:
                return self._tensor(*row)
            case {"complex": [float(real), float(imaginary)]}:
                return complex(real, imaginary)
            case {"dtype": str(short)} if short in DTYPES:
                return Dtype(short)
            case {"torch": str(name)}:
                return Layout(name) if name in LAYOUTS else MemoryFormat(name)
            case {"device": str(name)}:
                return Device(name)
        raise ValueError(f"{str(tree)[:80]} is not an argument")

    def _tensor(
        self, start: int, nbytes: int, dtype: str, shape: list[int], strides: list[int], offset: int, device: str
    ) -> TensorSpec:
        sizes = [start, nbytes, offset, *shape, *strides]
        if not all(type(n) is int and n >= 0 for n in sizes) or dtype not in DTYPES or len(shape) != len(strides):
            raise ValueError("a tensor's row is malformed")
        if not self._config.input_bytes <= start <= start + nbytes <= self._config.arena_bytes:
            raise ValueError("a tensor is outside its region")
        geometry = tuple(strides) if tuple(strides) != contiguous_strides(tuple(shape)) else None
        other_device = None if device.partition(":")[0] == self._config.device.partition(":")[0] else device
        spec = TensorSpec(tuple(shape), dtype, geometry, offset, other_device)
        if spec.storage_nbytes > nbytes:
            raise ValueError("a tensor reaches beyond its storage")
        contents = self._worker.arena_view[start : start + nbytes].tobytes()
        digest = hashlib.blake2b(contents, digest_size=16).digest()
        self.digest.update(digest)
        blob_offset = self._blob.add(contents, digest) if nbytes else None
        extra = nbytes if blob_offset is not None and nbytes != spec.storage_nbytes else None
        return TensorSpec(spec.shape, spec.dtype, spec.stride, spec.offset, other_device, blob_offset, extra)


def _death_reason(death: WorkerDiedError) -> str:
    return str(death).replace("the kernel's process", "its process")


def _row(case: Case) -> list[str]:
    """Return a case in the form that the main process reads."""
    return [case.op, case.args, case.phase, case.source, case.id, case.tree, case.blob, case.lost]
