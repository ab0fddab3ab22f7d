"""Models of the transformers library from a configuration: random weights, offline, with a matching batch."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from explorer.engine.device.memory_limit import available_bytes
from explorer.engine.device.without_data import is_without_data
from explorer.errors import ModelNotLoaded, nearest
from explorer.plan.catalogue import HUGGING_FACE

AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
"""Heads in the order of trial. The first head that supports the configuration is used."""


def factory(config: str) -> Callable[..., object]:
    """A factory for a configuration class (`GPT2Config`) or a local config.json. Raises ModelNotLoaded."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelNotLoaded(
            f"hf:{config} needs the library transformers, which is not installed.", hint="pip install transformers"
        ) from error

    def build(
        *, batch: int = HUGGING_FACE["batch"], length: int = HUGGING_FACE["length"], **arguments: object
    ) -> object:
        """`batch` and `length` shape the example batch; all others go to the configuration."""
        settings = _settings(transformers, config, arguments)
        settings.use_cache = False
        if getattr(settings, "is_encoder_decoder", False) and getattr(settings, "decoder_start_token_id", None) is None:
            settings.decoder_start_token_id = 0
        heads = getattr(settings, "architectures", None) or [""]
        if heads[0].endswith("ForSequenceClassification") and getattr(settings, "pad_token_id", None) is None:
            settings.pad_token_id = 0  # such a head refuses a batch of several texts without one
        if not is_without_data():
            _refuse_too_big(transformers, config, settings)
        model = _model(transformers, settings)
        model.train()
        return model, _batch(model, settings, batch=batch, length=length)

    return build


def _settings(transformers: Any, config: str, arguments: dict[str, object]) -> Any:
    path = Path(config)
    if path.suffix == ".json" or path.is_dir():
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file() and not path.is_file():
            raise ModelNotLoaded(f"There is no configuration {config}.")
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, **arguments)
    if "/" in config:
        return _of_hub(transformers, config, arguments)
    kind = getattr(transformers, config, None)
    if kind is None or not hasattr(kind, "model_type"):
        names = [name for name in dir(transformers) if name.endswith("Config")]
        raise ModelNotLoaded(f"transformers has no configuration {config!r}.", hint=nearest(config, names))
    return kind(**arguments)


def _of_hub(transformers: Any, name: str, arguments: dict[str, object]) -> Any:
    """The configuration of a model on the hub: from the cache, else downloaded. Weights and code are never loaded."""
    for is_cached in (True, False):
        try:
            return transformers.AutoConfig.from_pretrained(name, local_files_only=is_cached, **arguments)
        except OSError as error:
            trouble = error
    raise ModelNotLoaded(
        f"The configuration of {name} is neither a folder here nor in the cache of transformers, and the hub did not "
        "give it.",
        hint=f"Check the name, or download it where there is a network: hf download {name} config.json",
    ) from trouble


def _refuse_too_big(transformers: object, config: str, settings: object) -> None:
    """Raises ModelNotLoaded for parameters beyond the free memory: a class's defaults can mean seven billion."""
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            empty = _model(transformers, settings)
    except ModelNotLoaded:
        raise
    except Exception:
        return  # some models compute in their constructor: only a real build tells their size
    free_bytes = available_bytes()
    n_bytes = sum(parameter.nbytes for parameter in empty.parameters())
    if free_bytes is not None and n_bytes > free_bytes:
        raise ModelNotLoaded(
            f"hf:{config} has {n_bytes / 2**30:.1f} GiB of parameters; {free_bytes / 2**30:.1f} GiB are free.",
            hint="Make it smaller by arguments of the configuration, such as num_hidden_layers=2 hidden_size=256; "
            "--predict, on the page predict in Options, predicts it without memory.",
        )


def _model(transformers: object, settings: Any) -> Any:
    """The model of the class that the configuration names, else with the first head of AUTO that fits."""
    names = getattr(settings, "architectures", None)
    if names:
        kind = getattr(transformers, names[0], None)
        if kind is None or not hasattr(kind, "_from_config"):
            raise ModelNotLoaded(
                f"The configuration names the class {names[0]}, which transformers "
                f"{getattr(transformers, '__version__', '')} does not have.",
                hint="Install the release that has it, or leave `architectures` out to get the usual head.",
            )
        return kind._from_config(settings)
    if getattr(settings, "architectures", None) is None:  # read by transformers if heads share a configuration
        settings.architectures = []
    for name in AUTO:
        auto = getattr(transformers, name)
        if type(settings) in auto._model_mapping:
            return auto.from_config(settings)
    raise ModelNotLoaded(f"transformers has no model for {type(settings).__name__}.")


def _batch(model: Any, settings: object, *, batch: int, length: int) -> dict[str, torch.Tensor]:
    """A batch by the name of the model's main input: pictures, sound, a spectrogram, a number series, else words."""
    main = getattr(model, "main_input_name", "input_ids")
    parameters = inspect.signature(model.forward).parameters
    labels = None  # labels of sounds and series differ from head to head
    n_labels = max(1, getattr(settings, "num_labels", 2))
    if main == "pixel_values":
        labels = torch.randint(0, n_labels, (batch,))
        inputs = {main: _pictures(settings, batch)}
    elif main in ("input_values", "input_features"):
        inputs = {main: _sound(settings, batch, length)}
    elif main == "past_values":
        n_points, n_channels = getattr(settings, "context_length", length), getattr(settings, "num_input_channels", 1)
        inputs = {main: torch.randn(batch, n_points, n_channels)}
    else:
        inputs = {"input_ids": _words(settings, batch, length)}
        labels = _labels_of_words(type(model).__name__, inputs["input_ids"], n_labels)
        if "pixel_values" in parameters and hasattr(settings, "vision_config"):
            inputs["pixel_values"] = _pictures(settings, batch)
    if "return_loss" in parameters:  # CLIP and its like
        inputs["return_loss"] = True  # type: ignore[assignment]
    if "bool_masked_pos" in parameters and isinstance(getattr(settings, "patch_size", None), int):
        n_patches = (inputs[main].shape[-1] // settings.patch_size) ** 2  # type: ignore[attr-defined]
        inputs["bool_masked_pos"] = torch.randint(0, 2, (batch, n_patches)).bool()
    for name in ("start_positions", "end_positions"):
        if name in parameters:
            inputs[name] = torch.randint(0, inputs[main].shape[1], (batch,))
    return inputs if labels is None or "labels" not in parameters else {**inputs, "labels": labels}


def _labels_of_words(kind: str, words: torch.Tensor, n_labels: int) -> torch.Tensor:
    """A class for each text or each word where the head says so, else the words themselves."""
    if kind.endswith("ForTokenClassification"):
        return torch.randint(0, n_labels, words.shape)
    if kind.endswith(("ForSequenceClassification", "ForNextSentencePrediction")):
        return torch.randint(0, n_labels, words.shape[:1])
    return words.clone()


def _words(settings: Any, batch: int, length: int) -> torch.Tensor:
    text = settings.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or length
    return torch.randint(0, text.vocab_size, (batch, min(length, longest) if longest > 0 else length))


def _pictures(settings: object, batch: int) -> torch.Tensor:
    vision = getattr(settings, "vision_config", settings)
    side = getattr(vision, "image_size", None) or 64
    height, width = side if isinstance(side, (tuple, list)) else (side, side)
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width)


def _sound(settings: object, batch: int, length: int) -> torch.Tensor:
    """A spectrogram if the configuration has mel bands, else a wave that is long enough for the strides."""
    bands = getattr(settings, "num_mel_bins", None)
    if bands is None:
        return torch.randn(batch, 100 * length)
    if (frames := getattr(settings, "max_length", None)) and getattr(settings, "frequency_stride", None):
        return torch.randn(batch, frames, bands)
    return torch.randn(batch, bands, 2 * getattr(settings, "max_source_positions", length))
