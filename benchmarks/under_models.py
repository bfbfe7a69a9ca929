"""Real architectures with kernels in ATen's place: are results right, which kernels serve, what do they cost; and a training run.

    python benchmarks/under_models.py --device cuda --json FILE        # six architectures, then 200 steps of training
    python benchmarks/under_models.py --only BertForMaskedLM --layers 1 --batches 1 --seq 16 --steps 0

First the models' calls are traced, without computing, and the kernels are judged and timed on them as they will be served
(`--runtime native`), which leaves proofs. Then each model, with random weights, runs at a small and a large batch with ATen
alone, with what is proven (`policy="proven"`), and with all kernels (`policy="all"`), in turns. Errors are against a run in
float64: the largest difference, over the largest value. A decoder that keeps a cache makes 16 more calls with a token each.
Times are compared in pairs: each run, or step of training, beside one of ATen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from taking_turns import Pairs, aten_in_place, ratio_text, take_turns

import opforge
from opforge.traces import trace_file
from opforge.traces.architectures import ModelWithInputs, build_model
from opforge.traces.collect import Collector
from opforge.traces.record import record, recording_metadata
from opforge.traces.zoo import architectures

KERNELS = Path(__file__).parents[1] / "examples" / "triton_kernels"
SIX = {
    "BertForMaskedLM": "encoder",
    "LlamaForCausalLM": "decoder with a cache",
    "T5ForConditionalGeneration": "encoder-decoder",
    "ViTForImageClassification": "vision",
    "WhisperForConditionalGeneration": "speech",
    "MixtralForCausalLM": "mixture of experts",
}
LAYERS = {"LlamaForCausalLM": 8, "MixtralForCausalLM": 2}
"""Of the large ones; the others have all of theirs."""
TRACED_LAYERS = 1
"""Layers repeat shapes."""
TOKENS = 16
RACE_S = {"proven": 9.0, "all": 2.0}
LEAST_PAIRS, MOST_PAIRS = 8, 500
"""Pairs of runs of a way and of ATen in a race, within its seconds."""
WARM_STEPS = 3
"""Steps of training that are not timed: calls get their plans."""
WAYS = ("ATen", "proven", "all")
PRODUCTS = {"mm", "addmm", "bmm"}
WIDE = "ATen in float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    parser.add_argument(
        "--trace", type=Path, help="a trace of the models' calls; made, and kept here, if it is not there"
    )
    parser.add_argument("--only", default=",".join(SIX), help="names of architectures; '' trains alone")
    parser.add_argument("--batches", default="1,8", help="batch sizes")
    parser.add_argument("--runtime", default="native", help="in which kernels are judged and timed: native or python")
    for name in ("layers", "seq"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--most-calls", type=int, help="judge at most so many calls of each operator (default: all)")
    parser.add_argument("--most-products", type=int, help="the same for matrix products, which take longest")
    parser.add_argument("--keep", type=Path, help="a folder for proven kernels; what is in one is not proven again")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"device": device_words(options.device), "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        kernels = options.keep or Path(folder) / "kernels"
        names = [name for name in options.only.split(",") if name]
        proven = kernels.exists()
        if not proven:
            shutil.copytree(options.kernels, kernels, ignore=shutil.ignore_patterns("*.proof.json", "__pycache__"))
        batches = [int(batch) for batch in options.batches.split(",")]
        if names and not proven:
            trace = options.trace or Path(folder) / "calls.parquet"
            if not trace.exists():
                record_calls(trace, names, batches, options)
            found["proving"] = prove(kernels, trace, names, options)
            keep(found, options.json)
        for name in names:
            for batch in batches:
                outcome = under(name, settings_of(name, batch, options), kernels, options.device)
                found["models"][f"{name}, batch {batch}"] = outcome
                show(f"{name}, batch {batch}", outcome)
                keep(found, options.json)
        if options.steps:
            found["training"] = train(kernels, options.device, options.steps)
            show_training(found["training"])
            keep(found, options.json)


def keep(found: dict[str, Any], target: Path | None) -> None:
    """Write what has been found so far."""
    if target:
        target.write_text(json.dumps(found, indent=1))


def device_words(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def record_calls(trace: Path, names: list[str], batches: list[int], options: argparse.Namespace) -> None:
    """Trace the models on tensors without contents."""
    collector, settings = Collector(), None
    for name in names:
        for batch in batches:
            target, settings = settings_of(name, batch, options)
            settings = replace(settings, fake=True, device="cpu", layers=TRACED_LAYERS)
            if error := record(collector, target, settings, lambda *_: None).error:
                sys.exit(f"{name} could not be traced: {error}")
    assert settings is not None
    trace_file.write_trace(trace, collector.merged_trace(recording_metadata(settings, sys.argv)))


def prove(kernels: Path, trace: Path, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Judge and time the kernels on the calls that the models make, which leaves proofs beside them."""
    made = trace_file.read_trace(trace)
    served = {folder.name for folder in kernels.iterdir()}
    calls = [
        call
        for call in made.calls
        if any(name in seen.model for seen in call.seen for name in names) and call.op.split(".")[0] in served
    ]
    calls = [call for group in by_operator(calls) for call in evenly(group, options)]
    chosen, out = kernels.parent / "chosen.parquet", kernels.parent / "proving"
    trace_file.write_trace(chosen, replace(made, calls=calls))
    begun = time.monotonic()
    words = {
        "suite": chosen, "backend": "directory", "ops-directory": kernels, "device": options.device,
        "runtime": options.runtime, "out": out, "workers": os.cpu_count() or 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "opforge.cli", "run"]
    command += [word for key, value in words.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit("the kernels could not be judged")
    took = time.monotonic() - begun
    print(f"{len(calls)} calls of these models judged and timed in {took:.0f} s\n{done.stdout}", flush=True)
    return {"calls": len(calls), "seconds": took, "said": done.stdout}


def by_operator(calls: list[Any]) -> list[list[Any]]:
    found: dict[str, list[Any]] = {}
    for call in calls:
        found.setdefault(call.op, []).append(call)
    return list(found.values())


def evenly(calls: list[Any], options: argparse.Namespace) -> list[Any]:
    """Return the calls of an operator to judge, from all over the list."""
    product = calls[0].op.split(".")[0] in PRODUCTS and options.most_products
    most = product or options.most_calls or len(calls)
    return calls[:: -(-len(calls) // most)]


def settings_of(name: str, batch: int, options: argparse.Namespace) -> tuple[Any, Any]:
    (one,) = [a for a in architectures() if a.target.name == name]
    _, settings = next(one.runs(options.device))
    seq = options.seq or settings.seq
    return one.target, replace(settings, layers=options.layers or LAYERS.get(name), batch=batch, seq=seq)


def under(name: str, made_from: tuple[Any, Any], kernels: Path, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    made = build_model(*made_from)
    outcome: dict[str, Any] = {
        "kind": SIX.get(name, ""),
        "dtype": made_from[1].dtype,
        "parameters": sum(p.numel() for p in made.model.parameters()),
    }
    answers, counters = {}, {}
    for way in WAYS:
        with installed(way, kernels, device) as enabled:
            answers[way] = call(made)
            if enabled:
                enabled.save_plans()  # the race then loads them
                before = enabled.counters()
                answers[way] = call(made)
                counters[way] = difference(enabled.counters(), before)
    outcome["counters"] = {way: counted(counters[way]) for way in WAYS[1:]}
    outcome["pairs"] = race(made, kernels, device)
    true, outcome["standard"] = standard(made)
    outcome["error"] = {way: apart(answers[way], true) for way in WAYS}
    outcome["same_choice"] = {way: same_choice(answers[way], answers["ATen"]) for way in WAYS[1:]}
    return outcome


@contextmanager
def installed(way: str, kernels: Path, device: str) -> Iterator[Any]:
    if way == "ATen":
        yield None
        return
    with opforge.enabled(kernels, device=device, policy=way, learn="request") as enabled:
        yield enabled


def difference(after: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what was counted between two looks at the counters."""
    found = {}
    for op, row in after.items():
        old = before[op]
        aten = {reason: count - old["aten"].get(reason, 0) for reason, count in row["aten"].items()}
        found[op] = {
            "served": row["served"] - old["served"],
            "replayed": row.get("replayed", 0) - old.get("replayed", 0),
            "planned": "replayed" in row,
            "aten": {reason: count for reason, count in aten.items() if count},
        }
    return found


def call(made: ModelWithInputs) -> list[torch.Tensor]:
    """Return what the model gives, and what it gives for more tokens where it keeps a cache."""
    with torch.no_grad():
        last = made.model(*made.args, **made.kwargs)
        found = [last.logits]
        for _ in range(TOKENS if made.follow_up is not None else 0):
            last = made.follow_up(made.model, last)
            found.append(last.logits)
    return found


def race(made: ModelWithInputs, kernels: Path, device: str) -> dict[str, Pairs]:
    """Return milliseconds of runs by way, each beside a run of ATen."""
    run = partial(call, made)
    times: dict[str, Pairs] = {}
    for way in WAYS[1:]:
        with installed(way, kernels, device) as enabled:
            run()
            enabled.learn()
            run()
            times[way] = take_turns(run, run, device, least=LEAST_PAIRS, most=MOST_PAIRS, seconds=RACE_S[way])
    return times


def standard(made: ModelWithInputs) -> tuple[list[torch.Tensor], str]:
    """Return the model's answers in float64, or in float32 where it does not run so; the model is not what it was afterwards."""
    for words, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        model = made.model.to(dtype)
        kwargs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in made.kwargs.items()}
        try:
            return call(replace(made, model=model, kwargs=kwargs)), words
        except RuntimeError as error:
            print(f"not in {words}: {str(error).splitlines()[0]}", flush=True)
    sys.exit("the model runs in no wider dtype")


def apart(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(found, true, strict=True)
    )


def same_choice(found: list[torch.Tensor], aten: list[torch.Tensor]) -> float:
    """Return how often the largest of the last dimension is the same one."""
    pairs = list(zip(found, aten, strict=True))
    same = sum((a.argmax(-1) == b.argmax(-1)).sum().item() for a, b in pairs)
    return same / sum(a[..., 0].numel() for a, _ in pairs)


def counted(counters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    met = {op: row for op, row in counters.items() if row["served"] or row["aten"]}
    reasons: dict[str, int] = {}
    for row in met.values():
        for reason, count in row["aten"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "served": {op: row["served"] for op, row in met.items() if row["served"]},
        "replayed": sum(row["replayed"] for row in met.values()),
        "planned": sum(row["served"] for row in met.values() if row["planned"]),
        "aten": reasons,
    }


def show(name: str, outcome: dict[str, Any]) -> None:
    print(f"\n{name} ({outcome['kind']}, {outcome['dtype']}, {outcome['parameters'] / 1e6:.0f} M parameters)")
    aten = [aten for _, aten in outcome["pairs"]["proven"]]
    print(f"  ATen    {times_text(aten)}   error against {outcome['standard']} {outcome['error']['ATen']:.2e}")
    for way, pairs in outcome["pairs"].items():
        print(
            f"  {way:7} {times_text([took for took, _ in pairs])}, {ratio_text(pairs)}   error {outcome['error'][way]:.2e} "
            f"({outcome['error'][way] / outcome['error']['ATen']:.2f} of ATen's), same choice {outcome['same_choice'][way]:.2%}"
        )
    for way in WAYS[1:]:
        tally = outcome["counters"][way]
        served = ", ".join(f"{op} {n}" for op, n in tally["served"].items()) or "none"
        print(
            f"  {way}: served {sum(tally['served'].values())} ({served}), {tally['replayed']} replayed of {tally['planned']} "
            f"served by kernels with plans; to ATen {sum(tally['aten'].values())} {tally['aten'] or ''}"
        )
    sys.stdout.flush()


def times_text(times: list[float]) -> str:
    return f"{statistics.median(times):8.2f} ms ({min(times):.2f} to {max(times):.2f})"


def train(kernels: Path, device: str, steps: int) -> dict[str, Any]:
    """Train one small decoder in each way, from the same weights on the same data, beside one with ATen."""
    curves: dict[str, list[float]] = {}
    pairs: dict[str, Pairs] = {}
    counts: dict[str, dict[str, Any]] = {}
    for name in (*WAYS[1:], WIDE):
        aten, way = Training(device, steps), Training(device, steps, narrow=name != WIDE)
        with installed("ATen" if name == WIDE else name, kernels, device) as enabled:
            way.run(WARM_STEPS)
            with aten_in_place():
                aten.run(WARM_STEPS)
            if enabled:
                enabled.learn()
            before = enabled.counters() if enabled else {}
            count = steps - WARM_STEPS
            pairs[name] = take_turns(way.run, aten.run, device, least=count, most=count, seconds=0)
            if enabled:
                counts[name] = counted(difference(enabled.counters(), before))
        curves |= {"ATen": aten.losses(), name: way.losses()}
    return {"curves": curves, "pairs": pairs, "counters": counts}


class Training:
    """A model in training, which goes on where it was left."""

    def __init__(self, device: str, steps: int, *, narrow: bool = True) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        words = {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        }
        self._narrow, self._device = narrow, device
        self._model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, **words)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._text = chain(steps * 8, 128).to(device)
        self._losses: list[torch.Tensor] = []

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            begin = 8 * len(self._losses)
            ids = self._text[begin : begin + 8]
            with torch.autocast(self._device.split(":", maxsplit=1)[0], torch.bfloat16, enabled=self._narrow):
                loss = self._model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        return [value.item() for value in self._losses]


def chain(rows: int, length: int) -> torch.Tensor:
    """Return text in which each token has four that may follow it: something to be learnt, the same each time."""
    draws = torch.Generator().manual_seed(7)
    follows = torch.randint(0, 2048, (2048, 4), generator=draws)
    text = torch.empty(rows, length, dtype=torch.long)
    text[:, 0] = torch.randint(0, 2048, (rows,), generator=draws)
    for at in range(1, length):
        text[:, at] = follows[text[:, at - 1], torch.randint(0, 4, (rows,), generator=draws)]
    return text


def show_training(outcome: dict[str, Any]) -> None:
    curves = outcome["curves"]
    marks = [n for n in (1, 25, 50, 100, 150, 200, 300) if n <= len(curves["ATen"])]
    print("\nloss at step " + "".join(f"{n:>9}" for n in marks))
    for way, losses in curves.items():
        print(f"{way:>16} " + "".join(f"{losses[n - 1]:>9.4f}" for n in marks))
    for way in list(curves)[1:]:
        off: Callable[[tuple[float, float]], float] = lambda pair: abs(pair[0] - pair[1]) / pair[1]  # noqa: E731
        print(f"{way}: at most {max(map(off, zip(curves[way], curves['ATen'], strict=True))):.2%} from ATen's loss")
    print(f"a step, ATen: {times_text([aten for _, aten in outcome['pairs']['proven']])}")
    for way, pairs in outcome["pairs"].items():
        print(f"a step, {way}: {times_text([took for took, _ in pairs])}, {ratio_text(pairs)}")
    for way, tally in outcome["counters"].items():
        print(
            f"{way}: served {sum(tally['served'].values())} {tally['served']}, {tally['replayed']} replayed of "
            f"{tally['planned']} served by kernels with plans; to ATen {tally['aten']}"
        )


if __name__ == "__main__":
    main()
