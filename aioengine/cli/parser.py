"""What every parser of the command shares: one line of usage, and errors that say what was meant.

A wrong line is reported by the subcommand that read it: with the flag or the name that comes closest, or that a flag
of vLLM is not supported yet.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_VLLM = """
-dp -pp -q -tp --calculate-kv-scales --chat-template-content-format --code-revision --compilation-config --config
--cpu-offload-gb --data-parallel-size --decode-context-parallel-size --disable-custom-all-reduce
--disable-log-requests --disable-log-stats --disable-sliding-window --distributed-executor-backend
--download-dir --enable-auto-tool-choice --enable-expert-parallel --enable-log-outputs --enable-log-requests
--enable-lora --enable-prompt-embeds --guided-decoding-backend --hf-config-path --hf-overrides --hf-token
--kv-offloading-backend --kv-sharing-fast-prefill --kv-transfer-config --limit-mm-per-prompt --logits-processors
--lora-modules --max-cpu-loras --max-log-len --max-lora-rank --max-loras --max-parallel-loading-workers
--mm-processor-kwargs --model-impl --model-loader-extra-config --num-speculative-tokens --otlp-traces-endpoint
--override-generation-config --pipeline-parallel-size --quantization --reasoning-parser --response-role
--root-path --runner --skip-tokenizer-init --speculative-model --ssl-ca-certs
--ssl-certfile --ssl-keyfile --structured-outputs-config --swap-space --task --tensor-parallel-size
--tokenizer-mode --tokenizer-revision --tool-call-parser --tool-parser-plugin --trust-remote-code
--uvicorn-log-level --worker-cls
"""
UNSUPPORTED = frozenset(_VLLM.split())
"""Flags of `vllm serve` that there are none of here; a name may leave this list only when it becomes an option."""

REMARKS = {
    "--disable-log-requests": "requests are logged with --log-level debug only",
    "--enable-log-requests": "--log-level debug logs requests",
    "--disable-log-stats": "--log-stats-interval-s 0 does that",
    "--kv-offloading-backend": "--kv-offloading-size alone keeps evicted prefixes in host memory",
    "--num-speculative-tokens": "--speculative-config takes it",
    "--quantization": "GGUF files stay quantized as they are, without a flag",
    "--speculative-model": "--speculative-config has the method ngram, which needs no model",
    "--trust-remote-code": "nothing that comes with a model is run",
}
"""What to know or do instead."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
SIZE_HELP = "N may end in k, m, g, t (powers of 1000) or K, M, G, T (of 1024): 8k is 8000, 8K is 8192."


class Parser(argparse.ArgumentParser):
    """A parser whose usage is one line.

    Args:
        takes: what stands beside options, for that line.
        stray: what to do about an argument too many.
    """

    def __init__(self, *, takes: str = "", stray: str = "", **options: Any) -> None:
        usage = " ".join(filter(None, ["%(prog)s", takes, "[options]"]))
        super().__init__(usage=usage, **options)
        self._stray = stray

    def add_subparsers(self, **options: Any) -> Any:
        """As in argparse, but names of subcommands are not made from the usage."""
        return super().add_subparsers(**{"prog": self.prog, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As in argparse, but what a subcommand does not know is an error of that subcommand."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-") and text != "-"]
        if flags:  # what stands beside them may be their values
            self.error("; ".join(map(self._about, flags)))
        self.error(f"too many arguments: {' '.join(map(repr, unknown))}" + (self._stray and f"; {self._stray}"))

    def _about(self, flag: str) -> str:
        """What is wrong with a flag that this parser does not have."""
        if flag.replace("_", "-") in UNSUPPORTED:
            remark = REMARKS.get(flag.replace("_", "-"))
            return f"{flag} is not supported yet" + (f": {remark}" if remark else "")
        known = (option for action in self._actions for option in action.option_strings if option.startswith("--"))
        return f"there is no option {flag}{did_you_mean(flag, known)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), allowed)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(allowed)}{hint}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error: the closest of the known words, if one is close."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def gibibytes(text: str) -> float:
    """`8` or `0.5` (GiB), `512M` or `4g` (that many bytes, as in `whole_number`), in GiB.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        sized = _SIZE.fullmatch(text.strip())
        return float(text) if sized is None else float(sized[1]) * _UNITS[sized[2]] / _UNITS["G"]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 8 (GiB), 512M or 8G") from None


def whole_number(text: str) -> int:
    """`8192`, `8k` (8000), `8K` (8192) or `1.5m`, as in vLLM: small letters are powers of 1000, capitals of 1024.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        sized = _SIZE.fullmatch(text.strip())
        if sized is None:
            return int(text)
        number, unit = sized.groups()
        return int(number) * _UNITS[unit] if unit.isupper() else round(float(number) * _UNITS[unit])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; write 8192, 8k (8000) or 8K (8192)") from None
