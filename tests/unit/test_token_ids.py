"""pack_token_ids: every id checked, the first bad one named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.fastcore.token_ids import pack_token_ids


@given(st.lists(st.integers(0, 999)))
def test_good_ids_are_packed_as_they_are(ids: list[int]) -> None:
    packed = pack_token_ids(ids, 1000)
    assert packed.dtype == np.int32 and packed.tolist() == ids


@pytest.mark.parametrize("bad", [-1, 1000, 2**31, 2**63, -(2**70)])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt\[2\]={bad} is outside the vocabulary \(0 to 999\)"):
        pack_token_ids([0, 999, bad, -5], 1000)


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, np.int64(1)])
def test_what_is_no_int_is_named(bad: object) -> None:
    with pytest.raises(TypeError, match=r"prompt\[1\]=.* is not a token id"):
        pack_token_ids([0, bad], 1000)  # type: ignore[list-item]
