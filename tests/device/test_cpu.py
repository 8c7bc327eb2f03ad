"""The CPU device runtime, call by call: what Megatron's training path asks of ``torch.cuda``."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from accel import device
from accel.device.cpu import collectives, factories, memory
from accel.patching import Applied

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the runtime for machines without CUDA"
)

needs_allocator = pytest.mark.skipif(
    memory.source() != "allocator", reason="needs the native library"
)


@pytest.fixture(autouse=True)
def runtime() -> Iterator[Applied]:
    """Installed for this package, which therefore sees a cuda device."""
    installed = device.select("cpu").install(("tests",))
    yield installed
    if installed.bindings:
        installed.undo()


def elsewhere(code: str) -> object:
    """Evaluate an expression as a module outside the audience would."""
    return eval(code, {"__name__": "somebody.else", "torch": torch})


@pytest.mark.parametrize(
    "place", ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 3)]
)
def test_every_way_to_name_the_device_means_the_host(place: object) -> None:
    x = torch.ones(2)
    made = [
        torch.empty(2, device=place),
        torch.tensor([1.0, 2.0], device=place),
        torch.arange(2, device=place, dtype=torch.float32),
        torch.full((2,), 3.0, device=place, pin_memory=True),
        torch.zeros_like(x, device=place),
        x.new_zeros(2, device=place),
        x.to(place),
        x.to(place, torch.float32, non_blocking=True),
        x.to(device=place, dtype=torch.float32),
        torch.nn.Linear(2, 2, device=place).weight,
    ]
    assert {t.device.type for t in made} == {"cpu"}


def test_cuda_method_and_module_cuda_stay_here() -> None:
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.cuda(1, non_blocking=True) is x
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"


def test_other_devices_keep_their_meaning() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    with torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"


def test_an_expanded_tensor_has_elements_of_its_own_on_the_device() -> None:
    for move in (lambda t: t.cuda(), lambda t: t.to("cuda"), lambda t: t.to(device="cuda:0")):
        row = torch.arange(3)
        moved = move(row.expand(2, 3))
        moved[0, 0] = 7
        assert moved.tolist() == [[7, 1, 2], [0, 1, 2]]
        assert row.tolist() == [0, 1, 2]


def test_audience_hears_cuda_everybody_else_the_truth() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert x.is_cuda
    assert x.type() == "torch.cuda.BFloat16Tensor"
    assert not elsewhere("torch.cuda.is_available()")
    assert not elsewhere("torch.ones(1).is_cuda")
    assert elsewhere("torch.ones(1).type()") == "torch.FloatTensor"


def test_type_strings_convert_both_ways() -> None:
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.float16


def test_cpu_copy_is_a_copy() -> None:
    """An asynchronous checkpoint writer must not see the next step's weights."""
    x = torch.ones(2)
    copies = x.cpu(), x.to("cpu"), x.to(device="cpu"), x.to(torch.device("cpu"))
    x.zero_()
    assert all(c.sum() == 2 for c in copies)


def test_device_index() -> None:
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0


def test_streams_and_events() -> None:
    side = torch.cuda.Stream()
    outer = torch.cuda.current_stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        side.wait_stream(outer)
        torch.ones(200, 200) @ torch.ones(200, 200)
        end.record(side)
    outer.wait_event(end)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() is outer
    assert 0 < start.elapsed_time(end) < 10_000
    assert end.query()
    torch.ones(1).record_stream(side)
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(end)


def test_device_random_stream_is_saved_and_restored() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)
    assert torch.cuda.default_generators[0].get_state().numel() == state.numel()


def test_default_generators_end() -> None:
    assert list(itertools.islice(torch.cuda.default_generators, 3)) == [torch.default_generator]


def test_marks_for_a_profiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch without CUDA refuses `--profile`."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("PyTorch was compiled without CUDA")

    monkeypatch.setattr(torch.autograd.profiler, "_enable_profiler", refuse)
    with torch.autograd.profiler.emit_nvtx(record_shapes=True) as marks:
        assert isinstance(marks, torch.autograd.profiler.emit_nvtx)


@pytest.mark.parametrize("older", [False, True], ids=["", "than the import"])
def test_gloos_threads_end_before_python_does(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(collectives.atexit, "register", lambda *call: registered.append(call))
    collectives._let_threads_end_at_exit.cache_clear()
    if older:
        stock = inspect.unwrap(dist.init_process_group)
        stock("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert not registered
        dist.new_group([0])
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert registered == [(time.sleep, collectives.EXIT_SECONDS)]


def test_host_stream_is_apart_for_the_audience_only() -> None:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    torch.rand(5)
    assert torch.equal(torch.get_rng_state(), host), "device draws leave the host's stream alone"
    before = elsewhere("torch.get_rng_state()")
    torch.rand(5)
    assert not torch.equal(elsewhere("torch.get_rng_state()"), before)  # type: ignore[arg-type]


def test_of_all_devices_states_this_ones_is_set() -> None:
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.cuda.get_rng_state(), states[torch.cuda.current_device()])


@pytest.mark.parametrize("place", ["cuda", "cuda:1", 0, torch.device("cuda"), "cpu", None])
def test_a_generator_for_cuda_is_the_hosts(place: object) -> None:
    made = torch.Generator() if place is None else torch.Generator(device=place)  # type: ignore[arg-type]
    assert type(made) is torch._C.Generator
    assert made.device == torch.device("cpu")
    expected = torch._C.Generator()
    drawn = [torch.rand(3, generator=g.manual_seed(5), device="cuda") for g in (made, expected)]
    assert torch.equal(*drawn)


def test_generators_are_of_the_kind_that_they_were(runtime: Applied) -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    with pytest.raises(RuntimeError, match="nowhere"):
        torch.Generator("nowhere")
    runtime.undo()
    assert torch.Generator is torch._C.Generator


class _Slow(torch.utils.data.Dataset):
    """Whose items come once the file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while index and not self.file.exists():
            time.sleep(0.01)
        return index


def test_a_loader_that_waits_in_a_thread_leaves_the_devices_draws_alone(tmp_path: Path) -> None:
    torch.cuda.manual_seed(7)
    expected = [torch.rand(1) for _ in range(4)]
    torch.cuda.manual_seed(7)
    file = tmp_path / "go"
    batches = iter(torch.utils.data.DataLoader(_Slow(file), batch_size=1, num_workers=1))
    assert int(next(batches)) == 0
    came: list[int] = []
    thread = threading.Thread(target=lambda: came.append(int(next(batches))))
    thread.start()
    time.sleep(0.2)
    found = [torch.rand(1) for _ in range(2)]
    assert not came, "it waits"
    file.touch()
    thread.join(60)
    found += [torch.rand(1) for _ in range(2)]
    assert came == [1]
    assert found == expected


def test_philox_state_of_a_cuda_run_seeds_this_generator(caplog: pytest.LogCaptureFixture) -> None:
    philox = torch.arange(16, dtype=torch.uint8)
    torch.cuda.set_rng_state(philox)
    first = torch.rand(3)
    torch.cuda.set_rng_state(philox)
    assert torch.equal(torch.rand(3), first)
    assert "CUDA run" in caplog.text


@needs_allocator
def test_memory_figures_are_the_allocators() -> None:
    num_bytes = 64 * 2**20
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(num_bytes, dtype=torch.uint8)
    held = torch.cuda.memory_allocated() - before
    del x
    assert num_bytes <= held < 1.01 * num_bytes
    assert torch.cuda.memory_allocated() - before < num_bytes
    assert torch.cuda.max_memory_allocated() - before >= num_bytes
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
    assert stats["num_alloc_retries"] == 0


@pytest.mark.parametrize("lacks", ["the native library", "malloc"])
def test_memory_has_figures_where_nothing_counts(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "malloc":
        monkeypatch.setattr(memory.platform, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(memory._native, "reason", lambda: "not built")
    assert memory.source() == "resident set"
    assert torch.cuda.max_memory_allocated() >= 10 * 2**20
    assert torch.cuda.memory_allocated() > 10 * 2**20


@needs_allocator
def test_memory_fraction_is_a_limit() -> None:
    _, total = torch.cuda.mem_get_info()
    assert torch.cuda.get_per_process_memory_fraction() == 1
    ooms = torch.cuda.memory_stats()["num_ooms"]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**20) / total)
    assert 0 < torch.cuda.get_per_process_memory_fraction() < 1
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room for 4194304 bytes"):
        torch.empty(2**20, device="cuda")
    assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(0.5)
    torch.cuda.set_per_process_memory_fraction(0.0, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.get_per_process_memory_fraction() == 1
    torch.empty(2**20)


def test_memory_fraction_takes_what_torch_takes() -> None:
    for fraction in (1, True, "0.5", None):
        with pytest.raises(TypeError, match="must be `float`"):
            torch.cuda.set_per_process_memory_fraction(fraction)
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="Allowed range: 0~1"):
            torch.cuda.set_per_process_memory_fraction(fraction)


def test_a_limit_needs_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory._native, "reason", lambda: "not built; build it so")
    with pytest.raises(RuntimeError, match="cannot be enforced: not built; build it so"):
        torch.cuda.set_per_process_memory_fraction(0.5)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.get_per_process_memory_fraction() == 1
    x = torch.ones(2)
    assert x.pin_memory() is x
    assert torch.ones(2, pin_memory=True).sum() == 2


@needs_allocator
def test_limit_in_bytes_for_a_while() -> None:
    outer = memory.memory_allocated() + 2**30
    with memory.limit(outer):
        with pytest.raises(torch.OutOfMemoryError), memory.limit(memory.memory_allocated() + 2**20):
            torch.empty(2**20)
        assert memory._limit() == outer
        with memory.limit(None):
            assert memory._limit() is None
        assert memory._limit() == outer
    assert memory._limit() is None
    for num_bytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1 byte, or None"):
            memory.set_limit(num_bytes)


@needs_allocator
def test_limit_ends_with_the_runtime(runtime: Applied) -> None:
    memory.set_limit(1)
    runtime.undo()
    torch.empty(2**20)
    assert memory._limit() is None


@needs_allocator
def test_pinned_memory_is_not_the_devices() -> None:
    x = torch.arange(6.0, requires_grad=True)
    column = torch.arange(6.0).view(2, 3).t()
    before = torch.cuda.memory_allocated()
    pinned = [
        torch.empty(2**20, pin_memory=True),
        torch.full((2**20,), 3.0, device="cpu", pin_memory=True),
        torch.tensor([1.0, 2.0], pin_memory=True),
        torch.zeros_like(x, pin_memory=True),
        x.new_ones(2, pin_memory=True),
        x.pin_memory(),
        column.pin_memory(),
    ]
    assert torch.cuda.memory_allocated() == before
    assert all(p.pin_memory() is p for p in pinned)
    with memory.limit(1):
        torch.empty(2**20, pin_memory=True)
    assert torch.equal(pinned[-1], column)
    assert pinned[-1].stride() == column.stride()
    pinned[-2].sum().backward()
    assert torch.equal(x.grad, torch.ones(6))
    torch.empty(2**20, pin_memory=False)  # counted: the peak says so
    assert torch.cuda.max_memory_allocated() >= before + 4 * 2**20


def test_tensors_without_memory_of_their_own_move_too() -> None:
    x = torch.ones(3, 2)
    assert torch.func.vmap(lambda t: t.to("cuda") + t.cuda())(x).sum() == 12
    assert torch.equal(torch.func.grad(lambda t: t.to("cuda").pin_memory().sum())(x), x)
    assert torch.empty(2, device="meta").pin_memory().device.type == "meta"
    with FakeTensorMode():
        assert torch.empty(2, pin_memory=True).cuda().pin_memory().shape == (2,)


@needs_allocator
def test_pinned_memory_goes_to_where_a_tensor_is() -> None:
    pinned, there = torch.arange(3.0).pin_memory(), torch.ones(1)
    for moved in (pinned.to(there), pinned.to(tensor=there)):
        assert moved.data_ptr() != pinned.data_ptr()
        assert torch.equal(moved, pinned)
    assert pinned.to(torch.ones(1).pin_memory()) is pinned


def test_pinned_memory_is_apart_from_what_it_copies() -> None:
    x = torch.ones(2**20)
    before = torch.cuda.memory_allocated()
    host = x.pin_memory()
    x.zero_()
    assert host.sum() == 2**20
    for move in (lambda t: t.cuda(), lambda t: t.to("cuda"), lambda t: t.to(device=0)):
        moved = move(host)
        assert torch.cuda.memory_allocated() >= before + x.nbytes
        assert moved.data_ptr() != host.data_ptr()
        del moved
    assert torch.cuda.memory_allocated() == before


def test_surface() -> None:
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory > 2**28
    assert torch.cuda.get_device_name()
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("x"):
        pass
    torch.cuda.empty_cache()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.temperature() == 0
    ran = []
    torch.cuda._lazy_call(lambda: ran.append(1))
    assert ran == [1]


def test_accelerator_of_a_cuda_build_without_a_driver() -> None:
    assert torch.accelerator.current_accelerator() is None
    assert not torch.accelerator.is_available()
    torch.accelerator.set_device_index(2)
    assert torch.accelerator.current_device_index() == 2 == torch.cuda.current_device()
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().query()


def test_data_loader_with_pinned_memory() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    assert [b[0].tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.ones(2).pin_memory().device.type == "cpu"


def test_optimizer_step_passes_the_graph_capture_check() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert weight[0] != 1


def test_dynamo_keeps_its_rules_for_torchs_own_functions(runtime: Applied) -> None:
    """``init_process_group`` makes Dynamo look all functions up again, by name."""
    own = torch.empty_like.__wrapped__  # type: ignore[attr-defined]

    def imported_by_name(x: torch.Tensor) -> torch.Tensor:
        return own(x).copy_(x)

    def asked_of_torch(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, device="cuda").copy_(x)

    try:
        torch._dynamo.trace_rules.clear_lru_cache()
        for fn in (imported_by_name, asked_of_torch):
            program = torch._dynamo.optimize(nopython=True, backend="aot_eager")(fn)
            assert program(torch.ones(2)).tolist() == [1, 1]
        runtime.undo()
        assert torch.empty_like is own
        program = torch.compile(imported_by_name, backend="aot_eager", fullgraph=True)
        assert program(torch.ones(3)).tolist() == [1, 1, 1]
    finally:
        torch._dynamo.trace_rules.clear_lru_cache()


def test_compile_is_off_for_fusers_and_real_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert torch.compile(fn) is fn
    assert torch.compile(dynamic=True)(fn) is fn
    assert (
        eval("torch.compile(fn)", {"__name__": "somebody.else", "torch": torch, "fn": fn}) is not fn
    )
    monkeypatch.setenv("ACCEL_CPU_COMPILE", "1")
    assert torch.compile(fn) is not fn


def test_load_brings_cuda_tensors_here(tmp_path: object) -> None:
    file = f"{tmp_path}/x.pt"
    torch.save({"x": torch.ones(2)}, file)
    for location in ("cuda:0", torch.device("cuda"), None, "cpu", lambda storage, place: storage):
        assert torch.load(file, map_location=location)["x"].device.type == "cpu"
    locations = {"cuda:1": "cuda:0", "cpu": "cuda:3"}
    assert torch.load(file, map_location=locations)["x"].device.type == "cpu"
    assert factories._Locations(locations).get("cuda:7", "cuda:7") == "cpu"
    assert locations["cuda:1"] == "cuda:0", "the caller's is left alone"


def test_autocast_for_cuda_is_autocast_here() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with torch.autocast("cuda"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    with torch.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("module", [torch.amp, torch.amp.autocast_mode])
def test_a_function_written_for_cuda_has_its_backward_under_autocast_too(module: Any) -> None:
    """As Megatron's linear layers, which keep the operands of before the casts."""

    class Product(torch.autograd.Function):
        @staticmethod
        @module.custom_fwd(device_type="cuda")
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @functools.partial(module.custom_bwd, device_type="cuda")
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return dy @ w.T, x.T @ dy

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = Product.apply(x, w)
        assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert w.grad is not None


def test_undo_restores_every_binding(runtime: Applied) -> None:
    bindings = list(runtime.bindings)
    assert len(bindings) > 100
    runtime.undo()
    for b in bindings:
        now = vars(b.owner).get(b.name)
        assert now is b.before or (now is None and "absent" in repr(b.before)), str(b)
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_choice_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCEL_DEVICE", raising=False)
    assert device.select().name == "cpu"
    monkeypatch.setenv("ACCEL_DEVICE", "tpu")
    with pytest.raises(ValueError, match="ACCEL_DEVICE='tpu': use auto, cpu, cuda, npu"):
        device.select()
    monkeypatch.setattr(device, "_has_cuda", lambda: False)
    with pytest.raises(ValueError, match="no cuda device on this machine"):
        device.select("cuda")
    monkeypatch.setattr(device, "_has_npu", lambda: True)
    assert device.select("auto").name == "npu"


def test_an_npu_that_says_it_is_cuda_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-npu's transfer_to_npu, imported before accel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not device._has_cuda()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)  # as PyPI's for x86 is
    assert device._has_cuda()
    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", types.ModuleType("it"))
    assert not device._has_cuda()


def test_a_torch_npu_that_cannot_be_imported_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ACCEL_DEVICE", raising=False)
    assert device.select().name == "cpu"
    assert "torch-npu is installed, and cannot be imported: libhccl.so" in caplog.text
    caplog.clear()
    assert device.select("cpu").name == "cpu"
    assert not caplog.text, "nobody asked for it"


def test_cuda_changes_nothing() -> None:
    from accel.device import cuda

    assert cuda.install(("tests",)).bindings == []


def test_npu_loads_torch_npu_and_its_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from accel.device import npu
    from accel.patching import PatchError

    for name in ("torch_npu", "torch_npu.contrib", "torch_npu.contrib.transfer_to_npu"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(PatchError, match="cannot be undone"):
        npu.install(("tests",)).undo()


def test_a_forked_stream_leaves_the_hosts_as_it_was() -> None:
    torch.manual_seed(3)
    host, on_device = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(42)
    assert torch.equal(torch.random.get_rng_state(), host)
    assert torch.equal(torch.cuda.get_rng_state(), on_device)
    with torch.random.fork_rng(enabled=False):
        torch.manual_seed(42)
    assert not torch.equal(torch.random.get_rng_state(), host)


@needs_allocator
def test_what_came_from_the_device_is_copied_back_to_it() -> None:
    weight = torch.ones(1 << 18, device="cuda")
    before = torch.cuda.memory_allocated()
    snapshots = weight.cpu(), weight.to("cpu")
    assert torch.cuda.memory_allocated() == before
    for snapshot in snapshots:
        for back in (snapshot.cuda(), snapshot.to("cuda")):
            back.add_(5)
            assert snapshot[0] == 1


@needs_allocator
def test_a_copy_in_another_dtype_or_order_is_the_hosts_too() -> None:
    weight = torch.ones(1, 64, 64, 64, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    snapshots = (
        weight.to("cpu", torch.float32),
        weight.to(device="cpu", dtype=torch.float32),
        weight.to("cpu", copy=True),
        weight.cpu(memory_format=torch.channels_last),
    )
    assert torch.cuda.memory_allocated() == before
    for snapshot in snapshots:
        snapshot.cuda().zero_()
        assert snapshot.flatten()[0] == 1


@needs_allocator
def test_the_peak_is_never_below_what_is_held() -> None:
    """Though another thread allocates while it begins anew."""
    over = threading.Event()

    def resetting() -> None:
        while not over.is_set():
            torch.cuda.reset_peak_memory_stats()

    thread = threading.Thread(target=resetting)
    thread.start()
    try:
        for _ in range(2_000):
            held = torch.empty(1 << 12)
            assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
            del held
    finally:
        over.set()
        thread.join()


def test_a_group_without_a_backend_has_the_default_groups() -> None:
    """As for `--fake-process-group`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        groups = [dist.new_group([0, 1], backend=None), dist.new_group([0, 1], None, None)]
        assert [dist.get_backend(group) for group in groups] == ["fake"] * 2
    finally:
        dist.destroy_process_group()
