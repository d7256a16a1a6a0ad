"""A model's files, opened: its spec, its tokenizer and chat template, its weights as raw tensors.

This is the face of everything that reads checkpoints; the engine and `models/` import from here. Opening
reads headers only, and checks that every weight of the model is there, has its shape, and that none is left
over; the bytes are read when a tensor is used.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aioengine.config import ModelConfig
from aioengine.dummy import BUILTIN_SHAPES, DTYPE_KINDS, SHAPE_PREFIX, DummyTensor, dummy_tensors
from aioengine.errors import ModelLoadError
from aioengine.generation_defaults import gguf_defaults, hf_defaults
from aioengine.gguf import gguf_chat_templates, gguf_spec, gguf_tensors, gguf_tokenizer
from aioengine.gguf_format import read_gguf_file
from aioengine.hf_config import read_chat_templates, read_spec
from aioengine.model_source import ModelFiles, resolve_model
from aioengine.model_spec import (
    SUPPORTED_ARCHITECTURES,
    GgufTokenizer,
    HfTokenizerFiles,
    ModelDtype,
    ModelSpec,
    TokenizerSource,
    tensor_shapes,
)
from aioengine.raw_tensor import TENSOR_KINDS, RawTensor, TensorKind
from aioengine.safetensors_reader import read_safetensors

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "TENSOR_KINDS",
    "Checkpoint",
    "DummyTensor",
    "GgufTokenizer",
    "HfTokenizerFiles",
    "ModelFiles",
    "ModelSpec",
    "RawTensor",
    "TensorKind",
    "TokenizerSource",
    "load_checkpoint",
    "open_checkpoint",
    "tensor_shapes",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MAX_NAMED = 5
"""Tensors that an error names one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model. Its memory maps live as long as any of its tensors or arrays over them."""

    config: ModelSpec
    files: ModelFiles
    generation_defaults: Mapping[str, float]
    """Sampling defaults of the model by their `SamplingParams` names; empty if they are not to be used."""
    chat_templates: Mapping[str, str]
    """Jinja templates by name; most models have one, "default"."""
    tokenizer_source: TokenizerSource
    raw_tensors: Mapping[str, RawTensor]

    @property
    def chat_template(self) -> str | None:
        """The model's main chat template."""
        return self.chat_templates.get("default")

    def tensors(self) -> Mapping[str, RawTensor]:
        """All weights by Hugging Face name: exactly the names of `tensor_shapes(config)`."""
        return self.raw_tensors

    def weights(self) -> Iterator[tuple[str, RawTensor]]:
        """All weights, in the order of the layers."""
        return iter(self.raw_tensors.items())

    def require(self, names: Iterable[str]) -> dict[str, RawTensor]:
        """These weights.

        Raises:
            ModelLoadError: some do not exist; all of them are named.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self.raw_tensors]
        if missing:
            raise ModelLoadError(f"{self.files.name} lacks {_named(missing)}")
        return {name: self.raw_tensors[name] for name in wanted}

    def leftover(self, taken: Iterable[str]) -> list[str]:
        """The weights that are not among those taken; a model that ignores one computes something else."""
        known = set(taken)
        return [name for name in self.raw_tensors if name not in known]


def load_checkpoint(config: ModelConfig, progress: bool = True) -> Checkpoint:
    """Finds, fetches and opens the configured model. Blocks: call it in a thread.

    Raises:
        ModelNotFound: the name leads to no files.
        ModelLoadError: the files are broken, incomplete or of an unsupported kind.
        InvalidConfig: an option does not fit the kind of model.
    """
    return open_checkpoint(resolve_model(config, progress), config)


def open_checkpoint(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    """Opens files that `resolve_model` found.

    Raises:
        ModelLoadError: they are broken, incomplete or of an unsupported kind.
    """
    if files.format == "gguf":
        checkpoint = _open_gguf(files, config)
    elif files.format == "hf":
        checkpoint = _open_folder(files, config)
    else:
        checkpoint = _open_shape(files, config)
    if config.generation_config == "neutral":
        checkpoint = dataclasses.replace(checkpoint, generation_defaults={})
    if files.tokenizer is not None:
        checkpoint = _with_tokenizer_of(checkpoint, files)
    return checkpoint


def _open_gguf(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    assert files.path is not None
    file = read_gguf_file(files.path)
    tokenizer = gguf_tokenizer(file)
    spec = gguf_spec(file, files.name, tokenizer)
    if config.load_format == "dummy":
        tensors = dummy_tensors(spec, config.seed)
    else:
        tensors = _complete(files, spec, gguf_tensors(file, spec))
    return Checkpoint(
        config=spec,
        files=files,
        generation_defaults=gguf_defaults(file.metadata),
        chat_templates=gguf_chat_templates(file),
        tokenizer_source=tokenizer,
        raw_tensors=tensors,
    )


def _open_folder(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    assert files.path is not None
    if config.load_format == "dummy":
        spec = read_spec(files.path, files.name, stored_dtype="float32")
        tensors = dummy_tensors(spec, config.seed)
    else:
        stored = read_safetensors(files.path)
        spec = read_spec(files.path, files.name, stored_dtype=_stored_dtype(stored))
        if spec.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        tensors = _complete(files, spec, stored)
    has_tokenizer = any((files.path / name).exists() for name in _TOKENIZER_FILES)
    return Checkpoint(
        config=spec,
        files=files,
        generation_defaults=hf_defaults(files.path),
        chat_templates=read_chat_templates(files.path),
        tokenizer_source=HfTokenizerFiles(files.path) if has_tokenizer else None,
        raw_tensors=tensors,
    )


def _open_shape(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    spec = dataclasses.replace(BUILTIN_SHAPES[files.name.removeprefix(SHAPE_PREFIX)], name=files.name)
    return Checkpoint(
        config=spec,
        files=files,
        generation_defaults={},
        chat_templates={},
        tokenizer_source=None,
        raw_tensors=dummy_tensors(spec, config.seed),
    )


def _with_tokenizer_of(checkpoint: Checkpoint, files: ModelFiles) -> Checkpoint:
    """The checkpoint with another tokenizer, and with that one's chat templates if it has any."""
    assert files.tokenizer is not None
    source: TokenizerSource
    if files.tokenizer.is_dir():
        source = HfTokenizerFiles(files.tokenizer)
        templates = read_chat_templates(files.tokenizer)
    else:
        file = read_gguf_file(files.tokenizer)
        source = gguf_tokenizer(file)
        templates = gguf_chat_templates(file)
    return dataclasses.replace(
        checkpoint, tokenizer_source=source, chat_templates=templates or checkpoint.chat_templates
    )


def _stored_dtype(tensors: Mapping[str, RawTensor]) -> ModelDtype:
    """The float type that most of the weights have."""
    counts = Counter(tensor.kind for tensor in tensors.values())
    return max(DTYPE_KINDS, key=lambda dtype: counts[DTYPE_KINDS[dtype]])


def _complete(files: ModelFiles, spec: ModelSpec, stored: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The stored weights in the order of the layers, if they are exactly the model's."""
    shapes = tensor_shapes(spec)
    missing = [name for name in shapes if name not in stored]
    left_over = [name for name in stored if name not in shapes]
    if missing:
        unknown = f"; it holds {_named(left_over)} instead" if left_over else ""
        raise ModelLoadError(f"{files.path} lacks {_named(missing)}{unknown}")
    if left_over:
        raise ModelLoadError(
            f"{files.path} holds {_named(left_over)}, which {spec.architecture} has no use for; "
            "ignoring weights would change the output"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ModelLoadError(f"{files.path}: {name} has the shape {stored[name].shape}, not {shape} as configured")
    return {name: stored[name] for name in shapes}


def _named(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{rest}"
