"""What can be refused before anything is fetched or loaded: options that contradict each other or the machine.

`aioengine serve` asks before torch is imported, `startup.py` when it is known whether there is a GPU. What depends on
the model is checked as soon as its headers are read.
"""

from __future__ import annotations

from pathlib import Path

from aioengine.chat import compile_template
from aioengine.config import EngineConfig, ModelConfig, resolve
from aioengine.errors import InvalidConfig, ModelLoadError
from aioengine.kv_events import KVEvents


def check_options(config: EngineConfig, *, cuda_available: bool | None) -> None:
    """Refuses options that no model could be run with.

    Args:
        cuda_available: None if that is not known yet; then only what neither device could do is refused.

    Raises:
        InvalidConfig: naming the option.
    """
    KVEvents.wanted(config.cache)
    read_chat_template(config.model)
    has_gpu = {"cpu": (False,), "cuda": (True,), "auto": (False, True)}[config.runtime.device]
    refusals = []
    for available in has_gpu if cuda_available is None else (cuda_available,):
        try:
            # A window of the length asked for, or of one token, is in the way of no other option.
            window = config.model.max_model_len or 1
            resolve(config, model_max_len=window, model_dtype="bfloat16", cuda_available=available, num_cores=1)
        except InvalidConfig as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def read_chat_template(config: ModelConfig) -> str | None:
    """The template of --chat-template; None if the model's own is to be used.

    Raises:
        InvalidConfig: it cannot be read, or is no template.
    """
    if config.chat_template is None:
        return None
    path = Path(config.chat_template)
    try:
        template = path.read_text(encoding="utf-8")
        compile_template(template)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read the chat template {path}: {error}", param="chat_template") from None
    except ModelLoadError as error:
        raise InvalidConfig(f"{path}: {error}", param="chat_template") from None
    return template
