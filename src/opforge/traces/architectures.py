"""Build architectures from their configuration, with random weights; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.cases.wire import TORCH_DTYPES
from opforge.errors import OpforgeError, UnknownNameError
from opforge.runtime.trees import instances
from opforge.traces import hf_inputs
from opforge.traces.hf_inputs import FollowUp
from opforge.traces.targets import LIBRARIES, Settings, Target

_LAYER_COUNT_FIELDS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "encoder_num_hidden_layers", "decoder_num_hidden_layers", "depth",
)  # fmt: skip
"""Configuration fields that hold the number of layers."""

_DERIVED = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Configuration fields that are derived from the number of layers."""


@dataclass(frozen=True, slots=True)
class ModelWithInputs:
    """A model of an architecture, with its inputs."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    follow_up: FollowUp | None = None
    """Second call that continues from the first result, for models that generate."""


def build_model(target: Target, settings: Settings) -> ModelWithInputs:
    """Build the model of an architecture with random weights, and inputs of the given size."""
    library = _library(target)
    with _dtype(settings.dtype), torch.device(settings.device):
        workload = _MODEL_BUILDERS[target.kind](library, target.name, settings)
    workload.model.train(settings.train)
    return workload


def model_runner(target: Target, settings: Settings) -> Callable[[], None]:
    """Build a model and its inputs; return a function that runs it, or trains it for one step."""
    workload = build_model(target, settings)
    if not settings.train:
        return lambda: _run_inference(workload)
    fused = True if settings.fake else None  # unfused ones read the step number, which a fake tensor lacks
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4, fused=fused)
    return lambda: _run_training_step(workload, optimizer)


def _library(target: Target) -> Any:
    package = LIBRARIES[target.kind]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OpforgeError(
            f"{target.kind}:{target.name} needs the package {package} ({error}); "
            f"install it with `pip install {package}`"
        ) from None


def _run_inference(workload: ModelWithInputs) -> None:
    with torch.no_grad():
        result = workload.model(*workload.args, **workload.kwargs)
        if workload.follow_up is not None:
            workload.follow_up(workload.model, result)


def _run_training_step(workload: ModelWithInputs, optimizer: Any) -> None:
    loss_of(workload.model(*workload.args, **workload.kwargs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(result: Any) -> torch.Tensor:
    """Return a model's own loss, or the sum of the means of its results if it has none."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floats = [t for t in instances(result, torch.Tensor) if t.is_floating_point() and t.requires_grad]
    if not floats:
        raise OpforgeError("the model returned nothing from which a loss can be computed")
    return torch.stack([t.float().mean() for t in floats]).sum()


@contextmanager
def _dtype(short: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[short])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _build_hf(library: Any, name: str, settings: Settings) -> ModelWithInputs:
    cls = getattr(library, name, None)
    if cls is None or not hasattr(cls, "config_class"):
        models = [n for n in dir(library) if n[0].isupper() and ("Model" in n or "For" in n)]
        raise UnknownNameError(
            "model class of transformers", name, models, "a class such as BertModel, not a checkpoint"
        )
    config = make_config(cls.config_class, settings)
    with _skip_weight_initialisation() if settings.fake else nullcontext():
        model = cls(config)
    inputs, follow = hf_inputs.make_inputs(model, config, settings)
    return ModelWithInputs(model, (), inputs, follow)


@contextmanager
def _skip_weight_initialisation() -> Iterator[None]:
    """Skip weight initialisation: fake weights have no values, and initialisers read some."""
    try:
        functions = importlib.import_module("transformers.initialization").TORCH_INIT_FUNCTIONS
    except (ImportError, AttributeError):  # older transformers: some architectures read values and raise
        functions = {}
    before = dict(functions)
    functions.update(dict.fromkeys(before, lambda tensor, *_args, **_kwargs: tensor))
    try:
        yield
    finally:
        functions.update(before)


def make_config(config_class: Any, settings: Settings) -> Any:
    """Return a configuration with fewer layers and the requested changes."""
    config = config_class().to_dict()
    if settings.layers is not None:
        _reduce_layers(config, settings.layers)
    for path, value in settings.changes.items():
        *parts, last = path.split(".")
        section = config
        for part in parts:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last not in section:
            known = section if isinstance(section, dict) else config
            raise UnknownNameError(f"setting of {config_class.__name__}", path, known)
        section[last] = value
    return config_class.from_dict(config)


def _reduce_layers(config: dict[str, Any], layers: int) -> None:
    """Reduce the number of layers, also in nested parts, and cut lists with one entry per layer."""
    for name in _LAYER_COUNT_FIELDS:
        before = config.get(name)
        if isinstance(before, int) and before > layers:
            config[name] = layers
            for derived in _DERIVED:
                config.pop(derived, None)
            for other, value in list(config.items()):
                if isinstance(value, list) and len(value) == before:
                    config[other] = value[:layers]
    for value in config.values():
        if isinstance(value, dict):
            _reduce_layers(value, layers)


def _build_timm(library: Any, name: str, settings: Settings) -> ModelWithInputs:
    if name not in library.list_models():
        raise UnknownNameError("architecture of timm", name, library.list_models())
    size_option = {} if settings.image is None else {"img_size": settings.image}
    try:
        model = library.create_model(name, pretrained=False, **size_option, **settings.changes)
    except TypeError:  # a convolutional model, which takes images of any size
        model = library.create_model(name, pretrained=False, **settings.changes)
    channels, height, width = model.default_cfg["input_size"]
    size = (settings.image, settings.image) if settings.image else (height, width)
    return ModelWithInputs(model, (torch.randn(settings.batch, channels, *size),))


def _build_torchvision(library: Any, name: str, settings: Settings) -> ModelWithInputs:
    models = library.models.list_models()
    if name not in models:
        raise UnknownNameError("architecture of torchvision", name, models)
    kind = library.models.get_model_builder(name).__module__
    options = {"weights_backbone": None} if ".detection." in kind or ".segmentation." in kind else {}
    model = library.models.get_model(name, weights=None, **options, **settings.changes)
    side = settings.image or 224
    shape = (3, 16, side, side) if ".video." in kind else (3, side, side)
    images = torch.randn(settings.batch, *shape)
    return ModelWithInputs(model, (list(images) if ".detection." in kind else images,))


_MODEL_BUILDERS: dict[str, Callable[[Any, str, Settings], ModelWithInputs]] = {
    "hf": _build_hf,
    "timm": _build_timm,
    "torchvision": _build_torchvision,
}
