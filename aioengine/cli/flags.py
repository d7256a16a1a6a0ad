"""Command-line flags made from the configuration dataclasses, and the README's table of them.

A field is a flag: `max_num_seqs` is `--max-num-seqs`, a boolean also has `--no-...`, a `Literal` gives the
choices. Only flags that were given reach the configuration, which knows the defaults. The table for the
README is printed by `aioengine flags`.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aioengine.cli.parser import SIZE_HELP, Parser, gibibytes, whole_number
from aioengine.config import (
    GROUPS,
    EngineConfig,
    ServerConfig,
    allowed_values,
    check_group,
    flag_name,
    option_fields,
    without_none,
)
from aioengine.errors import InvalidConfig
from aioengine.types import SamplingParams

SAMPLING_HELP = {
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Do not stop before this many tokens.",
    "temperature": "0 always takes the most likely token; higher values vary more.",
    "top_p": "Keep the smallest set of tokens whose probability reaches this.",
    "top_k": "Keep this many of the most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this fraction as likely as the most likely one.",
    "presence_penalty": "Lower the chance of tokens that have occurred in the output.",
    "frequency_penalty": "The same, per occurrence.",
    "repetition_penalty": "Above 1, lower the chance of tokens of the prompt and the output.",
    "stop": "Text that ends the output; may be given several times.",
    "ignore_eos": "Go on after the model's end token.",
    "n": "Number of answers per prompt.",
}
"""The sampling fields that have a flag; the others can be set per line of a file. The seed of a run is
`--seed` of the engine, from which requests without one get theirs."""


def add_model_argument(parser: Parser) -> None:
    """The optional MODEL in first place, the same as `--model`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=_help_of("model"))
    parser.add_argument("--model", default=argparse.SUPPRESS, metavar="MODEL", help="The same as MODEL in first place.")


def add_config_flags(parser: Parser, groups: Mapping[str, type], *, skip: Iterable[str] = ()) -> None:
    """One flag per field, in one section per group."""
    parser.epilog = SIZE_HELP
    skip = set(skip)
    for name, cls in groups.items():
        section = parser.add_argument_group(f"{name} options")
        for field, hint in option_fields(cls):
            if field.name in skip:
                continue
            _add_flag(section, field.name, hint, _help_of(field.name, cls), field.metadata.get("metavar"))


def add_sampling_flags(parser: Parser, *, skip: Iterable[str] = ()) -> None:
    """Flags for the fields of `SamplingParams` in `SAMPLING_HELP`."""
    section = parser.add_argument_group("sampling options (by default the model's own)")
    hints = typing.get_type_hints(SamplingParams)
    for name, text in SAMPLING_HELP.items():
        if name not in set(skip):
            _add_flag(section, name, str if name == "stop" else hints[name], text, None, repeats=name == "stop")


def _add_flag(
    section: argparse._ArgumentGroup,
    name: str,
    hint: Any,
    text: str,
    metavar: str | None,
    *,
    repeats: bool = False,
) -> None:
    flag = flag_name(name)
    inner, _ = without_none(hint)
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    choices = allowed_values(inner)
    if inner is bool:
        section.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif choices is not None:
        section.add_argument(flag, type=type(choices[0]), choices=choices, **options)
    else:
        kind = {int: "N", float: "X", str: "TEXT"}[inner]
        action = "append" if repeats else "store"
        read = gibibytes if metavar == "GIB" else whole_number if inner is int else inner
        section.add_argument(flag, type=read, metavar=metavar or kind, action=action, **options)


def _help_of(field_name: str, cls: type = GROUPS["model"]) -> str:
    """A field's sentence with its default, if that is a value and not "it depends"."""
    field = next(field for field, _ in option_fields(cls) if field.name == field_name)
    default = "" if field.default is None else f" (default: {_shown(field.default)})"
    return f"{field.metadata['help']}{default}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration from the flags that were given.

    Raises:
        InvalidConfig: a value is out of range, or two models were named.
    """
    given = _given(args, GROUPS.values())
    first, flag = getattr(args, "model_argument", None), given.get("model")
    if first is not None and flag is not None and first != flag:
        raise InvalidConfig(f"two models are named: {first} and --model {flag}", param="model")
    if first is not None:
        given["model"] = first
    return EngineConfig(**given)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server's configuration from the flags that were given.

    Raises:
        InvalidConfig: a value is out of range.
    """
    config = ServerConfig(**_given(args, [ServerConfig]))
    check_group(config)
    return config


def sampling_overrides(args: argparse.Namespace) -> dict[str, object]:
    """The sampling fields whose flags were given."""
    return {name: getattr(args, name) for name in SAMPLING_HELP if hasattr(args, name)}


def _given(args: argparse.Namespace, groups: Iterable[type]) -> dict[str, Any]:
    names = [field.name for cls in groups for field, _ in option_fields(cls)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def flag_table() -> str:
    """All flags as Markdown tables, for the README."""
    return "\n\n".join("\n".join(_table(name, cls)) for name, cls in {**GROUPS, "server": ServerConfig}.items())


def _table(name: str, cls: type) -> Iterator[str]:
    yield f"| {name} | default | meaning |"
    yield "| --- | --- | --- |"
    for field, hint in option_fields(cls):
        choices = allowed_values(without_none(hint)[0])
        flag = f"`{flag_name(field.name)}`" + (f" {', '.join(map(str, choices))}" if choices else "")
        default = "" if field.default is None else f"`{_shown(field.default)}`"
        yield f"| {flag} | {default} | {field.metadata['help']} |"


async def run(args: argparse.Namespace) -> int:
    """The unlisted subcommand `aioengine flags`."""
    print(flag_table())
    return 0
