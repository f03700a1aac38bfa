"""Values for the emulated device, where CUDA kernels compute nothing: after an operator's CUDA kernel has run, with its
allocations, the CPU kernel of the same operator writes its results into the same memory.

Operators with more than EMULATED_VALUES_MAX bytes of arguments and results (default 32 MiB) get no values: their large
results keep what was in the memory, mostly zeros, and small ones are set to zero, so that losses and norms are finite
and large models run to their end. With EMULATED_LATE the CPU kernel is queued on the stream (late.py).
EMULATED_REPORT=1 prints to stderr which operators got no value.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.emulated_cuda import late
from tests.emulated_cuda.otherwise import OTHERWISE
from tests.emulated_cuda.overlay import as_tensor, in_fp32, is_strided, on_cpu, over, write

WITHOUT_VALUES = set[str]()  # the operators that were left without values so far
MOST_BYTES = int(os.environ.get("EMULATED_VALUES_MAX") or 32 << 20)
IS_REPORTED = os.environ.get("EMULATED_REPORT") == "1"
# Operators that only allocate, make a view, need no value, or get theirs without a kernel.
LEFT_ALONE = {
    "empty.memory_format",
    "empty_strided",
    "as_strided",
    "as_strided_",
    "view",
    "view.dtype",
    "unfold",
    "alias",
    "_reshape_alias",
    "resize_",
    "_resize_output_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_.source_Tensor_storage_offset",
    "is_set_to",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_local_scalar_dense",
    "_copy_from_and_resize",
    "_has_compatible_shallow_copy_type",
    "new_empty_strided",
    "_fused_sdp_choice",
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
}
# pow.Scalar calls it with a scalar on the device, which can't be passed to Python code.
LEFT_ALONE |= {"pow.Tensor_Tensor", "pow.Tensor_Tensor_out"}
# Operators whose results have sizes that depend on values: the CUDA kernel would count uninitialised memory.
SIZE_BY_VALUE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}


@final
class Valued:
    """Replaces the CUDA kernel of an operator: runs it, then writes the CPU's values into its results.

    Args:
        operator: the operator of ATen.
        kernel: its CUDA kernel.
    """

    def __init__(self, operator: Any, kernel: Any, name: str) -> None:
        self.operator, self.kernel, self.name = operator, kernel, name
        self.returns, arguments = operator._schema.returns, operator._schema.arguments
        self.writes = any(argument.alias_info and argument.alias_info.is_write for argument in arguments)
        self.is_fresh = any(each.alias_info is None for each in self.returns)
        self.is_view = bool(self.returns) and not self.writes and not self.is_fresh
        self.compute: Callable[..., Any] = OTHERWISE.get(name) or operator
        self._tensors = [
            place for place, each in enumerate(arguments) if str(each.type) == "Tensor" and not each.kwarg_only
        ]
        self._is_random = torch.Tag.nondeterministic_seeded in operator.tags
        self._is_at_once = self._is_random or late.is_at_once(name, self.returns)
        self._has_failed = False

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        args = self._without_numbers(args)
        is_captured = torch._C._cuda_isCurrentStreamCapturing()
        if self.name in SIZE_BY_VALUE and not is_captured:
            return self._sized_by_value(args, kwargs)
        seed = seed_of(args, kwargs) if self._is_random and not is_captured else None
        result = self.kernel.call_boxed(keys, *args, **kwargs)
        if is_captured:
            return result
        if not can_have_values(tree_leaves((args, kwargs, result))):
            WITHOUT_VALUES.add(self.name)
            return self._blanked(result)
        if late.IS_LATE and not self._is_at_once and late.enqueue(self, args, kwargs, result):
            return result
        late.finish()
        with seeded(seed):
            values = self.values(*tree_map(on_cpu, (args, kwargs)))
        return result if values is None else self._written(result, values)

    def _without_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(isinstance(args[place], Tensor) for place in self._tensors if place < len(args)):
            return args
        others = [arg for arg in args if isinstance(arg, Tensor)]
        return tuple(as_tensor(arg, others) if place in self._tensors else arg for place, arg in enumerate(args))

    def _sized_by_value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        late.finish()
        args_on_cpu, kwargs_on_cpu = tree_map(on_cpu, (args, kwargs))
        with torch.no_grad():
            values = self.operator(*args_on_cpu, **kwargs_on_cpu)
        return tree_map(lambda value: moved(value, args[0].device), values)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The CPU kernel's results for CPU tensors; None if it fails. If it fails and doesn't write into its arguments,
        it is tried again in fp32, for dtypes that only CUDA supports."""
        with torch.no_grad():
            try:
                return self.compute(*args, **kwargs)
            except Exception as error:
                if self.writes:
                    return self._report(error)
            try:
                return self.operator(*tree_map(in_fp32, args), **tree_map(in_fp32, kwargs))
            except Exception as error:
                return self._report(error)

    def _report(self, error: Exception) -> None:
        if IS_REPORTED and not self._has_failed:
            print(f"emulated: no value for {self.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        self._has_failed = True

    def fresh(self, result: Any, values: Any) -> Iterable[tuple[Any, Any]]:
        """Each result that isn't one of the arguments, with its value."""
        results = [result] if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else []
        given = list(values) if isinstance(values, tuple | list) else [values]
        kinds = list(self.returns) * (len(results) if len(self.returns) == 1 else 1)
        for each, value, kind in zip(results, given + [None] * (len(results) - len(given)), kinds, strict=True):
            if kind.alias_info is None:
                yield each, value

    def _blanked(self, result: Any) -> Any:
        """The results of an operator without values, with zeros in the small ones."""
        for each, _ in self.fresh(result, None) if self.is_fresh else []:
            if is_strided(each) and each.device.type == "cuda" and each.nbytes <= MOST_BYTES:
                over(each).zero_()
        return result

    def _written(self, result: Any, values: Any) -> Any:
        if isinstance(result, bool | int | float):
            return values
        if self.is_fresh and isinstance(result, Tensor) and is_of_other_size(result, values):
            return moved(values.to(result.dtype), result.device)
        for each, value in self.fresh(result, values) if self.is_fresh else []:
            if isinstance(each, Tensor) and isinstance(value, Tensor) and each.device.type == "cuda":
                write(over(each), value)
        return result


def seed_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The seed for the CPU's generator. Before the device's generator has drawn anything it is the same seed, so that
    both draw the same numbers; afterwards it is a hash of the generator's state, which changes with each draw."""
    given = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
    state = bytes((given or torch.cuda.default_generators[torch.cuda.current_device()]).get_state().tolist())
    seed, offset = struct.unpack("<2Q", state)
    return zlib.crc32(state) if offset else seed


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside it the CPU's generator is seeded by `seed`; afterwards it continues as if nothing had been drawn."""
    if seed is None:
        yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def moved(value: Tensor, device: torch.device) -> Tensor:
    result = torch.empty(value.shape, dtype=value.dtype, device=device)
    write(over(result), value)
    return result


def is_of_other_size(result: Tensor, value: Any) -> bool:
    """Whether the result's size depends on values, as that of `unique` does."""
    if not isinstance(value, Tensor) or not value.numel() or result.shape == value.shape:
        return False
    is_padded = result.dim() == value.dim() and result.numel() >= value.numel() and result.numel() > 0
    return not is_padded and result.numel() != value.numel()


def can_have_values(leaves: list[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if is_strided(tensor))
    is_here = all(is_strided(tensor) and tensor.device.type in ("cuda", "cpu") for tensor in tensors)
    return is_here and num_bytes <= MOST_BYTES


def install() -> torch.library.Library:
    """Replace each CUDA kernel of ATen by a `Valued`, for as long as the returned library is alive."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
        for name in sorted({*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"}):
            space, _, name = name.partition("::")
            if space == "aten" and name not in LEFT_ALONE:
                _replace(library, name)
    return library


def _replace(library: torch.library.Library, name: str) -> None:
    packet, _, overload = name.partition(".")
    try:
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        valued = Valued(operator, torch.library.get_kernel(operator, "CUDA"), name)
        if not valued.is_view:
            library.impl(name, valued.__call__, "CUDA", with_keyset=True, allow_override=True)
    except Exception as error:
        if IS_REPORTED:
            print(f"emulated: {name} stays CUDA's: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
