"""Forwards requests and answers of attention DP groups between the nodes of an engine.

With DP attention the leader of each group receives requests from the engine's host and answers it, over SGLang's Unix
sockets. For leaders on other nodes each node has a relay, which connects the sockets of the nodes over TCP. Only
processes that were given the first node's key can connect, and nobody else can read (CURVE, ZeroMQ's RFC 26).
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

import zmq

from megarl.device import Address, join_store, own_address
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.sglang.arguments import Endpoint, NodeSpan
from megarl.rollout.sglang.scheduler import group_address, ipc_address

_PORTS = "relay"
_ANSWERS = "answers"
_JOIN_S = 600.0
Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]  # where messages come from, and where they go


def new_endpoint() -> Endpoint:
    """An endpoint with a new key."""
    return Endpoint(*zmq.curve_keypair())


class Relay:
    """The relay of one node, which forwards in threads of its own until it is stopped."""

    def __init__(self, folder: Path, layout: EngineLayout, span: NodeSpan) -> None:
        """folder: of this node's Unix sockets. The first node publishes its ports in the store span.rendezvous."""
        self._context = zmq.Context()
        self._endpoint = span.endpoint
        self._folder = folder
        self._context.linger = 0  # this and the next are options of every socket
        # no limit, as SGLang's own: no sender waits for a slow reader
        self._context.sndhwm = self._context.rcvhwm = 0
        # the node of each group's leader
        ranks_of_node = layout.tp // span.nodes
        leaders = [group * layout.attention_tp // ranks_of_node for group in range(layout.dp)]
        groups = [group for group, node in enumerate(leaders) if node and span.node in (0, node)]
        connect = self._follow if span.node else self._lead
        try:
            pairs = connect(groups, span.rendezvous)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = [
            threading.Thread(target=_forward, args=pair, name="engine-relay", daemon=True)
            for pair in pairs
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close every connection; may be called again."""
        # ends the threads' forwarding, and waits until they have closed their sockets
        self._context.term()
        for thread in self._threads:
            thread.join()

    def _lead(self, groups: list[int], rendezvous: Address) -> list[Pair]:
        host = own_address(rendezvous.host)
        answers = self._socket(zmq.PULL)
        ports = {_ANSWERS: answers.bind_to_random_port(f"tcp://{host}")}
        pairs = [(answers, self._file(zmq.PUSH, "tokenizer"))]
        for group in groups:
            requests = self._socket(zmq.PUSH)
            ports[str(group)] = requests.bind_to_random_port(f"tcp://{host}")
            pairs.append((self._file(zmq.PULL, group_address("scheduler", group)), requests))
        join_store(rendezvous, _JOIN_S).set(_PORTS, json.dumps({"host": host, "ports": ports}))
        return pairs

    def _follow(self, groups: list[int], rendezvous: Address) -> list[Pair]:
        first = json.loads(join_store(rendezvous, _JOIN_S).get(_PORTS))

        def joined(kind: int, name: str) -> zmq.Socket[bytes]:
            socket = self._socket(kind)
            socket.connect(f"tcp://{first['host']}:{first['ports'][name]}")
            return socket

        pairs = [(self._file(zmq.PULL, "tokenizer", binds=True), joined(zmq.PUSH, _ANSWERS))]
        for group in groups:
            file = self._file(zmq.PUSH, group_address("scheduler", group), binds=True)
            pairs.append((joined(zmq.PULL, str(group)), file))
        return pairs

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A TCP socket: the first node is the CURVE server, the others use its public key and a new key pair."""
        socket = self._context.socket(kind)
        if self._endpoint.secret:
            socket.curve_server = True
            socket.curve_publickey = self._endpoint.public
            socket.curve_secretkey = self._endpoint.secret
        else:
            socket.curve_serverkey = self._endpoint.public
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        return socket

    def _file(self, kind: int, name: str, binds: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        address = ipc_address(self._folder, name)
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket


def _forward(source: zmq.Socket[bytes], sink: zmq.Socket[bytes]) -> None:
    """Pass on messages until the context is terminated."""
    with suppress(zmq.ContextTerminated):
        zmq.proxy(source, sink)
    source.close()
    sink.close()
