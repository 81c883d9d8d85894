"""``--model hf:<model_type>``: an architecture of transformers with random weights, and an example of its batch.

Nothing is downloaded. The task is the one that the architecture is usually trained for and has a loss of its own: a
sequence-to-sequence model for an encoder with a decoder, a masked language model for an encoder, a causal one for a
decoder, else the classification of images. Sizes that ``--set`` does not give are the configuration's own, the length
of a row included, and what was chosen so is said. Dotted keys are of configurations in a configuration, as
``text_config.num_hidden_layers`` of a model for text and images.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Architecture", "architecture"]

ROWS = 4
"""Rows of an example batch without a given number of rows."""
USUAL_LENGTH = 1024
"""Tokens in a row of an architecture whose configuration names no length, such as Mamba, BLOOM or T5."""
USUAL_IMAGE_SIZE = 224
"""Pixels of an image's side where the configuration names none, such as ResNet's: that of ImageNet."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx")
"""Configuration values with the number of tokens of a row."""
PROBED_TOKENS = 8
"""Tokens of the shorter of two rows that detect whether a model processes tokens sequentially."""
MAX_SEQUENTIAL_OPERATORS = 20_000
"""Operators that such a model may run for a row: about a minute of capture."""
KEY_VALUE_HEADS = "num_key_value_heads"
"""Configuration value with the number of heads of keys and values, each of which several heads share."""
BATCH_SETTINGS = ("sequence_length", "seed")
"""Settings of ``--set`` besides the values of the configuration."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of transformers, configured.

    Attributes:
        name: the model type.
        config: of transformers.
        task: the class that makes the model, such as ``AutoModelForCausalLM``.
        inputs: what a row of a batch consists of besides its labels: ``tokens``, ``images``, or ``sound`` (a
            spectrogram, with tokens as labels).
        length: tokens in a row; None where a row is an image.
        seed: of weights and batch.
        assumptions: what was not given and how it was taken, in the user's words.
    """

    name: str
    config: Any
    task: Any
    inputs: str
    length: int | None
    seed: int
    assumptions: tuple[str, ...]

    def build(self) -> torch.nn.Module:
        """The model, with random weights."""
        model: torch.nn.Module = self.task.from_config(self.config)
        return model

    def fitted(self, model: torch.nn.Module, *, given: bool) -> Architecture:
        """With as many tokens in a row as the model's table of positions has room for.

        Some tables keep their first entries for padding: RoBERTa's of 512 has room for 510 tokens.

        Raises:
            UsageError: the length was *given*, and is longer.
        """
        room = _room_for_positions(model, self.config)
        if self.length is None or room is None or self.length <= room:
            return self
        if given:
            names = ", ".join(name for name in LENGTHS if getattr(_text(self.config), name, None))
            raise UsageError(
                f"--set sequence_length={self.length}: {self.name} with these settings has positions for {room} tokens"
                + (f"; give --set {names.split(', ')[0]}=... too" if names else "")
            )
        said = tuple(one for one in self.assumptions if not one.startswith(f"{self.length:,} tokens"))
        said += (_said_length(room, "the length of its table of positions"),)
        return replace(self, length=room, assumptions=said)

    def check_length(self, model: torch.nn.Module) -> None:
        """Refuse rows so long that the graph of a model on the meta device would be too large: of one whose code takes
        tokens one after the other, as Mamba's does where its kernels are not installed.

        Raises:
            UsageError: with the longest row that is captured.
        """
        if self.inputs == "images" or (self.length or 0) <= 2 * PROBED_TOKENS or not _has_counting_loop(model):
            return
        few, more = (
            _num_operators(model, replace(self, length=tokens).batch(model, 1))
            for tokens in (PROBED_TOKENS, 2 * PROBED_TOKENS)
        )
        each = (more - few) / PROBED_TOKENS
        if each * (self.length or 0) > MAX_SEQUENTIAL_OPERATORS:
            most = 1 << (int(MAX_SEQUENTIAL_OPERATORS / each).bit_length() - 1)
            raise UsageError(
                f"--model hf:{self.name} computes a row token by token, {each:g} operators for each, so that the "
                f"graph of {self.length:,} tokens a row is too large to capture; give --set sequence_length={most} or "
                "less, or write a file.py:callable whose model does otherwise"
            )

    def batch(self, model: torch.nn.Module, rows: int) -> dict[str, Any]:
        """An example of the global batch."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        if self.inputs == "images":
            height, width = _pair(_image_size(self.config) or USUAL_IMAGE_SIZE)
            pixels = torch.randn(rows, _channels(self.config), height, width, generator=generator)
            labels = torch.randint(self.config.num_labels, (rows,), generator=generator)
            return {"pixel_values": pixels, "labels": labels}
        tokens = torch.randint(_text(self.config).vocab_size, (rows, self.length or 1), generator=generator)
        if self.inputs == "sound":
            return {
                "input_features": torch.randn(*_sound_shape(self.config, rows), generator=generator),
                "labels": tokens,
            }
        name = getattr(model, "main_input_name", "input_ids")
        return {name: tokens, "labels": tokens.clone()}


def architecture(model_type: str, settings: Mapping[str, Any]) -> Architecture:
    """Configure an architecture.

    Args:
        model_type: as transformers names it.
        settings: values of its configuration, of configurations in it by dotted keys, and those of `BATCH_SETTINGS`.

    Raises:
        UsageError: transformers has no such type or no fitting task for it, or a setting is wrong.
    """
    try:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise UsageError(f"--model hf:{model_type} needs transformers: pip install transformers") from error
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"--model hf:{model_type}: transformers knows no such model type"
            f"{_suggestion(model_type, list(CONFIG_MAPPING))}"
        )
    for_config = {key: value for key, value in settings.items() if key not in BATCH_SETTINGS}
    length, seed = settings.get("sequence_length"), settings.get("seed", 0)
    for key, value, least in (("sequence_length", length, 1), ("seed", seed, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UsageError(f"--set {key}={value!r}: it must be a whole number, at least {least}")
    try:
        default = AutoConfig.for_model(model_type)
    except Exception as error:  # a configuration that is made of others has none by itself
        raise UsageError(
            f"--model hf:{model_type} has no configuration of its own ({type(error).__name__}: {error}); write a "
            "file.py:callable that returns (model, example_batch)"
        ) from error
    known = dict(_values_of(default))
    for key, value in for_config.items():
        if key not in known:
            raise UsageError(
                f"--set {key}: the configuration of {model_type} has no such value{_suggestion(key, sorted(known))}"
            )
        usual = known[key]
        counts = isinstance(usual, int) and usual > 0 and not key.endswith("_id")
        if counts and isinstance(value, int) and value < 0:
            raise UsageError(f"--set {key}={value!r}: it must be a whole number, at least 0")
    nested = _nested(for_config)
    try:
        config = AutoConfig.for_model(model_type, **nested)
    except Exception as error:
        raise UsageError(f"--model hf:{model_type} with these settings raised {_brief(error)}") from error
    task, inputs = _task(model_type, config)
    _with_one_class(config, task)
    _with_start_token(config)
    assumptions = list(_fitted_key_value_heads(config, default, for_config))
    if inputs == "images":
        if length is not None:
            raise UsageError(f"--set sequence_length={length}: a row of hf:{model_type} is an image; it has no tokens")
        assumptions += _assumed_image_size(config, for_config)
    elif length is None:
        length, said = _length(config)
        assumptions.append(said)
    return Architecture(
        name=model_type,
        config=config,
        task=task,
        inputs=inputs,
        length=length,
        seed=seed,
        assumptions=tuple(assumptions),
    )


def _values_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration, and under dotted keys those of configurations in it."""
    for name in {*config.to_dict(), *config.attribute_map}:
        value = getattr(config, name, None)
        yield prefix + name, value
        if hasattr(value, "attribute_map"):
            yield from _values_of(value, f"{prefix}{name}.")


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of dotted keys in dicts, as configurations take them.

    Raises:
        UsageError: a key is of something that another one has no parts of.
    """
    found: dict[str, Any] = {}
    for key, value in sorted(settings.items()):  # a whole before its parts
        *parts, name = key.split(".")
        inside = found
        for part in parts:
            given = inside.get(part, {})
            if not isinstance(given, dict):
                raise UsageError(f"--set {key}: {part} is {given!r}, which has no {name}")
            inside[part] = inside = dict(given)
        inside[name] = value
    return found


def _key(config: Any, part: Any, name: str) -> str:
    """The key of a value in *part* of a configuration."""
    if hasattr(config, name):
        return name
    return next((f"{own}.{name}" for own, value in vars(config).items() if value is part), name)


def _task(model_type: str, config: Any) -> tuple[Any, str]:
    """The class that makes the model, and what its rows are."""
    import transformers

    sequences = [(transformers.AutoModelForSeq2SeqLM, "tokens"), (transformers.AutoModelForSpeechSeq2Seq, "sound")]
    tasks = [
        *(sequences if getattr(config, "is_encoder_decoder", False) else []),
        (transformers.AutoModelForMaskedLM, "tokens"),
        (transformers.AutoModelForCausalLM, "tokens"),
        *sequences,
        (transformers.AutoModelForImageClassification, "images"),
    ]
    for task, inputs in tasks:
        if type(config) in task._model_mapping:
            return task, inputs
    raise UsageError(
        f"--model hf:{model_type} has no language-model, speech or image-classification head; write a "
        "file.py:callable that returns (model, example_batch)"
    )


def _with_one_class(config: Any, task: Any) -> None:
    """Name the first class of a task that has several for an architecture, such as DeiT's with and without a teacher,
    where the configuration names none: transformers looks for it there."""
    classes = task._model_mapping[type(config)]
    if isinstance(classes, (list, tuple)) and not config.architectures:
        config.architectures = [classes[0].__name__]


def _with_start_token(config: Any) -> None:
    """Give a decoder the token that it starts with, where the bare configuration has none: padding, as T5 has it."""
    parts = [config, *filter(None, [getattr(config, "decoder", None)])]
    for part in parts if getattr(config, "is_encoder_decoder", False) else []:
        if not hasattr(part, "pad_token_id"):
            continue
        if part.pad_token_id is None:
            part.pad_token_id = 0
        if getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = part.pad_token_id


def _fitted_key_value_heads(config: Any, default: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    """Set a number of key and value heads that divides the heads, if only the heads were given: as many heads share
    one as by *default*, or each has its own where the configuration has no number.

    Raises:
        UsageError: both were given, and do not divide.
    """
    text = _text(config)
    if getattr(text, KEY_VALUE_HEADS, 0) is None:  # as many as heads, which Nemotron's model does not know
        setattr(text, KEY_VALUE_HEADS, getattr(text, "num_attention_heads", None))
    heads, pairs = _heads(config)
    usual, usual_pairs = _heads(default)
    if heads % pairs == 0 or usual % usual_pairs:  # or it has another meaning
        return
    key = _key(config, text, KEY_VALUE_HEADS)
    if key in settings:
        raise UsageError(
            f"--set {key}={pairs}: {heads} attention heads cannot share them evenly; give a divisor of {heads}"
        )
    shared = usual // usual_pairs
    pairs = heads // shared if heads % shared == 0 else heads
    setattr(text, KEY_VALUE_HEADS, pairs)
    yield f"{pairs} heads of keys and values for {heads} attention heads; --set {key}=N changes it"


def _heads(config: Any) -> tuple[int, int]:
    """Attention heads, and heads of keys and values; (1, 1) where they are not numbers."""
    heads, pairs = (getattr(_text(config), name, None) for name in ("num_attention_heads", KEY_VALUE_HEADS))
    return (heads, pairs) if isinstance(heads, int) and isinstance(pairs, int) and pairs > 0 else (1, 1)


def _length(config: Any) -> tuple[int, str]:
    """Tokens in a row by the configuration, and where that is from."""
    text = _text(config)
    for name in LENGTHS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value, _said_length(value, f"the configuration's {name}")
    return USUAL_LENGTH, _said_length(USUAL_LENGTH, "since the configuration names no length")


def _said_length(length: int, why: str) -> str:
    return f"{length:,} tokens a row, {why}; --set sequence_length=N changes it"


def _assumed_image_size(config: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    size = _image_size(config)
    part = next((part for part in _parts(config) if getattr(part, "image_size", None) is not None), config)
    if (key := _key(config, part, "image_size")) not in settings:
        height, width = _pair(size or USUAL_IMAGE_SIZE)
        if size is None:
            yield f"images of {height} x {width}, as of ImageNet, since the configuration names no size"
        else:
            yield f"images of {height} x {width}, the configuration's image_size; --set {key}=N changes it"


def _parts(config: Any) -> list[Any]:
    """The configuration, and those inside of it of which the vision model's."""
    vision = getattr(config, "vision_config", None)
    return [config] if vision is None else [config, vision]


def _image_size(config: Any) -> Any:
    return next((size for part in _parts(config) if (size := getattr(part, "image_size", None)) is not None), None)


def _channels(config: Any) -> int:
    found = next((count for part in _parts(config) if (count := getattr(part, "num_channels", None)) is not None), 3)
    return int(found)


def _sound_shape(config: Any, rows: int) -> tuple[int, int, int]:
    """Shape of a spectrogram; Whisper has its frequencies first and halves its time, others have them last."""
    frames = 2 * config.max_source_positions
    if hasattr(config, "num_mel_bins"):
        return rows, config.num_mel_bins, frames
    return rows, frames, config.input_feat_per_channel


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return int(height), int(width)


def _text(config: Any) -> Any:
    """The part of the configuration for text; of an encoder and decoder the decoder's, or all."""
    return config.get_text_config()


def _has_counting_loop(model: Any) -> bool:
    """Whether the file of the model's class has a loop over a range: without one nothing is taken in turn."""
    file = inspect.getsourcefile(type(model))
    return (
        file is not None and re.search(r"^\s*for \w+ in range\(.*\):", Path(file).read_text("utf-8"), re.M) is not None
    )


def _num_operators(model: Any, batch: Mapping[str, Any]) -> int:
    """Operators that a forward runs; 0 where that depends on values, which there are none of."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    try:
        with torch.no_grad(), Counting() as counting:
            model(**{name: value.to("meta") for name, value in batch.items()})
    except Exception:  # whatever it is, capturing says it better
        return 0
    return counting.calls


def _room_for_positions(model: Any, config: Any) -> int | None:
    """Tokens for which the model's smallest table of learned or fixed positions has room; None: it has none.

    A table of positions is an embedding with as many entries as the configuration says, or some more for padding.
    """
    import torch

    words = _text(config).vocab_size if hasattr(_text(config), "vocab_size") else None
    given = {value for name in LENGTHS if isinstance(value := getattr(_text(config), name, None), int) and value > 0}
    found = []
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding) or module.num_embeddings == words:
            continue
        for length in given:
            extra = module.num_embeddings - length
            if 0 <= extra <= 2 + (module.padding_idx or 0):
                reserved = 0 if module.padding_idx is None else module.padding_idx + 1
                found.append(module.num_embeddings - max(extra, reserved))
    return min(found, default=None)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _suggestion(word: str, words: list[str]) -> str:
    inside = [one for one in words if one.endswith(f".{word}")]
    close = inside or difflib.get_close_matches(word, words, n=1) or difflib.get_close_matches(word.lower(), words, n=1)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
