"""The options of `opforge run` that are for backends whose kernels language models write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge.errors import OpforgeError
from opforge.reports.escape import escape_controls

if TYPE_CHECKING:
    from opforge.generate.options import GenerationOptions
    from opforge.runs.config import RunConfig

LLM_BACKENDS = ("llm", "llm-relay", "kernel_agent")
BUDGET_OPTIONS = ("max_cost", "max_tokens")
"""Options that a run may be given anew when it is taken up again."""
_PANEL = "Kernels by language models (--backend llm, llm-relay, kernel_agent)"
_DEFAULT_MODELS = {"llm": "claude-opus-5-5", "kernel_agent": "gpt-6.1-sol"}
BACKENDS_BY_OPTION = {
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
    str | None, _option("The model (claude-opus-5-5; for kernel_agent gpt-6.1-sol); llm-relay has no default.")
]
Attempts = Annotated[int, _option("llm: attempts per operator.")]
RelayUrl = Annotated[str, _option("A server with OpenAI's protocol, such as http://localhost:8000/v1.")]
AgentWorkers = Annotated[int, _option("kernel_agent: workers per operator.")]
AgentRounds = Annotated[int, _option("kernel_agent: attempts per worker.")]
AgentTarget = Annotated[float, _option("kernel_agent: the speedup at which a right kernel is fast enough.")]
Dsl = Annotated[str, _option("Language of the kernels: triton, cuda, cpp, helion, cutedsl or pytorch.")]
MaxCost = Annotated[float | None, _option("Maximum cost in USD; with --resume, the new maximum.")]
MaxTokens = Annotated[
    int | None, _option("Maximum tokens of prompts and replies together; with --resume, the new maximum.")
]
ReplyTokens = Annotated[int, _option("Maximum tokens of one reply.")]
Parallel = Annotated[int, _option("Number of workers that are active at once, over all operators.")]
PromptsFolder = Annotated[
    Path | None, _option("A folder with your own prompts; the built-in ones are used for the rest.")
]
PricesFile = Annotated[Path | None, _option("A file with prices of models that are not in the built-in list.")]
TranscriptFile = Annotated[Path | None, _option("Replay a file of requests and replies; no model is called.")]
RecordFile = Annotated[Path | None, _option("Write requests and replies to a file for --transcript.")]

NAMES = frozenset(
    {
        "llm_model", "dsl", "max_cost", "max_tokens", "reply_tokens", "parallel", "prompts", "prices", "transcript",
        "record", *BACKENDS_BY_OPTION,
    }
)  # fmt: skip


def generation_settings(context: typer.Context, backend: str, device: str) -> dict[str, Any]:
    """Return how kernels are asked for, as it goes into the manifest; nothing for a backend that asks no model."""
    given = {n for n in NAMES if _is_on_command_line(context, n)}
    for name in sorted(given):
        if backend not in (allowed := BACKENDS_BY_OPTION.get(name, LLM_BACKENDS)):
            raise OpforgeError(f"--{name.replace('_', '-')} requires --backend {' or '.join(allowed)}, not {backend}")
    if backend not in LLM_BACKENDS:
        return {}
    from opforge.generate.options import GenerationOptions

    values = context.params
    agent = backend == "kernel_agent"
    options = GenerationOptions(
        provider=_provider(backend, values),
        model=values["llm_model"] or _DEFAULT_MODELS.get(backend, ""),
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
            f"--backend {backend} needs the name of a model; give --llm-model NAME, with the name that the server uses"
        )
    _check_provider(options.checked(device))
    return options.as_json()


def with_new_budget(folder: Path, config: RunConfig, bounds: dict[str, float]) -> dict[str, Any]:
    """Return how kernels are asked for in a run that is taken up again, with other bounds on what it may spend."""
    if config.backend not in LLM_BACKENDS:
        raise OpforgeError(
            f"--{min(bounds).replace('_', '-')} cannot be combined with the run in {str(folder)!r}: its backend "
            f"{config.backend} calls no model"
        )
    from opforge.generate.budget import with_raised_limits

    return with_raised_limits(folder, config.generation, bounds)


def _check_provider(options: GenerationOptions) -> None:
    """Have a missing key or package said before anything is started."""
    from opforge.generate.backend import open_configured_provider
    from opforge.generate.prices import Prices

    with open_configured_provider(options, Prices.load(Path(options.prices) if options.prices else None)):
        pass


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _provider(backend: str, values: dict[str, Any]) -> str:
    """Return who is asked: by the model's name where the backend leaves a choice."""
    if values["transcript"] is not None:
        return "transcript"
    if backend == "llm-relay" or values["llm_relay_url"]:
        return "relay"
    model = values["llm_model"] or _DEFAULT_MODELS[backend]
    if model.startswith("claude"):
        return "anthropic"
    if backend == "llm" and not model.startswith(("gpt", "o1", "o3", "o4", "chatgpt")):
        raise OpforgeError(
            f"--llm-model {model!r}: --backend llm calls Anthropic (claude-…) or OpenAI (gpt-…, o3 …); use --backend "
            "llm-relay for other servers"
        )
    return "openai"


def _path(path: Path | None) -> str:
    return str(path.resolve()) if path is not None else ""


def print_generation_summary(folder: Path) -> bool:
    """Print on stderr what was asked and spent, if kernels were made in this run.

    Returns whether each operator has a kernel, right or not.
    """
    try:
        row = json.loads((folder / "generation" / "summary.json").read_text())
    except OSError:
        return True
    tokens = row["input_tokens"] + row["output_tokens"]
    unknown = f", and {row['unpriced']} requests with unknown prices" if row["unpriced"] else ""
    sys.stderr.write(
        f"{row['model']}: {row['right']} of {len(row['operators'])} kernels right after {row['attempts']} attempts, "
        f"{row['requests']} requests, {tokens} tokens, {row['cost']:.4f} USD{unknown}\n"
    )
    if row["stopped"]:
        larger = " ".join(
            f"--{name.replace('_', '-')} N" for name, bound in row.get("bounds", {}).items() if bound is not None
        )
        sys.stderr.write(f"{row['stopped']}\ncontinue with a larger one: `opforge run --resume {folder} {larger}`\n")
    missing = {name: kept for name, kept in row["operators"].items() if kept["file"] is None}
    for name, kept in missing.items():
        reason = escape_controls(f"{name} has no kernel after {kept['attempts']} attempts: {kept['words']}")
        sys.stderr.write(f"opforge: {reason}\n")
    return not missing
