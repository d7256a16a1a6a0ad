"""Token ids as callers give them."""

import numpy as np
import numpy.typing as npt

def pack_token_ids(token_ids: list[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """The ids as int32 [T]; TypeError or ValueError names the first item that is none."""
