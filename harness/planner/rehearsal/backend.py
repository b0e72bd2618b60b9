"""What torch's gloo backend allocates of its own while it runs a collective.

Measured by torch's allocator, call by call, at 2 and 4 ranks (torch 2.13): gloo gathers into one
flat tensor of its own, which is then copied to where it belongs, and scatters after an all-reduce
of a copy of the whole input. The buffers are freed when the call has ended. All-reduce, broadcast,
reduce, all-to-all and messages between two ranks work in place, as far as tensors are concerned:
what gloo's C++ allocates without torch is not counted.
"""

from __future__ import annotations

from harness.measure.collectives import Call

WITH_A_COPY = ("all_gather", "reduce_scatter", "gather", "scatter")
"""Operations for which the backend holds a tensor as large as the whole one: after it is gathered,
before it is scattered. Gathers and scatters between a root and the others do so on the root only;
this is not told apart."""


def backend_bytes(call: Call) -> int:
    """Bytes of the tensors that gloo holds during a call, beside the call's own."""
    return call.tensor_bytes if call.operation in WITH_A_COPY and call.group_size > 1 else 0
