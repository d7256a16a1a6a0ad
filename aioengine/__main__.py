"""`python -m aioengine` is the `aioengine` command."""

from aioengine.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
