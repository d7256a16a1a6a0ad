"""Chat messages to one text, by the model's Jinja template.

Messages are first brought to one form (`normalize_messages`), so that what clients send in several ways reads
the same to the template. Templates come with models and are not trusted: they run in a sandbox and see plain
data only. Whatever goes wrong is the request's error, in the template's own words. The engine's intake calls
`render_chat` and tokenizes the result without adding special tokens: a template writes its own.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.types import ChatMessages

logger = logging.getLogger(__name__)

Message = dict[str, object]

_MAX_DEPTH = 64
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# The space tells whether the template strips its messages.
_END_MARK = "<|aioengine:the message goes on here|> "


def render_chat(
    messages: ChatMessages,
    template: str | Mapping[str, str] | None,
    *,
    named_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """The prompt for a conversation.

    `template` is one template or several by name: "tool_use" is taken if there are tools, else "default".
    `named_tokens` are `bos_token`, `eos_token` and so on. With `continue_final_message` the text ends where
    the last message ends, so that the model goes on writing it.

    Raises:
        InvalidRequest: messages of a wrong form, no template, or the template refused them.
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default")
    if template is None:
        raise InvalidRequest(
            "the model has no chat template, so it takes no messages; start with --chat-template FILE, or "
            "send a plain prompt",
            param="messages",
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            param="continue_final_message",
        )
    variables = _plain(chat_template_kwargs or {}, "chat_template_kwargs")
    assert isinstance(variables, dict)
    for name in _RESERVED:
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    try:
        compiled = compile_template(template)
    except ModelLoadError as error:
        raise InvalidRequest(error.message, param="messages") from None
    chat = normalize_messages(messages, wants_parts=compiled.wants_parts, takes_parts=compiled.takes_parts)
    if continue_final_message:
        _mark_end(chat[-1], f"messages[{len(chat) - 1}].content")
    text = compiled.render(
        {
            **(named_tokens or {}),
            **variables,
            "messages": chat,
            "tools": _plain_list(tools, "tools"),
            "documents": _plain_list(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return _cut_at_mark(text) if continue_final_message else text


def normalize_messages(
    messages: ChatMessages, *, wants_parts: bool = False, takes_parts: bool = False
) -> list[Message]:
    """Copies of the messages in the form that templates expect.

    Content that is missing, None or an empty list is the empty text. Lists of text parts stay lists if the
    template takes them (`takes_parts`), else they are joined by line breaks; a template that knows only lists
    (`wants_parts`) gets lists. Arguments of tool calls become mappings. Fields that are None are dropped, as
    is an empty list of tool calls. Roles are the template's business.

    Raises:
        InvalidRequest: not a list of mappings, a message without role, or content that is no text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    chat = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{path} must be an object, got {type(message).__name__}", param=path)
        plain = _plain(message, path)
        assert isinstance(plain, dict)
        role = plain.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{path} has no role", param=f"{path}.role")
        copy = {name: value for name, value in plain.items() if value is not None}
        content = _content_parts(copy.get("content"), f"{path}.content")
        if isinstance(content, str):
            copy["content"] = [{"type": "text", "text": content}] if wants_parts and content else content
        else:
            texts = [text for text in content if text]
            copy["content"] = (
                [{"type": "text", "text": text} for text in texts] if takes_parts and texts else "\n".join(texts)
            )
        if wants_parts and copy["content"] == "":
            copy["content"] = []
        if "tool_calls" in copy:
            copy["tool_calls"] = _tool_calls(copy["tool_calls"], f"{path}.tool_calls")
            if not copy["tool_calls"]:
                del copy["tool_calls"]
        chat.append(copy)
    return chat


def _content_parts(content: object, path: str) -> str | list[str]:
    """Content as given: a text, or the texts of its parts."""
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a text or a list of parts", param=path)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        field = _TEXT_FIELDS.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                f'{path}[{i}] has the type {kind!r}, but this model takes text only: {{"type": "text", "text": ...}}',
                param=f"{path}[{i}].type",
            )
        text = part.get(field)
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}[{i}].{field} must be a text", param=f"{path}[{i}].{field}")
        texts.append(text)
    return texts


def _tool_calls(calls: object, path: str) -> list[object]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path} must be a list", param=path)
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidRequest(f"{path}[{i}] must be an object", param=f"{path}[{i}]")
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise InvalidRequest(f"{path}[{i}].function must be an object", param=f"{path}[{i}].function")
        function["arguments"] = _arguments(function.get("arguments"), f"{path}[{i}]")
    return calls


def _arguments(arguments: object, path: str) -> dict[str, object]:
    """Templates want a mapping. Text that does not parse is dropped: a model may have been cut off while it
    wrote the call, and refusing its own words would end the conversation for good."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError:
            logger.warning("%s has arguments that are not valid JSON; an empty object stands in", path)
            return {}
    if isinstance(arguments, dict):
        return arguments
    if arguments not in (None, ""):
        logger.warning("%s has arguments that are not an object; an empty one stands in", path)
    return {}


def _plain(value: object, path: str, depth: int = 0) -> object:
    """A copy made of plain data, so that a template cannot reach the methods of foreign objects."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{path} is nested too deeply", param=path.split(".")[0])
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    for kind in (str, int, float):  # enumerations and the like
        if isinstance(value, kind):
            return kind(value)
    raise InvalidRequest(f"{path} must be plain data, got {type(value).__name__}", param=path)


def _plain_list(values: Sequence[Mapping[str, object]] | None, name: str) -> object:
    if not values:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequest(f"{name} must be a list of objects", param=name)
    return _plain(values, name)


def _mark_end(message: Message, path: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _END_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _END_MARK
    else:
        raise InvalidRequest(f"{path} is empty, so it cannot be continued", param=path)


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK.strip())
    if at < 0:
        raise InvalidRequest(
            "the chat template leaves out the last message, so it cannot be continued",
            param="continue_final_message",
        )
    before = text[:at]
    return before if text.startswith(_END_MARK, at) else before.rstrip()


class ChatTemplate:
    """A compiled template and what it expects of a message's content. Thread safe."""

    def __init__(self, source: str) -> None:
        """
        Raises:
            ModelLoadError: the template is not valid Jinja.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template is broken in line {error.lineno}: {error}") from None
        has_loop, tests_string = _uses_of_content(tree)
        self.takes_parts = has_loop
        """Content may be a list of parts."""
        self.wants_parts = has_loop and not tests_string
        """Content must be a list of parts."""

    def render(self, variables: Mapping[str, object]) -> str:
        """
        Raises:
            InvalidRequest: the template raised; the message is its own.
        """
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from None
        except Exception as error:  # a template can trip over anything that is in the messages
            raise InvalidRequest(
                f"the chat template fails on the messages: {type(error).__name__}: {error}", param="messages"
            ) from None


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """The compiled form of a template, kept for the next call.

    Raises:
        ModelLoadError: the template is not valid Jinja.
    """
    return ChatTemplate(source)


def _uses_of_content(tree: jinja2.nodes.Template) -> tuple[bool, bool]:
    """Whether the template loops over a message's content, and whether it asks if that is a string."""
    names = {arg.name for macro in tree.find_all(jinja2.nodes.Macro) for arg in macro.args if arg.name == "content"}

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        match node:
            case jinja2.nodes.Getattr():
                return node.attr == "content"
            case jinja2.nodes.Getitem():
                return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
            case jinja2.nodes.Name():
                return node.name in names
            case jinja2.nodes.Filter():
                return is_content(node.node)
            case jinja2.nodes.CondExpr():
                return is_content(node.expr1) or is_content(node.expr2)
        return False

    num_names = -1
    while len(names) != num_names:
        num_names = len(names)
        for assign in tree.find_all(jinja2.nodes.Assign):
            if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node):
                names.add(assign.target.name)
    has_loop = any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
    tests_string = any(test.name == "string" and is_content(test.node) for test in tree.find_all(jinja2.nodes.Test))
    return has_loop, tests_string


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscored names, the usual way out of a sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: any name may be a key
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the attribute {name}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates made for Hugging Face's libraries expect to find."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _make_dict
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
