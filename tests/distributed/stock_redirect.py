"""A second, independent redirect of ``torch.cuda`` to the host, to compare preset ``off`` with.

It shares no code and no idea with ``accel.device.cpu``: a function mode that rewrites devices in
every call, and a handful of replaced functions. Just enough for a few iterations on a CPU; no
memory figures, no undo.
"""

import types

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _ToHost(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.is_cuda.__get__:
            return True
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to:
            args = tuple(_host(a) for a in args)
        return func(*args, **kwargs)


def _host(device):
    if isinstance(device, torch.dtype | torch.Tensor | bool) or device is None:
        return device
    return torch.device("cpu") if isinstance(device, int) or "cuda" in str(device) else device


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: 0.0

    def record_event(self, *args):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def _quiet():
    """A new do-nothing each time: dynamo wants no object under two names."""
    return lambda *args, **kwargs: 0


cuda = torch.cuda
for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
    setattr(cuda, name, _quiet())
for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
    setattr(cuda, name, _quiet())
cuda.is_available = lambda: True
cuda.current_device = lambda: 0
cuda.device_count = lambda: 8
cuda.current_stream, cuda.default_stream = lambda *args: _Stream(), lambda *args: _Stream()
cuda.Stream, cuda.Event = type("Stream", (_Stream,), {}), type("Event", (_Stream,), {})
cuda.stream = lambda s: _Stream()
cuda.device = type("device", (_Stream,), {})
cuda.get_device_capability = lambda *args: (8, 0)
cuda.get_device_properties = lambda *args: types.SimpleNamespace(
    name="host", total_memory=1, major=8, minor=0
)
cuda.memory_stats = lambda *args: dict.fromkeys(
    ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocation.all.current"), 0
)
cuda._lazy_init = _quiet()
cuda._lazy_call = lambda f, **kwargs: f()
cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: (
    torch.default_generator.get_state()
)
cuda.set_rng_state = cuda.random.set_rng_state = lambda s, *args, **kwargs: (
    torch.default_generator.set_state(s)
)
cuda.manual_seed = cuda.random.manual_seed = lambda s: torch.default_generator.manual_seed(s)
cuda.default_generators = [torch.default_generator]
cuda.is_current_stream_capturing = lambda: False
torch.accelerator.is_available = lambda: False
torch.compile = lambda f=None, **kwargs: f if f is not None else (lambda g: g)

_init, _new = dist.init_process_group, dist.new_group


def _init_gloo(*args, backend=None, device_id=None, pg_options=None, **kwargs):
    _init(backend="gloo", **kwargs)


def _new_gloo(ranks=None, timeout=None, backend=None, pg_options=None, **kwargs):
    return _new(ranks, timeout, backend="gloo", **kwargs)


_exchange = dist.all_to_all_single


def _exchange_by_lists(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
    """On CUDA the dispatcher has brought the sizes to the host by then, as an array."""
    sizes = (output_split_sizes, input_split_sizes)
    return _exchange(
        output, input, *(None if s is None else [*map(int, s)] for s in sizes), **kwargs
    )


_make_loader = torch.utils.data.DataLoader.__init__


def _loader_with_a_stream_of_its_own(self, *args, generator=None, **kwargs):
    """On CUDA a data loader draws on the host's stream, which leaves the device's alone."""
    _make_loader(self, *args, generator=generator or torch.Generator(), **kwargs)


torch.utils.data.DataLoader.__init__ = _loader_with_a_stream_of_its_own
dist.init_process_group, dist.new_group = _init_gloo, _new_gloo
dist.all_to_all_single = _exchange_by_lists
_ToHost().__enter__()

from megatron.core.datasets import utils  # noqa: E402  (after the redirect)

utils.compile_helpers = (
    _quiet  # the wheel brings them compiled, without the Makefile that this would run
)
