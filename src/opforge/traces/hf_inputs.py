"""Inputs for any transformers architecture, from its ``forward`` arguments and configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from opforge.traces.targets import Settings

FollowUp = Callable[[Any, Any], Any]
"""Calls a model again, with the result of the previous call."""

_AUDIO_SAMPLES = 16000
"""Audio samples: one second."""
_GENERATING_CLASSES = ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration", "ForSpeechSeq2Seq")
_CLASSIFYING_CLASSES = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification")


def make_inputs(model: Any, config: Any, settings: Settings) -> tuple[dict[str, Any], FollowUp | None]:
    """Return a model's inputs by name, and a follow-up call or None.

    The follow-up call passes a single token, if the model caches the first call.
    """
    settings = replace(settings, seq=_sequence_length(config, settings.seq))
    arguments = _inputs(model, config, settings)
    generates = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    if settings.train or not generates or "past_key_values" not in _names(model):
        return arguments, None
    token = torch.randint(0, _vocabulary_size(config), (settings.batch, 1))

    def follow(model: Any, last: Any) -> Any:
        return model(input_ids=token, past_key_values=last.past_key_values, use_cache=True)

    return {**arguments, "use_cache": True}, follow


def _names(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _inputs(model: Any, config: Any, settings: Settings) -> dict[str, Any]:
    names = _names(model)
    arguments: dict[str, Any] = {}
    ids = torch.randint(0, _vocabulary_size(config), (settings.batch, settings.seq)) if "input_ids" in names else None
    if ids is not None:
        arguments["input_ids"] = ids
    if "attention_mask" in names and ids is not None:
        arguments["attention_mask"] = torch.ones_like(ids)
    if "pixel_values" in names:
        arguments["pixel_values"] = torch.randn(settings.batch, *_image_shape(config, settings))
    if "input_values" in names:
        arguments["input_values"] = torch.randn(settings.batch, *_audio_shape(config))
    if "input_features" in names:
        arguments["input_features"] = torch.randn(settings.batch, *_feature_shape(config, settings))
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = torch.randint(0, _vocabulary_size(config), (settings.batch, settings.seq))
    if "return_loss" in names:
        arguments["return_loss"] = settings.train
    if settings.train and "labels" in names and (labels := _labels(model, config, arguments, settings)) is not None:
        arguments["labels"] = labels
    return arguments


def _sequence_length(config: Any, wanted: int) -> int:
    """Return the input length: at most the positions, less one for a token that follows."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return min(wanted, positions - 1) if isinstance(positions, int) and positions > 1 else wanted


def _vocabulary_size(config: Any) -> int:
    """Return the vocabulary size, of the text part if a configuration has parts."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(part, "vocab_size", None) for part in (text, config)]
    return next((int(size) for size in sizes if size), 2)


def _config_value(config: Any, name: str, default: Any) -> Any:
    """Return a setting of a configuration, or of its image part."""
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _image_shape(config: Any, settings: Settings) -> tuple[int, ...]:
    side = settings.image or _config_value(config, "image_size", 224)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = _config_value(config, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    return (channels, height, width) if frames is None else (frames, channels, height, width)


def _audio_shape(config: Any) -> tuple[int, ...]:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram, as an image
        return (config.max_length, config.num_mel_bins)
    return (1, _AUDIO_SAMPLES) if hasattr(config, "audio_channels") else (_AUDIO_SAMPLES,)


def _feature_shape(config: Any, settings: Settings) -> tuple[int, ...]:
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return (config.num_mel_bins, 2 * config.max_source_positions)
    names = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
    width: int = next((getattr(config, name) for name in names if getattr(config, name, None)), 80)
    return (settings.seq, width)


def _labels(model: Any, config: Any, arguments: Mapping[str, Any], settings: Settings) -> torch.Tensor | None:
    kind = type(model).__name__
    if any(word in kind for word in _CLASSIFYING_CLASSES):
        return torch.randint(0, config.num_labels, (settings.batch,))
    if "TokenClassification" in kind:
        return torch.randint(0, config.num_labels, (settings.batch, settings.seq))
    if any(word in kind for word in _GENERATING_CLASSES):
        target_ids = arguments.get("decoder_input_ids", arguments.get("input_ids"))
        return None if target_ids is None else target_ids.clone()
    if kind.endswith("CTC"):
        return torch.randint(1, _vocabulary_size(config), (settings.batch, 8))
    return None
