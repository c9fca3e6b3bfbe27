"""Messages between processes: length-prefixed bytes on a socket, and a pickle that sends tensors by value."""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """The payload as it goes over a socket."""
    return _LENGTH.pack(len(payload)) + payload


def receive(link: socket.socket) -> bytes:
    """The next payload, waited for. Raises EOFError where the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return bytes(_exactly(link, length))


def send_with_fds(link: socket.socket, payload: bytes, fds: list[int]) -> None:
    """Sends a payload together with open files, which the receiver gets as files of its own."""
    # The files travel with the first bytes alone, so that one receiving call gets all of them.
    socket.send_fds(link, [_LENGTH.pack(len(payload))], fds)
    link.sendall(payload)


def receive_with_fds(link: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """The next payload and its open files, at most so many. Raises EOFError where the other side is gone."""
    head, fds, _, _ = socket.recv_fds(link, _LENGTH.size, most)
    if not head:
        raise EOFError
    head += bytes(_exactly(link, _LENGTH.size - len(head)))
    (length,) = _LENGTH.unpack(head)
    return bytes(_exactly(link, length)), list(fds)


def _exactly(link: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        got = link.recv_into(view[filled:])
        if not got:
            raise EOFError
        filled += got
    return data


class Inbox:
    """Takes a stream in pieces of any size and gives whole payloads."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The payloads that this piece completes."""
        self._data += piece
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            yield bytes(self._data[_LENGTH.size : end])
            del self._data[:end]


def dump(value: object) -> bytes:
    """The value as a pickle in which plain tensors are their own elements only, contiguous and on the CPU.

    Pickled the usual way, a view drags its whole storage along and costs about a millisecond.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def load(data: bytes) -> Any:
    """The value that ``dump`` wrote. Its own side of the pipe wrote it, so that it is as trusted as our own code."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # a value has no tensors where torch is not imported
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # numpy has no bfloat16 and no float8: as bytes every type travels, and every bit of it.
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        dtype = str(value.dtype).removeprefix("torch.")
        return _tensor, (data, dtype, tuple(value.shape), value.requires_grad)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape).requires_grad_(requires_grad)
