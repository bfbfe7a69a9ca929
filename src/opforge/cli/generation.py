"""The options of `opforge run` that are for backends whose kernels language models write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from opforge.generate.options import GenerationOptions
    from opforge.runs.config import RunConfig

BACKENDS = ("llm", "llm-relay", "kernel_agent")
BOUNDS = ("max_cost", "max_tokens")
"""Options that a run may be given anew when it is taken up again."""
_PANEL = "Kernels by language models (--backend llm, llm-relay, kernel_agent)"
_MODELS = {"llm": "claude-opus-5-5", "kernel_agent": "gpt-6.1-sol"}
_OWN = {
    "llm_attempts": ("llm", "llm-relay"),
    "llm_relay_url": ("llm-relay", "kernel_agent"),
    "kernel_agent_workers": ("kernel_agent",),
    "kernel_agent_max_rounds": ("kernel_agent",),
    "kernel_agent_target": ("kernel_agent",),
}
"""Options that some of the backends have, and which; the others have all of them."""


def _option(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_PANEL)


Model = Annotated[
    str | None, _option("The model (claude-opus-5-5; for kernel_agent gpt-6.1-sol); llm-relay has none of its own.")
]
Attempts = Annotated[int, _option("llm: how many attempts each operator has.")]
RelayUrl = Annotated[str, _option("A server of OpenAI's protocol, such as http://localhost:8000/v1.")]
AgentWorkers = Annotated[int, _option("kernel_agent: how many workers each operator has.")]
AgentRounds = Annotated[int, _option("kernel_agent: how many attempts each worker has.")]
AgentTarget = Annotated[float, _option("kernel_agent: the speedup at which a right kernel is fast enough.")]
Dsl = Annotated[str, _option("What kernels are written in: triton, cuda, cpp, helion or pytorch.")]
MaxCost = Annotated[float | None, _option("USD that may be spent; with --resume, now.")]
MaxTokens = Annotated[
    int | None, _option("Tokens that may be spent, of prompts and replies together; with --resume, now.")
]
ReplyTokens = Annotated[int, _option("Tokens that one reply may have.")]
Parallel = Annotated[int, _option("How many workers are active at once, of all operators.")]
PromptsFolder = Annotated[Path | None, _option("A folder with prompts of your own; those that are not in it are ours.")]
PricesFile = Annotated[Path | None, _option("A file with prices of models that are not in our list.")]
TranscriptFile = Annotated[Path | None, _option("Replay a file of requests and replies; no model is asked.")]
RecordFile = Annotated[Path | None, _option("Keep requests and replies in a file that can be replayed.")]

NAMES = frozenset(
    {
        "llm_model", "dsl", "max_cost", "max_tokens", "reply_tokens", "parallel", "prompts", "prices", "transcript", "record", *_OWN,
    }
)  # fmt: skip


def generation(context: typer.Context, backend: str, device: str) -> dict[str, Any]:
    """Return how kernels are asked for, as it goes into the manifest; nothing for a backend that asks no model."""
    given = {n for n in NAMES if _typed(context, n)}
    for name in sorted(given):
        if backend not in (allowed := _OWN.get(name, BACKENDS)):
            raise OpforgeError(
                f"--{name.replace('_', '-')} does not go with --backend {backend}, but with {' or '.join(allowed)}"
            )
    if backend not in BACKENDS:
        return {}
    from opforge.generate.options import GenerationOptions

    values = context.params
    agent = backend == "kernel_agent"
    options = GenerationOptions(
        provider=_provider(backend, values),
        model=values["llm_model"] or _MODELS.get(backend, ""),
        url=values["llm_relay_url"],
        transcript=_path(values["transcript"]),
        record=_path(values["record"]),
        dsl=values["dsl"],
        workers=values["kernel_agent_workers"] if agent else 1,
        rounds=values["kernel_agent_max_rounds"] if agent else values["llm_attempts"],
        target=values["kernel_agent_target"] if agent else None,
        parallel=values["parallel"],
        max_cost=values["max_cost"],
        max_tokens=values["max_tokens"],
        reply_tokens=values["reply_tokens"],
        prompts=_path(values["prompts"]),
        prices=_path(values["prices"]),
    )
    if not options.model:
        raise OpforgeError(
            f"--backend {backend} wants the name of a model; give --llm-model NAME, as the server calls it"
        )
    _check_provider(options.checked(device))
    return options.as_json()


def raised(folder: Path, config: RunConfig, bounds: dict[str, float]) -> dict[str, Any]:
    """Return how kernels are asked for in a run that is taken up again, with other bounds on what it may spend."""
    if config.backend not in BACKENDS:
        raise OpforgeError(
            f"--{min(bounds).replace('_', '-')} does not go with the run in {str(folder)!r}: its backend is {config.backend}, which asks no model"
        )
    from opforge.generate.raising import raised

    return raised(folder, config.generation, bounds)


def _check_provider(options: GenerationOptions) -> None:
    """Have a missing key or package said before anything is started."""
    from opforge.generate.backend import provider_of
    from opforge.generate.prices import Prices

    with provider_of(options, Prices.known(Path(options.prices) if options.prices else None)):
        pass


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _provider(backend: str, values: dict[str, Any]) -> str:
    """Return who is asked: by the model's name where the backend leaves a choice."""
    if values["transcript"] is not None:
        return "transcript"
    if backend == "llm-relay" or values["llm_relay_url"]:
        return "relay"
    model = values["llm_model"] or _MODELS[backend]
    if model.startswith("claude"):
        return "anthropic"
    if backend == "llm" and not model.startswith(("gpt", "o1", "o3", "o4", "chatgpt")):
        raise OpforgeError(
            f"--llm-model {model!r}: --backend llm asks Anthropic (claude-…) or OpenAI (gpt-…, o3 …); a model of another server goes with --backend llm-relay"
        )
    return "openai"


def _path(path: Path | None) -> str:
    return str(path.resolve()) if path is not None else ""


def say_what_was_made(folder: Path) -> None:
    """Say on stderr what was asked and spent, if kernels were made in this run."""
    try:
        row = json.loads((folder / "generation" / "summary.json").read_text())
    except OSError:
        return
    tokens = row["input_tokens"] + row["output_tokens"]
    unknown = f", and {row['unpriced']} requests whose price is not known" if row["unpriced"] else ""
    sys.stderr.write(
        f"{row['model']}: {row['right']} of {len(row['operators'])} kernels right after {row['attempts']} attempts, "
        f"{row['requests']} requests, {tokens} tokens, {row['cost']:.4f} USD{unknown}\n"
    )
    if row["stopped"]:
        larger = " ".join(
            f"--{name.replace('_', '-')} N" for name, bound in row.get("bounds", {}).items() if bound is not None
        )
        sys.stderr.write(f"{row['stopped']}\ngo on with a larger one: `opforge run --resume {folder} {larger}`\n")
