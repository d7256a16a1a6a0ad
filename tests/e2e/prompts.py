"""The prompts of the end-to-end tests: varied in language, form and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Chat = Sequence[Mapping[str, object]]

NUM_OUTPUT_TOKENS = 48

LONG_TEXT = "The ledger of the harbour, copied line by line.\n" + "".join(
    f"Entry {n}: the ship number {n * 37 % 101} brought {n * 13 % 29 + 2} barrels of salt and left at dusk.\n"
    for n in range(1, 28)
)
"""More than 600 tokens."""

TEXTS: dict[str, str] = {
    "story": "Once upon a time, in a village at the edge of the forest,",
    "fact": "The capital of France is",
    "one word": "Hello",
    "code": 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    "html": "<html>\n  <head><title>Test</title></head>\n  <body>\n    <ul>\n      <li>",
    "digits": "3.14159265358979323846 2.71828182845904523536 1.41421356237309504880 0 1 1 2 3 5 8 13 21",
    "cjk": "东京は日本の首都です。北京是中国的首都。서울은 대한민국의 수도",
    "emoji": "Weather: ☀️ 🌧️ ❄️ 👩‍👩‍👧‍👦 🏳️‍🌈 naïve café – “quoted” …",
    "spaces": "a  b\t\tc\n\n\n   d    e\r\nf",
    "long": LONG_TEXT,
}

CHATS: dict[str, Chat] = {
    "question": [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
    "system": [
        {"role": "system", "content": "You are a pirate. Answer as one."},
        {"role": "user", "content": "What is 12 times 12?"},
    ],
    "turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Green."},
        {"role": "user", "content": "Another one, and a fruit of that colour 🍋?"},
    ],
}

PROMPTS: dict[str, str | Chat] = {**TEXTS, **{f"chat {name}": chat for name, chat in CHATS.items()}}

FILLERS = [f"Filler {n}: tell me about the number {n * n} and" for n in range(16)]
"""Other requests that share the batch."""
