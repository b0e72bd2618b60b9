"""Messages of CUDA's libraries and NCCL when memory runs out or a peer is lost."""

import pytest

from harness.worker.worker import failure, no_memory

NO_MEMORY = [
    # torch/csrc, TORCH_CUDABLAS_CHECK: "CUDA error: ", status, " when calling `", call
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some"
        " other API call"
    ),
    # torch's NCCLUtils.cpp, with NCCL's last error (its src/include/checks.h and alloc.h)
    (
        "NCCL error in: ../NCCLUtils.cpp:94, unhandled cuda error, NCCL version"
        " 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure"
        " 2 'out of memory'"
    ),
    (
        "NCCL error in: ../NCCLUtils.cpp:94, unhandled cuda error, NCCL version"
        " 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to"
        " CUDA calloc 6291456 bytes"
    ),
]
LOST_PEER = [
    # torch's NCCLUtils.cpp: ncclGetErrorString and getNcclErrorDetailStr
    (
        "NCCL error in: ../NCCLUtils.cpp:77, remote process exited or there was a network error,"
        " NCCL version 2.26.2"
    ),
    (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
        " prematurely."
    ),
    (  # NCCL's src/misc/socket.cc
        "NCCL error in: ../ProcessGroupNCCL.cpp:1, unhandled system error\nLast error:\n"
        "socketProgress: Connection closed by remote peer node1<36184>"
    ),
    "NCCL communicator was aborted on rank 1. ",  # NCCLComm::getNcclComm
    (  # c10d/TCPStore
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown"
        " or crash?"
    ),
]
OWN_FAILURE = [
    # ProcessGroupNCCL.cpp: ranks that diverge wait for each other, although none is lost
    (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7,"
        " OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 ms"
    ),
    (
        "NCCL error in: ../NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for"
        " details)\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast"
        " error:\nDuplicate GPU detected : rank 0 and rank 1"
    ),
    (
        "NCCL error in: ../NCCLUtils.cpp:94, unhandled system error\nncclSystemError: System call"
        " (e.g. socket, malloc) or external library call failed or device error."
    ),
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
]


TEXTS = (
    *((text, "out_of_memory", False) for text in NO_MEMORY),
    *((text, "failed", True) for text in LOST_PEER),
    *((text, "failed", False) for text in OWN_FAILURE),
)


@pytest.mark.parametrize(("text", "status", "consequence"), TEXTS)
def test_what_a_message_means(text: str, status: str, consequence: bool) -> None:
    """A message about a lost rank is a consequence, not the cause of a failure. A rank itself may
    cause a timed-out collective, a wrong call or a failed kernel."""
    found = failure(RuntimeError(text))
    assert (found.status, found.consequence) == (status, consequence)
    assert bool(no_memory(f"before\n{text}\nafter")) == (status == "out_of_memory")
