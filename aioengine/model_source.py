"""From the name of a model to files on this machine: a path, a Hugging Face id, or a built-in name.

Only finds and fetches; what the files hold is `checkpoint.py`'s business. All functions block (network,
disk): the engine calls them in a thread.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
import huggingface_hub.constants
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from aioengine.builtin_models import BUILTIN_MODELS, fetch_builtin
from aioengine.config import ModelConfig, cache_home
from aioengine.dummy import BUILTIN_SHAPES, SHAPE_PREFIX
from aioengine.errors import InvalidConfig, ModelNotFound
from aioengine.gguf_format import MAGIC

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(.+\.gguf)")

_TOKENIZER_PATTERNS = [
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
]
_CONFIG_PATTERNS = ["generation_config.json", *_TOKENIZER_PATTERNS]
_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json", *_CONFIG_PATTERNS]
_UNWANTED_PATTERNS = ["*/*.safetensors", "*/*.json", "consolidated*"]
"""Copies of the weights in other layouts that some repositories hold beside the ones we read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files are."""

    name: str
    """The model as the user named it."""
    format: Literal["hf", "gguf", "shape"]
    """A Hugging Face folder, one GGUF file, or a built-in shape without files."""
    path: Path | None
    """The folder or the file; None for a shape."""
    tokenizer: Path | None = None
    """Folder or GGUF file of the tokenizer, if it is not the model's own."""


def resolve_model(
    config: ModelConfig, progress: bool = True, on_fetch: Callable[[str], None] = lambda _: None
) -> ModelFiles:
    """Finds the files of the configured model and fetches what is not there.

    Args:
        progress: shows bars on stderr if that is a terminal.
        on_fetch: told what is about to be fetched for the first time, how much that is, and where it goes.

    Raises:
        ModelNotFound: the name leads nowhere, or the files cannot be fetched.
        ModelLoadError: a fetched file is not the expected one.
        InvalidConfig: an option does not fit the kind of model.
    """
    name = config.model
    is_dummy = config.load_format == "dummy"
    is_remote = False
    if name.startswith(SHAPE_PREFIX):
        files = _builtin_shape(name, is_dummy)
    elif name in BUILTIN_MODELS:
        path = fetch_builtin(name, cache_home() / "models", progress=progress, on_fetch=on_fetch)
        files = ModelFiles(name=name, format="gguf", path=path)
    else:
        patterns = _CONFIG_PATTERNS if is_dummy else _WEIGHT_PATTERNS
        local = _local(name)
        is_remote = local is None
        path = local or _from_hub(name, config.revision, patterns, on_fetch)
        files = ModelFiles(name=name, format="hf" if path.is_dir() else "gguf", path=path)
        if path.is_dir():
            _check_model_folder(name, path)
    if config.revision is not None and not is_remote:
        raise InvalidConfig(f"revision={config.revision!r} needs a Hugging Face id, not {name}", param="revision")
    if config.load_format == ("safetensors" if files.format == "gguf" else "gguf"):
        kind = "one GGUF file" if files.format == "gguf" else "a Hugging Face folder"
        raise InvalidConfig(f"load_format={config.load_format}, but {name} is {kind}", param="load_format")
    if config.tokenizer is None:
        return files
    return ModelFiles(
        name=files.name, format=files.format, path=files.path, tokenizer=_tokenizer(config.tokenizer, on_fetch)
    )


def _builtin_shape(name: str, is_dummy: bool) -> ModelFiles:
    shape = name.removeprefix(SHAPE_PREFIX)
    if shape not in BUILTIN_SHAPES:
        known = ", ".join(SHAPE_PREFIX + known for known in BUILTIN_SHAPES)
        raise ModelNotFound(f"there is no built-in shape {name}{_did_you_mean(name, _names())}; there are {known}")
    if not is_dummy:
        raise InvalidConfig(f"{name} has no weights; add --load-format dummy", param="load_format")
    return ModelFiles(name=name, format="shape", path=None)


def _tokenizer(name: str, on_fetch: Callable[[str], None]) -> Path:
    if name in BUILTIN_MODELS:
        return fetch_builtin(name, cache_home() / "models", progress=False, on_fetch=on_fetch)
    return _local(name) or _from_hub(name, None, _TOKENIZER_PATTERNS, on_fetch)


def _names() -> list[str]:
    return [*BUILTIN_MODELS, *(SHAPE_PREFIX + shape for shape in BUILTIN_SHAPES)]


def _local(name: str) -> Path | None:
    """The folder or GGUF file at this path, or None if nothing is there."""
    path = Path(name).expanduser()
    try:
        if not name or not path.exists():
            return None
        if path.is_dir() or path.suffix == ".gguf" or _begins_like_gguf(path):
            return path
    except OSError as error:
        raise ModelNotFound(f"cannot read {name}: {error.strerror or error}") from None
    raise ModelNotFound(f"{name} is neither a folder nor a GGUF file; give the folder that holds config.json")


def _begins_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _check_model_folder(name: str, folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        names = ", ".join(str(path) for path in ggufs[:3])
        raise ModelNotFound(f"{name} has no config.json; for a GGUF file give its path: {names}")
    raise ModelNotFound(
        f"{name} has no config.json, so it is no Hugging Face model; "
        "a GGUF file on the Hub is named OWNER/REPOSITORY/FILE.gguf"
    )


def _from_hub(name: str, revision: str | None, patterns: list[str], on_fetch: Callable[[str], None]) -> Path:
    gguf = _HUB_GGUF.fullmatch(name)
    builtin_hint = _did_you_mean(name, _names())
    hint = builtin_hint or _near_path(name)
    looks_like_path = name.startswith(("/", ".", "~")) or (name.endswith(".gguf") and not gguf)
    if looks_like_path or builtin_hint or not (gguf or _HUB_ID.fullmatch(name)):
        kinds = "a folder, a GGUF file, a Hugging Face id or a built-in name"
        raise ModelNotFound(f"there is no model {name!r}{hint}; give {kinds} ({', '.join(BUILTIN_MODELS)})")
    try:
        if gguf:
            _announce(gguf[1], revision, [gguf[2]], on_fetch)
            return Path(huggingface_hub.hf_hub_download(gguf[1], gguf[2], revision=revision))
        _announce(name, revision, patterns, on_fetch)
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED_PATTERNS
            )
        )
    # The library lets errors of its transport through, and which one that is depends on its version.
    except Exception as error:
        raise ModelNotFound(_hub_problem(name, revision, error) + hint) from error


def _announce(repository: str, revision: str | None, patterns: list[str], on_fetch: Callable[[str], None]) -> None:
    """Says what of a repository will be fetched, if none of it is here: nobody should wait for gigabytes unawares."""
    cache = huggingface_hub.constants.HF_HUB_CACHE
    folder = Path(cache) / huggingface_hub.constants.REPO_ID_SEPARATOR.join(["models", *repository.split("/")])
    if any(path for pattern in patterns for path in folder.glob(f"snapshots/*/{pattern}")):
        return
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception:  # whoever fetches meets the same problem, and says so
        return
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = [*filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=_UNWANTED_PATTERNS)]
    files = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
    amount = f"{files}, {sum(sizes[file] for file in wanted) / 1e6:,.0f} MB"
    on_fetch(f"fetching {repository} from Hugging Face ({amount}) to {cache}")


def _hub_problem(name: str, revision: str | None, error: Exception) -> str:
    """One sentence for an error of the Hub client, told by the names of its classes."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    at = f" at revision {revision}" if revision else ""
    if "GatedRepoError" in kinds:
        return f"access to {name} on Hugging Face must be granted first: accept its terms and set HF_TOKEN"
    if "RepositoryNotFoundError" in kinds:
        return f"{name} is neither a local path nor a model on Hugging Face (private ones need HF_TOKEN)"
    if "RevisionNotFoundError" in kinds:
        return f"{name} on Hugging Face has no revision {revision}"
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds:
        return (
            f"{name}{at} is neither a local path nor cached, and Hugging Face cannot be reached; "
            "check the network, or give a local folder or GGUF file"
        )
    if "EntryNotFoundError" in kinds:
        return f"the repository of {name}{at} on Hugging Face has no such file"
    first_line = next(iter(str(error).splitlines()), "")
    return f"{name}{at} could not be fetched from Hugging Face ({type(error).__name__}: {first_line})"


def _did_you_mean(name: str, known: list[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""


def _near_path(name: str) -> str:
    """A hint at an entry of the same folder with nearly this name."""
    path = Path(name).expanduser()
    try:
        siblings = [str(Path(name).parent / entry.name) for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return _did_you_mean(name, siblings)
