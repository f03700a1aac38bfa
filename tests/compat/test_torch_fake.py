"""Private names of torch's fake tensors."""

from __future__ import annotations

import pytest
import torch

from tests.compat.sentences import needed

CPU, META = torch.device("cpu"), torch.device("meta")


@needed("torch._subclasses.fake_tensor.FakeTensor", by="mode=plan")
def test_fake_tensors_say_where_they_seem_to_be() -> None:
    from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode, is_fake

    with FakeTensorMode() as mode:
        tensor = torch.empty(3)
    assert type(tensor) is FakeTensor
    assert (tensor.fake_mode, tensor.fake_device, tensor.constant) == (mode, CPU, None)
    assert is_fake(tensor)
    assert not is_fake(torch.empty(3))
    assert not is_fake(torch.empty(3, device=META))


@needed("torch._subclasses.fake_tensor.FakeTensorMode", by="mode=plan")
def test_nothing_inside_the_mode_has_memory_or_values() -> None:
    from lowvram.compat.torch_fake import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        large = torch.empty(2**45) + torch.ones(2)[0]  # 128 TiB
        assert large.device == CPU
        assert mode.from_tensor(torch.zeros(2, device=META)).fake_mode is mode
        with pytest.raises(Exception, match=r"item|scalar|data") as failure:
            large[0].item()
    assert "DataDependentOutputException" in [kind.__name__ for kind in failure.type.__mro__]


@needed("torch._subclasses.fake_tensor.unset_fake_temporarily", by="a plan of sharding=fsdp")
def test_a_lifted_mode_makes_real_tensors() -> None:
    from lowvram.compat.torch_fake import FakeTensorMode, is_fake, without_fake_mode

    with FakeTensorMode():
        with without_fake_mode():
            assert torch.ones(()).item() == 1
        assert is_fake(torch.ones(()))


@needed("torch._C._get_dispatch_mode, _unset_dispatch_mode, _set_dispatch_mode", by="a plan's cache")
def test_a_mode_is_left_and_entered_again() -> None:
    from lowvram.compat.torch_fake import (
        FakeTensorMode,
        current_fake_mode,
        enter_fake_mode,
        is_fake,
        leave_fake_mode,
    )

    assert current_fake_mode() is None
    with FakeTensorMode() as mode:
        assert current_fake_mode() is mode
        leave_fake_mode()
        assert current_fake_mode() is None
        assert not is_fake(torch.empty(1))
        enter_fake_mode(mode)
        assert current_fake_mode() is mode
        assert is_fake(torch.empty(1))
    assert current_fake_mode() is None


@needed("torch._C._dispatch_keys", by="a plan's cache")
def test_keys_tell_what_shapes_do_not() -> None:
    from lowvram.compat.torch_fake import dispatch_keys

    tensor = torch.ones(2, dtype=torch.complex64)
    assert dispatch_keys(tensor).raw_repr() == dispatch_keys(tensor * 2).raw_repr()
    assert dispatch_keys(tensor).raw_repr() != dispatch_keys(tensor.conj()).raw_repr()
    assert dispatch_keys(tensor).raw_repr() != dispatch_keys(torch.ones(2, device=META)).raw_repr()


@needed("torch.Tensor._make_subclass", by="a plan's cache")
def test_a_fake_tensor_that_is_made_fast_is_like_torchs() -> None:
    from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode, dispatch_keys, fake_tensor_of

    mode = FakeTensorMode()
    slow, bare = FakeTensor(mode, torch.empty(2, 3, device=META), CPU), torch.empty(2, 3, device=META)
    fast = fake_tensor_of(bare, CPU, vars(FakeTensor(mode, torch.empty(0, device=META), CPU)))
    assert type(fast) is type(slow)
    assert vars(fast) == vars(slow)
    assert (fast.shape, fast.stride(), fast.dtype, fast.device) == (slow.shape, slow.stride(), slow.dtype, slow.device)
    assert dispatch_keys(fast).raw_repr() == dispatch_keys(slow).raw_repr()
    with mode:
        assert (fast @ fast.T).shape == (2, 2)


@needed("torch._subclasses.fake_tensor.FakeTensorMode", by="trials of models")
def test_a_number_may_be_guessed() -> None:
    from lowvram.compat.torch_fake import GuessingFakeTensorMode

    with GuessingFakeTensorMode():
        assert torch.zeros(3).sum().item() == 1.0
        assert torch.zeros((), dtype=torch.long).item() == 1
        assert bool(torch.zeros(3).any()) is True
