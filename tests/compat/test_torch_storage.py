"""Private names of torch's storages, and that a storage has one identity."""

from __future__ import annotations

import gc
import weakref

import torch

from tests.compat.sentences import needed


@needed("torch._C._storage_Use_Count", by="sharding=fsdp on a CPU")
def test_holders_are_counted() -> None:
    from lowvram.compat.torch_storage import num_holders

    tensor, weight = torch.zeros(4), torch.ones(4, requires_grad=True)
    before = num_holders(tensor)
    sharers = [tensor.data, tensor.data]  # other tensors of the same storage
    assert num_holders(tensor) == before + 2
    sharers.clear()
    assert num_holders(tensor) == before
    product = weight * tensor  # whose graph holds the tensor itself
    assert num_holders(tensor) == before + 1
    del product
    assert num_holders(tensor) == before


@needed("torch.UntypedStorage.resize_", by="the ledger of a sharded model")
def test_resizes_are_reported() -> None:
    from lowvram.compat.torch_storage import on_storage_resize

    told: list[torch.UntypedStorage] = []
    storage = torch.zeros(4).untyped_storage()
    with on_storage_resize(told.append):
        storage.resize_(0)
    storage.resize_(16)
    assert len(told) == 1
    assert told[0] is storage
    assert storage.nbytes() == 16


@needed("torch.UntypedStorage", by="the ledger, which knows storages by their id,")
def test_a_storage_is_one_object_for_life() -> None:
    """Public since 2.1, but said nowhere: autograd may be the only one that holds it for a while."""
    tensor = torch.zeros(4, requires_grad=True)
    deaths: list[object] = []
    product = tensor * 2
    known, death = id(product.untyped_storage()), weakref.ref(product.untyped_storage(), deaths.append)
    kept = product.square()  # autograd keeps the product for its backward pass
    del product
    gc.collect()
    assert not deaths
    assert id(kept.grad_fn._saved_self.untyped_storage()) == known  # pyright: ignore
    del kept
    gc.collect()
    assert deaths == [death]
