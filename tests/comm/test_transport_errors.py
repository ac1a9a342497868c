"""Errors of the collective libraries: a lost peer is told apart from a collective that was called wrongly.

The texts are those of torch 2.13, of gloo as torch includes it, and of torch's wrapper of NCCL. Errors that one
process can cause are caused here; the others are in the lists.
"""

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hyperpod_plugins.comm.smddp import Smddp
from hyperpod_plugins.comm.transport import Gloo, Nccl, transport_message

TRANSPORTS = (Gloo(), Nccl(), Smddp())

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
ADVICE = "This is typically caused by a remote worker crashing. Check the logs of the remote worker."
PEER = "[10.0.0.2]:4242"
STACK = (
    "\nException raised from checkSingleTensor at /pytorch/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:2666 (most "
    "recent call first):\n#8 c10d::ProcessGroupGloo::recv(std::vector<at::Tensor>&, int, int) from ??:0\n"
    "#9 c10d::tcputil::SocketImpl::connect() from ??:0"
)


def is_connection_error(error):
    """What all transports say: all of them serve CPU tensors over gloo."""
    [answer] = {transport.is_connection_error(error) for transport in TRANSPORTS}
    return answer


def two_gloo_groups(timeout_s):
    """Both members of a group, in this process."""
    store, groups = dist.HashStore(), [None, None]

    def connect(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def lose_a_gloo_peer():
    mine, other = two_gloo_groups(30)
    work = mine.allreduce([torch.ones(1)])
    del other
    gc.collect()
    work.wait()


def lose_a_gloo_peer_before_the_call():
    mine, other = two_gloo_groups(30)
    del other
    gc.collect()
    mine.allreduce([torch.ones(1)]).wait()
    mine.send([torch.ones(1)], 1, 0).wait()


def wait_for_a_gloo_peer():
    mine, _other = two_gloo_groups(0.1)
    mine.allreduce([torch.ones(1)]).wait()


def connect_without_the_peer():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=0.1))


def closed_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server.port, dist.TCPStore("127.0.0.1", server.port, is_master=False)


def read_a_closed_store():
    _, client = closed_store()
    client.get("key")


def connect_to_a_closed_store():
    port, client = closed_store()
    del client
    dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.1))


def wait_for_a_key():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.1))
    server.get("key")


@pytest.mark.parametrize(
    "lose",
    [
        lose_a_gloo_peer,
        lose_a_gloo_peer_before_the_call,
        wait_for_a_gloo_peer,
        connect_without_the_peer,
        read_a_closed_store,
        connect_to_a_closed_store,
        wait_for_a_key,
    ],
)
def test_a_lost_connection_is_a_transport_error(lose):
    with pytest.raises(RuntimeError) as caught:
        lose()
    assert is_connection_error(caught.value), caught.value


@pytest.mark.parametrize(
    "text",
    [
        f"{GLOO}/pair.cc:553] Connection closed by peer {PEER}. {ADVICE}",
        f"{GLOO}/pair.cc:537] Read error {PEER}: Connection reset by peer. {ADVICE}",
        f"{GLOO}/pair.cc:537] Read error {PEER}: No route to host. {ADVICE}",
        f"{GLOO}/pair.cc:339] writev {PEER}: Broken pipe",
        f"{GLOO}/pair.cc:339] writev {PEER}: No route to host",
        f"{GLOO}/pair.cc:523] Read timeout {PEER}",
        f"{GLOO}/pair.cc:314] Write timeout {PEER}",
        f"{GLOO}/pair.cc:812] Socket closed {PEER}",
        f"{GLOO}/pair.cc:201] Socket unexpectedly closed {PEER}",
        f"{GLOO}/pair.h:311] Connect timeout {PEER}",
        "Application timeout caused pair closure",
        f"{GLOO}/unbound_buffer.cc:129] Timed out waiting 1800000ms for send operation to complete",
        f"{GLOO}/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote={PEER}",
        f"{GLOO}/pair.cc:152] read: No route to host, remote={PEER}",
        f"{GLOO}/pair.cc:152] write: Connection reset by peer, remote={PEER}",
        f"{GLOO}/pair.cc:152] short read: got 0 bytes while expecting to read 8 bytes, remote={PEER}",
        f"{GLOO}/pair.cc:152] short write: wrote 0 bytes while expecting to write 8 bytes, remote={PEER}",
        f"[enforce fail at {GLOO[1:]}/socket.cc:142] rv != -1. connect: Network is unreachable",
        f"[enforce fail at {GLOO[1:]}/pair.cc:801] state_ >= CONNECTED. 3 vs 4. Pair is not connected ({PEER}$0 <--> "
        "[10.0.0.3]:4243$0)",
        f"Gloo connectFullMesh failed with {GLOO}/pair.cc:152] no error",
        f"Gloo connectFullMesh failed with {GLOO}/pair.cc:152] timed out connecting: SO_ERROR: No route to host",
        f"{GLOO}/pair.cc:152] read: Resource temporarily unavailable, remote={PEER}",
        "Operation timed out!",
    ],
)
def test_the_text_of_a_lost_connection_is_recognized(text):
    assert is_connection_error(RuntimeError(text))
    assert is_connection_error(RuntimeError(text + STACK))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 1.",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=8, "
        "NumelOut=8, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.",
    ],
)
def test_nccl_s_texts_are_recognized_where_nccl_serves(text):
    for error in (RuntimeError(text), RuntimeError(text + STACK)):
        assert [each.is_connection_error(error) for each in TRANSPORTS] == [False, True, True]


@pytest.mark.parametrize("kind", [dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError])
def test_torch_s_own_errors_of_connections_need_no_text(kind):
    assert is_connection_error(kind("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"))


def wrong_calls(group):
    ones, two = torch.ones(2), [torch.ones(2), torch.ones(2)]
    return {
        "send of two": lambda: group.send(two, 1, 0),
        "receive of two": lambda: group.recv(two, 1, 0),
        "receive into a view": lambda: group.recv([torch.ones(2, 3).t()], 1, 0),
        "negative tag": lambda: group.recv([ones], 1, -1),
        "unknown root": lambda: group.broadcast(ones, root=7),
        "unsupported dtype": lambda: group.allreduce([ones.to(torch.float8_e4m3fn)]),
        "sizes that differ": lambda: group.allgather([[ones, torch.ones(3)]], [ones]),
        "connection to oneself": lambda: group.recv([ones], 0, 0),
        "splits": lambda: group.alltoall_base(torch.ones(5), torch.ones(5), [1], [1]),
    }


def test_a_wrong_call_is_no_transport_error():
    group, _other = two_gloo_groups(30)
    for name, call in wrong_calls(group).items():
        with pytest.raises(RuntimeError) as caught:
            call().wait()
        assert not is_connection_error(caught.value), f"{name}: {caught.value}"


@pytest.mark.parametrize(
    "text",
    [
        "Float8 dtypes are not currenlty supported for NCCL reductions",
        "Sparse allreduce is only available in the NCCL experimental branch.",
        "Backend nccl does not support recvAnysource",
        "ProcessGroupGloo::send takes a single tensor" + STACK,
        "SMDDP does not support: ReduceOp",
        "Invalid scalar type",
        "[enforce fail at /pytorch/third_party/gloo/gloo/alltoall.cc:30] in->size == out->size. ",
        "Backend gloo does not support setting timeout",
        "The peer rank must be in the network of the group, or the call is aborted",
        f"[enforce fail at {GLOO[1:]}/pair.cc:801] state_ >= CONNECTED. 1 vs 4. Pair is not connected "
        "([10.0.0.3]:4243$0 <--> [none])",
        f"[enforce fail at {GLOO[1:]}/pair.cc:801] state_ >= CONNECTED. 1 vs 4. Pair is not connected "
        f"([10.0.0.3]:4243$0 <--> {PEER})",
    ],
)
def test_the_text_of_a_wrong_call_is_not_taken_for_a_lost_connection(text):
    assert not is_connection_error(RuntimeError(text))


class DatabaseError(RuntimeError):
    """An error of a user's program."""


@pytest.mark.parametrize("kind", [DatabaseError, ValueError, NotImplementedError, ConnectionResetError])
def test_errors_of_other_types_are_not_the_libraries(kind):
    assert not is_connection_error(kind("the connection was reset by peer: connection closed"))


def test_the_message_for_the_user_lacks_source_file_and_advice():
    text = f"{GLOO}/pair.cc:553] Connection closed by peer {PEER}. {ADVICE}"
    assert transport_message(RuntimeError(text + STACK)) == f"Connection closed by peer {PEER}."
