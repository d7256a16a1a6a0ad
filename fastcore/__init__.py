"""Native core: block pool, prefix map, KV manager, scheduler, step buffer (Cython); CPU kernels,
detokenizer and stream completion (C++). Imports nothing else of aioengine and never torch."""
