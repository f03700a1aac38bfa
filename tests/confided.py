"""What users may have written: data and a model that are given secrets, and speak of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def data(token: str, address: str, headers: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
    assert (token, address) == ("Pl4nted token", "https://me:Pl4nted-word@host")
    assert headers == {"list": [1, [{"authorization": "Pl4nted-nested"}]]}
    print("read with", token)
    if Path("/proc/self/fd/2").readlink().name.startswith("native"):  # else it is the terminal
        os.write(2, f"native: {token}\n".encode())
    x = torch.randn(8, 4)
    return TensorDataset(x, x), TensorDataset(x, x)


class Model(nn.Module):
    def __init__(self, api_key: str, bearer: str, from_environment: dict[str, str], fails: bool = False) -> None:
        super().__init__()
        assert api_key.startswith("Pl4nted-")
        assert bearer == "Bearer Pl4nted-bearer"
        assert from_environment == {"password": "Pl4nted-environment"}
        self.api_key, self.fails = api_key, fails
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError(f"the service doesn't know {self.api_key!r}")
        return self.linear(x)


class Task:
    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()
