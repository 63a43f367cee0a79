"""Element types by the names that users and safetensors give them."""

from __future__ import annotations

import torch
from torch import Tensor

# as the safetensors format names them
SAFETENSORS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    "F8_E8M0": torch.float8_e8m0fnu,  # scales of blocks
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    "BOOL": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def in_float32(values: Tensor) -> Tensor:
    """Values in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
