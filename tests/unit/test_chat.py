"""Chat rendering: forms of messages, template dialects, errors, equality with transformers."""

from __future__ import annotations

import copy
import enum
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from aioengine.chat import compile_template, normalize_messages, render_chat
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.gguf import gguf_chat_templates, gguf_tokenizer
from aioengine.gguf_format import read_gguf_file
from aioengine.gguf_tokenizer import make_backend
from aioengine.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EITHER = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% set content = m['content'] %}[{{ m.role }}]"
    "{% for part in content | selectattr('type', 'equalto', 'text') %}<{{ part.text }}>{% endfor %}"
    "{% endfor %}"
)
TOOLS = """
{%- macro show(tool) %}
    {{- tool.function.name }}:{{ tool.function.parameters | tojson }}
{%- endmacro %}
{%- set ns = namespace(count=0, last='') %}
{%- if tools %}
    {{- 'tools ' }}
    {%- for tool in tools %}{{ show(tool) }};{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<' + message.role + '>' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '!' + call.function.name + call.function.arguments | tojson(indent=1) }}
    {%- endfor %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
{%- endfor %}
{{- ns.count }}{{ eos_token }}
{%- if documents %} docs {{ documents[0].title }}{% endif %}
{%- if thinking is defined and thinking %} think{% endif %}
"""
CONVERSATION = [
    {"role": "system", "content": "Täglich <b>&'\""},
    {"role": "user", "content": " Hi\n"},
    {
        "role": "assistant",
        "content": " calling ",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"b": "é<", "a": [1, None, True]}}}],
    },
    {"role": "skip", "content": "never seen"},
    {"role": "tool", "content": "42"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "ü"}}}


def reference(template: str, messages: list[dict[str, object]], **kwargs: object) -> str:
    rendered, _ = render_jinja_template([copy.deepcopy(messages)], chat_template=template, **kwargs)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("template", [CHATML, EITHER, TOOLS], ids=["chatml", "either", "tools"])
@pytest.mark.parametrize("generate", [False, True])
def test_equals_transformers(template: str, generate: bool) -> None:
    ours = render_chat(
        CONVERSATION,
        template,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        add_generation_prompt=generate,
        tools=[TOOL],
        documents=[{"title": "T", "text": "x"}],
        chat_template_kwargs={"thinking": True},
    )
    assert ours == reference(
        template,
        CONVERSATION,
        bos_token="<s>",
        eos_token="</s>",
        add_generation_prompt=generate,
        tools=[TOOL],
        documents=[{"title": "T", "text": "x"}],
        thinking=True,
    )


@pytest.mark.parametrize("content", ["go on", "go on  ", " ", "ends in newline\n"])
@pytest.mark.parametrize("template", [CHATML, TOOLS, EITHER], ids=["chatml", "tools", "either"])
def test_continues_the_final_message_as_transformers_does(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    ours = render_chat(messages, template, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference(template, messages, continue_final_message=True)
    assert ours.rstrip().endswith(content.rstrip())


def test_continues_a_list_of_parts() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = render_chat(messages, EITHER, add_generation_prompt=False, continue_final_message=True)
    assert text == "[assistant]<a><b"


@pytest.mark.parametrize("template", [CHATML, EITHER, PARTS_ONLY, TOOLS])
def test_null_missing_and_empty_content_are_the_same(template: str) -> None:
    forms: list[dict[str, object]] = [{}, {"content": None}, {"content": []}, {"content": ""}]
    texts = {render_chat([{"role": "assistant", **form}], template) for form in forms}
    assert len(texts) == 1
    assert "None" not in texts.pop()


def test_text_and_text_parts_give_each_template_what_it_reads() -> None:
    text = [{"role": "user", "content": "a b"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render_chat(text, EITHER) == "[user]a b"
    assert render_chat(parts, EITHER) == "[user]<a><b>"
    assert render_chat(text, PARTS_ONLY) == "[user]<a b>"
    assert render_chat(parts, PARTS_ONLY) == "[user]<a><b>"
    assert "user\na\nb<|im_end|>" in render_chat(parts, CHATML)
    assert "user\na b<|im_end|>" in render_chat(text, CHATML)


def test_a_macro_that_loops_over_content_gets_parts() -> None:
    template = (
        "{% macro show(content) %}{% for p in content %}<{{ p.text }}>{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    )
    assert render_chat([{"role": "user", "content": "x"}], template) == "<x>"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": ', {}),
        ("[1]", {}),
        (7, {}),
    ],
)
def test_tool_call_arguments_become_a_mapping(arguments: object, expected: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] is arguments, "the caller's message was changed"


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_are_no_field(calls: object) -> None:
    assert normalize_messages([{"role": "assistant", "content": "x", "tool_calls": calls}]) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "must not be empty"),
        ("hi", "messages", "must be a list"),
        ({"role": "user"}, "messages", "must be a list"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"content": "x"}], "messages[0].role", "no role"),
        ([{"role": 3, "content": "x"}], "messages[0].role", "no role"),
        ([{"role": "user", "content": 5}], "messages[0].content", "text or a list of parts"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type", "'str'"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
                }
            ],
            "messages[0].content[1].type",
            "image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a text"),
        ([{"role": "user", "content": "x", "tool_calls": "f"}], "messages[0].tool_calls", "must be a list"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls[0]", "an object"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0].extra", "plain data"),
    ],
)
def test_refuses_other_forms_by_name(messages: object, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match="(?s).") as caught:
        render_chat(messages, CHATML)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert words in caught.value.message


def test_refuses_what_is_nested_without_end() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested"):
        render_chat([{"role": "user", "content": "x", "extra": deep}], CHATML)


def test_the_templates_own_message_is_the_error() -> None:
    template = "{{ raise_exception('Roles must alternate: got ' + messages[0].role) }}"
    with pytest.raises(InvalidRequest, match="Roles must alternate: got tool"):
        render_chat([{"role": "tool", "content": "x"}], template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1)._x }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_failing_and_forbidden_templates_are_request_errors(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat([{"role": "user", "content": "x"}], template)


def test_broken_template_is_found_when_compiled() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        compile_template("ok\n{% if %}")
    with pytest.raises(InvalidRequest, match="broken"):
        render_chat([{"role": "user", "content": "x"}], "{% if %}")


def test_without_template_says_how_to_give_one() -> None:
    for template in (None, {}, {"tool_use": "x"}):
        with pytest.raises(InvalidRequest, match="--chat-template"):
            render_chat([{"role": "user", "content": "x"}], template)


def test_tool_use_template_is_taken_for_tools_only() -> None:
    templates = {"default": "plain", "tool_use": "tools"}
    messages = [{"role": "user", "content": "x"}]
    assert render_chat(messages, templates) == "plain"
    assert render_chat(messages, templates, tools=[]) == "plain"
    assert render_chat(messages, templates, tools=[TOOL]) == "tools"


def test_refuses_contradicting_and_reserved_options() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match="exclude each other"):
        render_chat(messages, CHATML, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="must not set messages"):
        render_chat(messages, CHATML, chat_template_kwargs={"messages": []})
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        render_chat(messages, "fixed", add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="tools must be a list"):
        render_chat(messages, CHATML, tools=["f"])  # type: ignore[list-item]


def test_unknown_roles_and_foreign_strings_reach_the_template() -> None:
    class Role(enum.StrEnum):
        CRITIC = "critic"

    assert "<|im_start|>critic\n" in render_chat([{"role": Role.CRITIC, "content": "x"}], CHATML)


def test_strftime_now_formats_a_date() -> None:
    assert len(render_chat([{"role": "user", "content": "x"}], "{{ strftime_now('%d %b %Y') }}")) == 11


def test_template_variables_that_are_not_given_are_undefined() -> None:
    assert render_chat([{"role": "user", "content": "x"}], "{{ tools is none }}{{ bos_token }}!") == "True!"


@pytest.mark.slow
def test_smollm2_prompts_equal_transformers_in_text_and_ids(smollm2_path: Path) -> None:
    file = read_gguf_file(smollm2_path)
    source = gguf_tokenizer(file)
    assert source is not None
    template = gguf_chat_templates(file)["default"]
    reference_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(source), chat_template=template, bos_token="<|im_start|>"
    )
    tokenizer = load_tokenizer(source)
    chats = [
        [{"role": "user", "content": "Wie geht's? 123"}],
        [{"role": "system", "content": "Täglich"}, {"role": "user", "content": " a\n\n b "}],
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "<|im_end|>"},
        ],
    ]
    for messages in chats:
        text = render_chat(messages, template, named_tokens=tokenizer.named_tokens)
        options = {"add_generation_prompt": True}
        assert text == reference_tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference_tokenizer.apply_chat_template(messages, return_dict=False, **options)
        assert ids == tokenizer.encode(text), "a second BOS"
