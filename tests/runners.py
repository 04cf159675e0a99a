"""A model runner in this process, clients of it, and what they send."""

from __future__ import annotations

import http.client
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.host.disk import REAL
from fedquilt.tools.operations.inference_server import InferenceServer
from fedquilt.tools.operations.inference_server.service import ModelService, ModelSwitcher


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


class Client:
    def __init__(self, server: InferenceServer) -> None:
        self._connection = http.client.HTTPConnection(*server.address, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        return self.ask("POST", "/v1/predict", body, **headers)

    def close(self) -> None:
        self._connection.close()


class Running:
    def __init__(self, models: Path, clock: Clock | None = None) -> None:
        self.models = ModelSwitcher(models)
        self.service = ModelService(self.models, models, size=100, **({"clock": clock} if clock else {}))
        self.server = InferenceServer(self.service, "127.0.0.1", 0)
        self.server.start()
        self._clients: list[Client] = []
        self.client = self.connect()

    def connect(self) -> Client:
        self._clients.append(Client(self.server))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


def digest(path: Path) -> str:
    return REAL.hash_file(path)


def npy(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed = zlib.compress(b"\0" * (height * (width + 1)) if rows is None else rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
