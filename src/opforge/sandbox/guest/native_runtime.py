"""A kernel behind its operators' native slots: a judged call is a call of the ATen operator.

The slots are those of `opforge.enable`, with two differences. A kernel's exception is raised: ATen never
answers for it. And only judged calls go to the kernel: those that the harness needs are ATen's own.
Behind a slot is the operator's trap, so a call that the slot passes on is seen as the kernel's.
"""

from __future__ import annotations

import contextlib
from _thread import get_ident  # bound before any kernel is loaded
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from opforge.runtime.aten_kernels import dispatch_key
from opforge.runtime.dispatch import CallCounts, InstalledKernel
from opforge.runtime.enabling import why_not_installable
from opforge.runtime.learning import DEVICE_TYPES, LEARNER
from opforge.runtime.native import binding
from opforge.runtime.native.building import NativeError
from opforge.runtime.native.launch_plan import NoPlanError
from opforge.runtime.native_slots import NativeSlot
from opforge.runtime.operator_schema import FUNCTIONAL, OperatorSchema, schema_of
from opforge.runtime.trees import instances
from opforge.sandbox.guard.traps import Traps
from opforge.sandbox.guest.loader import LoadedKernel, aten_function
from opforge.sandbox.host.reply import CPP, PYTHON, REPLAYED

Function = Callable[..., Any]
_MAX_REASON_CHARS = 300


class _JudgedKernel(InstalledKernel):
    """A kernel at one operator. Nothing is proven yet, so every call is for it."""

    def __init__(self, op: OperatorSchema, function: Function, operator: Any, device: torch.device) -> None:
        super().__init__(op, "", function, None, unadapted=True)
        self._operator = operator if op.kind == FUNCTIONAL else None
        self.why_not_planned = ""
        if operator is not None:
            self.why_not_planned = "a slot cannot call its C++ operator with these arguments as they are"
        elif device.type not in DEVICE_TYPES:
            self.why_not_planned = "launch plans are for kernels on a GPU"
        elif "nondeterministic_seeded" in op.tags:  # a recording would use up the numbers of the call that is judged
            self.why_not_planned = "the operator draws random numbers"
        self.can_be_planned = not self.why_not_planned
        self.python_runs = 0

    @property
    def proven_operator(self) -> Any:
        """Return the C++ operator that the slot calls as it is, as if all calls were proven."""
        return self._operator

    def function(self, *, needs_grad: bool) -> Function:
        """Return the kernel's function, and count that Python runs it."""
        self.python_runs += 1
        return super().function(needs_grad=needs_grad)


class _JudgedSlot(NativeSlot):
    """A slot whose kernel answers every call that reaches it, or raises."""

    def __init__(self, op: OperatorSchema, key: str, library: binding.NativeLibrary) -> None:
        super().__init__(op, key, library)
        self.aten_kernel = _no_answer

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        raised: Exception | None = None,
        counted: CallCounts | None = None,
    ) -> Any:
        del counted
        if raised is not None:
            raise raised
        (kernel,) = self.kernels
        result = self._run_inside(kernel, args, kwargs)
        kernel.counts.served += 1
        return result


def _no_answer(*_args: Any, **_kwargs: Any) -> Any:
    """Stand in ATen's place: the call for which a plan is being made needs no answer if there is none."""
    raise NoPlanError("ATen does not answer for a kernel that is judged")


class NativeRuntime:
    """The native slots of one kernel's operators."""

    def __init__(self, device: torch.device, traps: Traps, ops: Iterable[str], primary: str) -> None:
        """Choose the operators that get slots. Do it before traps are set: they change what the dispatcher says."""
        self._library = binding.load()
        if device.type == "cuda":
            self._library.load_driver()
        self._device = device
        self._traps = traps
        self._main = get_ident()
        self._schemas: dict[str, OperatorSchema] = {}
        self._slots: dict[str, _JudgedSlot] = {}
        self._refused: dict[str, str] = {}
        """Operators without a slot, with the reasons."""
        for op in ops:
            if (schema := schema_of(op)) is None:
                self._refused[op] = f"this torch has no operator {op}"
            elif reason := why_not_installable(op, primary, str(device)):
                self._refused[op] = reason
            else:
                self._schemas[op] = schema
        self._functions: dict[str, Function] = {}
        self._learning_ns = 0
        self.last_way: dict[str, str] = {}
        """How the last call ran, and why it was not replayed, as the fields of a reply."""

    def install(self) -> None:
        """Install the slots, without a kernel yet, over the traps. Do it before the kernel is loaded."""
        for op, schema in self._schemas.items():
            try:
                self._slots[op] = _JudgedSlot(schema, dispatch_key(str(self._device)), self._library)
            except NativeError as error:
                self._refused[op] = str(error)
        self._traps.renew(list(self._slots))
        self._library.set_inside(1)  # in this thread, ATen answers whatever is not a judged call

    def use(self, loaded: LoadedKernel) -> None:
        """Give the slots their kernel."""
        for op, slot in self._slots.items():
            with contextlib.suppress(NotImplementedError):  # it cannot serve this form; calls say so
                function = loaded.callable_for(op)
                operator = loaded.operator if function is loaded.function else None
                kernel = _JudgedKernel(slot.op, function, operator, self._device)
                if kernel.can_be_planned:
                    kernel.plans.store = self._library.new_plan_store()
                slot.kernels = (kernel,)

    def serves(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call of an operator reaches the slot with its own tensors."""
        if op not in self._slots:
            return False
        tensors = list(instances((args, kwargs), torch.Tensor))
        if not all(t.layout is torch.strided and not (t.is_quantized or t.is_conj() or t.is_neg()) for t in tensors):
            return False
        if not tensors:
            return bool(torch.device(kwargs.get("device") or "cpu").type == self._device.type)
        return any(t.device.type == self._device.type for t in tensors)

    def callable_for(self, op: str, function: Function) -> Function:
        """Return a function that calls the operator; ``function`` is the kernel, for calls that reach no slot."""
        self._functions[op] = function
        set_inside, operator = self._library.set_inside, aten_function(op)

        def through_dispatcher(*args: Any, **kwargs: Any) -> Any:
            set_inside(0)
            try:
                return operator(*args, **kwargs)
            finally:
                set_inside(1)

        judged = self._traps.wrap_kernel(through_dispatcher)

        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._main:  # without the locks of counters: threads that alternate would meet there
                return (judged if self.serves(op, args, kwargs) else function)(*args, **kwargs)
            if not self.serves(op, args, kwargs):
                reason = self._refused.get(op) or "calls like this one do not reach an installed kernel"
                self.last_way = {"ran": PYTHON, "not_replayed": reason}
                return function(*args, **kwargs)
            self.learn(op, args, kwargs)
            before = self._counts(op)
            self.last_way = {}
            result = judged(*args, **kwargs)
            self.last_way = self._way(op, before)
            return result

        return call

    def in_python(self, op: str) -> Function:
        """Return the kernel itself, as if it had no slot."""
        self.last_way = {}
        return self._functions[op]

    def learn(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Make a launch plan for calls like this one, if its geometry is new.

        Only in the main thread: in others, traps take calls of the harness for the kernel's.
        """
        slot = self._slots[op]
        kernel = self._kernel(op)
        if kernel is None or not kernel.can_be_planned:
            return
        began, plans = perf_counter_ns(), kernel.plans
        known, refused = len(plans.noted), plans.refused.copy()
        try:
            plans.learn, plans.runs = "request", 0
            LEARNER.note(slot, plans, tuple(args), kwargs)
            plans.learn = "never"  # calls themselves note nothing
            if len(plans.noted) > known:
                self._library.set_inside(0)
                LEARNER.learn()
        except Exception as error:  # noqa: BLE001  # a plan is never worth an error
            plans.refused[f"{type(error).__name__}: {error}"] += 1
        finally:
            plans.learn = "never"
            self._library.set_inside(1)
        plans.noted.update(plans.learned)  # once
        plans.learned.clear()
        if reasons := list(plans.refused - refused):
            kernel.why_not_planned = reasons[0]
            plans.refused = refused + Counter(reasons[:1])
        self._learning_ns += perf_counter_ns() - began

    def pop_learning_ns(self) -> int:
        """Return the time that plans have taken since the last time."""
        spent, self._learning_ns = self._learning_ns, 0
        return spent

    @contextlib.contextmanager
    def serving(self, sets: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Let operators called directly go to the kernel: timed calls, each on one of these sets of arguments."""
        with self._traps.timing(sets[0][:2] if sets else ()):
            self._library.set_inside(0)
            try:
                yield
            finally:
                self._library.set_inside(1)

    def _kernel(self, op: str) -> _JudgedKernel | None:
        kernel = next(iter(self._slots[op].kernels), None)
        return kernel if isinstance(kernel, _JudgedKernel) else None

    def _counts(self, op: str) -> tuple[int, int, int]:
        """Return how many calls were replayed, run by Python, and served in any way."""
        kernel = self._kernel(op)
        if kernel is None:
            return 0, 0, 0
        self._slots[op].collect_counts()
        return sum(map(self._library.replays, kernel.plans.handles)), kernel.python_runs, kernel.counts.served

    def _way(self, op: str, before: tuple[int, int, int]) -> dict[str, str]:
        """Say how a call ran; raise if the kernel did not answer it."""
        kernel = self._kernel(op)
        replayed, in_python, served = (now > then for now, then in zip(self._counts(op), before, strict=True))
        if kernel is None or not (replayed or in_python or served):
            raise RuntimeError("the call did not reach the kernel behind the native slot")
        if replayed or not in_python:
            return {"ran": REPLAYED if replayed else CPP}
        reason = kernel.why_not_planned[:_MAX_REASON_CHARS]
        return {"ran": PYTHON, **({"not_replayed": reason} if reason else {})}
