"""Every error that aioengine raises on purpose.

A caller catches `EngineError` for all of them. `InvalidRequest` and its children blame the request and
leave the engine untouched; `EngineDead` means that no request can be served any more. The HTTP status of
each class lives in `api/errors.py`, not here.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of this package. `param` names the offending field, if one is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidConfig(EngineError):
    """A flag or configuration value cannot be used; raised before anything is loaded."""


class ModelNotFound(EngineError):
    """The model name leads to no file, folder or reachable repository."""


class ModelLoadError(EngineError):
    """The checkpoint exists but is broken, incomplete or of an unsupported kind."""


class InvalidRequest(EngineError):
    """The request cannot be served as it is; nothing was allocated for it."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the context window or the KV pool."""


class UnknownModel(InvalidRequest):
    """The request names a model that this engine does not serve."""


class QueueFull(EngineError):
    """The waiting queue is at its limit; try again later."""


class RequestTimeout(EngineError):
    """The request did not finish before its deadline."""


class EngineClosed(EngineError):
    """The engine is not started, is draining, or has been closed."""


class EngineDead(EngineError):
    """The device or the step loop failed; every request in flight has failed with it."""
