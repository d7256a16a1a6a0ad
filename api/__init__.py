"""The HTTP server: OpenAI-compatible routes over the engine's public face, and nothing else.

`create_app(engine, config)` in `app.py` makes the Starlette application; `server.py` runs it on the engine's
own event loop. Nothing here runs at import.
"""
