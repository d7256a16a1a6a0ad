"""The application: routes, middleware and error handlers, put together for one engine.

`aioengine serve` starts the engine itself and runs the application without its lifespan; any other ASGI
server gets an engine that starts and closes with the application.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from aioengine.api.admin import Admin
from aioengine.api.cache import CacheRoutes
from aioengine.api.chat import Chat
from aioengine.api.completions import Completions
from aioengine.api.errors import on_disconnect, on_engine_error, on_http_exception
from aioengine.api.face import Engine
from aioengine.api.middleware import AdminAuth, BearerAuth, BodyLimit, RequestBoundary
from aioengine.api.models import Models
from aioengine.api.tokenize import Tokenization
from aioengine.config import ServerConfig
from aioengine.errors import EngineError


def create_app(engine: Engine, config: ServerConfig | None = None) -> Starlette:
    """The ASGI application that serves an engine.

    Args:
        engine: an `AsyncEngine`. If the server runs lifespan events, the engine must not be started yet:
            the lifespan starts it and closes it.
        config: keys, limits and origins; host and port are the server's business.

    Raises:
        InvalidConfig: admin routes without an admin key, or the other way round.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    return Starlette(
        routes=[*_routes(engine), *_admin_routes(engine, config)],
        middleware=_middleware(config),
        exception_handlers={
            EngineError: on_engine_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
        },
        lifespan=lifespan,
    )


def _routes(engine: Engine) -> list[BaseRoute]:
    admin, models, tokens = Admin(engine), Models(engine), Tokenization(engine)
    return [
        Route("/v1/chat/completions", Chat(engine).create, methods=["POST"]),
        Route("/v1/completions", Completions(engine).create, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model_id:path}", models.get, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", admin.health, methods=["GET"]),
        Route("/metrics", admin.metrics, methods=["GET"]),
        Route("/version", admin.version, methods=["GET"]),
    ]


def _admin_routes(engine: Engine, config: ServerConfig) -> list[BaseRoute]:
    """None unless they are enabled; each with its own guard."""
    key = config.effective_admin_key()
    if key is None:
        return []
    cache = CacheRoutes(engine)
    guard = [Middleware(AdminAuth, admin_key=key)]
    posts = {
        "/admin/cache/evict": cache.evict,
        "/admin/cache/quarantine": cache.quarantine,
        "/admin/cache/lift": cache.lift,
        "/admin/cache/pin": cache.pin,
        "/admin/cache/lease": cache.lease,
        "/admin/cache/unpin": cache.unpin,
        "/admin/cache/prewarm": cache.prewarm,
        "/admin/cache/reset": cache.reset,
        "/reset_prefix_cache": cache.reset_prefix_cache,
    }
    gets = {
        "/admin/cache/audit": cache.audit,
        "/admin/cache/stats": cache.stats,
        "/admin/kv_events": cache.kv_events,
    }
    return [
        *(Route(path, handler, methods=["POST"], middleware=guard) for path, handler in posts.items()),
        *(Route(path, handler, methods=["GET"], middleware=guard) for path, handler in gets.items()),
    ]


def _middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first. CORS stands before the key, because a browser's preflight cannot carry one."""
    stack = [Middleware(RequestBoundary)]
    if config.allow_origins is not None:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[origin.strip() for origin in config.allow_origins.split(",")],
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        )
    api_key = config.effective_api_key()
    if api_key is not None:
        has_admin = config.effective_admin_key() is not None
        stack.append(Middleware(BearerAuth, api_key=api_key, has_admin=has_admin))
    stack.append(Middleware(BodyLimit, max_bytes=config.max_request_bytes))
    return stack
