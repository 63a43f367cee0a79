"""A second device for tests, on any machine: tensors that lie on "far" and compute on the CPU.

Within ``with Far():`` models, optimisers and commands run on the device "far". As with CUDA, an
operation that mixes it with the CPU raises, but for numbers without dimensions, indices and copies;
so the tests see every tensor that was made in the wrong place. What a GPU waits for (``.item()``,
``bool()``, ``nonzero``, copies to the host) is counted by the line of headprune that asked for it.

The device cannot be taken back once it is there, and "auto" would find it: use it in a process of
its own (``tests.forked``).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import headprune

aten = torch.ops.aten
OURS = str(Path(headprune.__file__).parent)

_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_INDEXING |= {aten._unsafe_index.Tensor, aten._index_put_impl_.default}
_WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
_WAITS |= {aten.is_nonzero.default, aten._linalg_check_errors.default}


def there_is_one():
    """Whether this torch can have a device that is written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


class FarTensor(Tensor):
    """A tensor that says it lies on "far"; its numbers are ``near``, on the CPU."""

    near: Tensor

    @staticmethod
    def __new__(cls, near):
        return Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            device=torch.device("far", 0),
        )

    def __init__(self, near):
        self.near = near

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo):
        return FarTensor(self.near.detach().clone()).requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _computed(op, args, kwargs or {})


def _map(change, value):
    """What is given to operations, with every tensor in it changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, part) for part in value])
    return change(value) if isinstance(value, Tensor) else value


def _tensors(args, kwargs):
    found = []
    _map(found.append, (args, tuple(kwargs.values())))
    return found


def _is_far(device):
    return device is not None and torch.device(device).type == "far"


def _computed(op, args, kwargs):
    """What an operation gives, on "far" if its inputs lie there or it is asked to."""
    if op is aten._fused_sdp_choice.default:
        return 0  # attention in plain products
    _refuse_mixed(op, args, kwargs)
    inputs = {id(t.near): t for t in _tensors(args, kwargs) if isinstance(t, FarTensor)}
    far = bool(inputs)
    if kwargs.get("device") is not None:
        far = _is_far(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")} if far else kwargs
    if op in _COPIES and op is not aten._to_copy.default:
        far = isinstance(args[0], FarTensor)

    def near(value):
        return value.near if isinstance(value, FarTensor) else value

    def lifted(value):
        known = inputs.get(id(value))  # what was changed in place
        if known is not None or not far:
            return value if known is None else known
        return FarTensor(value.resolve_conj().resolve_neg())

    here = {name: _map(near, value) for name, value in kwargs.items()}
    found = op(*_map(near, args), **here)
    if inputs and torch.Tag.inplace_view in op.tags:
        with torch._C._DisableTorchDispatch():  # the shape of the wrapper changes too
            op(*args, **kwargs)
    return _map(lifted, found)


def _refuse_mixed(op, args, kwargs):
    """Raises where CUDA would for tensors of two devices."""
    if op in _COPIES:
        return
    tensors = _tensors(args, kwargs)
    far = [t for t in tensors if isinstance(t, FarTensor)]
    if op in _INDEXING and isinstance(args[0], FarTensor):
        indices = {id(i) for i in args[1]}
        tensors = [t for t in tensors if id(t) not in indices]
    near = [t for t in tensors if not isinstance(t, FarTensor)]
    if torch.Tag.pointwise in op.tags or op in _INDEXING or "masked_fill" in str(op):
        near = [t for t in near if t.dim()]
    if far and near:
        raise RuntimeError(f"{op}: expected all tensors on one device, found far:0 and cpu")


class _InPython(TorchFunctionMode):
    """What torch does in Python, or in C++ above operations, with data that is no tensor yet."""

    def __init__(self, waited):
        super().__init__()
        self.waited = waited

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_far(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if not (args and isinstance(args[0], FarTensor)):
            return func(*args, **kwargs)
        if func is Tensor.data.__set__:
            args[0].near = args[1].near
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _as_tensors(args[1]), *args[2:])
        elif func is Tensor.data_ptr:
            return args[0].near.data_ptr()
        elif func is Tensor.tolist:
            self.waited("tolist")
            return args[0].near.tolist()
        elif func is Tensor.new_tensor:
            kwargs.setdefault("dtype", args[0].dtype)
            return torch.tensor(*args[1:], **kwargs).to(args[0].device)
        return func(*args, **kwargs)


def _as_tensors(index):
    """An index whose lists are tensors on "far"."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    if isinstance(index, list):
        made = torch.tensor(index)
        return (made if made.dtype is torch.bool else made.long()).to("far")
    return index


class _Backend(backend_registration._DummyBackendModule):
    """What ``torch.far`` is."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class Far(TorchDispatchMode):
    """There is a device "far" for the time of a ``with`` block.

    Attributes:
        waits: How often each line of headprune waited for the device.
        sent: The same, for lines that copied something to it.
    """

    registered: ClassVar = False

    def __init__(self):
        super().__init__()
        self.waits = Counter()
        self.sent = Counter()
        self._in_python = _InPython(self._waited)
        if not Far.registered:
            backend_registration._setup_privateuseone_for_python_backend("far", _Backend())
            Far.registered = True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waits(op, args, kwargs):
            self._waited(str(op))
        if self._sends(op, args, kwargs):
            self._noted(self.sent, str(op))
        return _computed(op, args, kwargs)

    def _waits(self, op, args, kwargs):
        if not any(isinstance(t, FarTensor) for t in _tensors(args, kwargs)):
            return False
        if op is aten._to_copy.default:
            return kwargs.get("device") is not None and not _is_far(kwargs["device"])
        if op is aten.copy_.default:
            return not isinstance(args[0], FarTensor)
        masks = op in _INDEXING and any(getattr(i, "dtype", 0) is torch.bool for i in args[1])
        return op in _WAITS or masks

    def _sends(self, op, args, kwargs):
        if op is aten._to_copy.default:
            return _is_far(kwargs.get("device")) and not isinstance(args[0], FarTensor)
        indices = args[1] if op in _INDEXING and isinstance(args[0], FarTensor) else ()
        return any(i is not None and not isinstance(i, FarTensor) for i in indices)

    def _waited(self, op):
        self._noted(self.waits, op)

    def _noted(self, counter, op):
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None:
            counter[f"{frame.f_code.co_filename[len(OURS) + 1 :]}:{frame.f_lineno} {op}"] += 1

    def __enter__(self):
        self._before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter changes its class
        self._in_python.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._in_python.__exit__(*error)
        torch.__future__.set_swap_module_params_on_conversion(self._before)
