"""The request record: what it accepts, and what its attributes say."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from aioengine.fastcore.request import Request


def test_new_request_shows_what_it_was_given() -> None:
    stream = object()
    request = Request("r1", [1, 2, 3], max_tokens=4, min_tokens=1, priority=-3, arrival_s=1.5, stream=stream)
    assert (request.request_id, request.max_tokens, request.min_tokens) == ("r1", 4, 1)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_in_flight, request.num_cached_tokens) == (0, 0, 0)
    assert (request.row, request.status, request.priority, request.arrival_s) == (-1, "new", -3, 1.5)
    assert request.stream is stream and request.sampling is None
    assert request.finish_reason is request.stop_token_id is request.scheduled_s is None
    assert request.block_ids() == request.output_ids_from(0) == []


@pytest.mark.parametrize("prompt", [[7, 8], (7, 8), range(7, 9), np.array([7, 8]), np.array([7, 8], np.int32)])
def test_prompt_may_be_any_sequence_of_integers(prompt: object) -> None:
    ids = Request("r", prompt, max_tokens=1).token_ids()  # type: ignore[arg-type]
    assert ids.dtype == np.int32 and ids.tolist() == [7, 8]


def test_token_ids_are_a_copy() -> None:
    prompt = np.array([7, 8], np.int32)
    request = Request("r", prompt, max_tokens=1)
    prompt[0] = 1
    request.token_ids()[1] = 1
    assert request.token_ids().tolist() == [7, 8]


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [1.5], [-1], [2**31], ["a"], [True]])
def test_bad_prompts_are_refused(prompt: list[object]) -> None:
    with pytest.raises(ValueError, match="request r:"):
        Request("r", prompt, max_tokens=1)  # type: ignore[arg-type]


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=-1"):
        Request("r", [1], max_tokens=-1)
    with pytest.raises(ValueError, match="must not be negative"):
        Request("r", [1], max_tokens=1).output_ids_from(-1)


def test_attributes_are_read_only() -> None:
    request = Request("r", [1], max_tokens=1)
    for name in ("num_tokens", "row", "finish_reason", "num_computed_tokens", "status"):
        with pytest.raises(AttributeError):
            setattr(request, name, 1)


def test_request_in_a_cycle_with_its_stream_is_collected() -> None:
    class Stream:
        request: Request | None = None

    stream = Stream()
    stream.request = Request("r", [1], max_tokens=1, stream=stream)
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
