"""Breakdown of a GPU's step time, from events named like real kernels, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cli.show import show
from harness.analysis.summary import AT_RATE, BELOW_RATE, gpu_time
from harness.cell.cell import Cell
from harness.launch.outcome import Outcome
from harness.measure.step_breakdown import Event, Kind, breakdown, gpu_parts, kernel_kind
from harness.record.plan import Plan
from harness.record.profile_record import COMPONENTS, GPU_PARTS, ProfileRecord
from harness.record.store import Results, Store
from harness.record.trial import SpeedMeasurement, matmul_rate
from harness.run.metrics import Peaks, peaks_of
from harness.run.profile import profile_record
from harness.run.runner import Runner
from harness.worker.rank_answer import RankAnswer
from harness.worker.rank_profile import events_of
from harness.workloads import make_workload
from tests import commands
from tests.conftest import ROOT
from tests.gpu.fake_nvml import h100_node, install
from tests.unit.html_page import page_of
from tests.unit.made_results import stored, trial_rows
from tests.unit.test_explain import answer

CELL = Cell(strategy="ddp", devices=2, device="cuda", precision="bf16", global_batch=8)
MEASURED = SpeedMeasurement.read(
    Store(ROOT / "results/reference/h200-141gb").load(steps=False).runs["device_speed"].iloc[0]
)
assert MEASURED
assert MEASURED.speed
SPEED = MEASURED.speed.matmul_flops_per_second
FAILED = SpeedMeasurement(None, "no CUDA-capable device is detected")
LISTS = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "device matmul",
            [
                "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_tn>",
                "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16>",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
                "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<float_e4m3_t>>",
                "triton_tem_fused_mm_0",
                "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw",
                "cudnn::cnn::wgrad2d_grouped_direct_kernel",
            ],
        ),
        (
            "device attention",
            [
                "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x64",
                "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Kernel)",
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>",
                "triton_tem_fused_flex_attention_1",
            ],
        ),
        (
            "device update",
            [
                f"{LISTS}<4>, FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
                f"{LISTS}<3>, PointwiseOpListFunctor<float, 4, 3, 0>>",
                "void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>",
            ],
        ),
        (
            "device compute",
            [
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
                "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9>",
                "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>",
                "triton_poi_fused__scaled_dot_product_flash_attention_mm_silu_2",
                f"{LISTS}<2>, CopyFunctor<float, float, 2, 1, 1>>",
                f"{LISTS}<1>, LpNormFunctor<float, NormType::L2>>",
            ],
        ),
    ],
)
def test_kernels_are_classified_by_their_names(kind: str, names: list[str]) -> None:
    assert {name: kernel_kind(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize(
    ("name", "activity", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "kernel", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", "copy"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "compute"),
        ("Optimizer.step#AdamW.step", "gpu_user_annotation", "optimizer"),
    ],
)
def test_events_of_the_device_are_classified_by_their_activity(
    name: str, activity: str, kind: str
) -> None:
    """tests/unit/test_explain.py covers versions of torch whose events have no activity."""
    facts = {"name": name, "start_ns": 0, "end_ns": 1, "activity_type": activity, "scope": 0}
    facts |= {"start_thread_id": 0, "device_type": SimpleNamespace(name="CUDA")}
    facts |= {"linked_correlation_id": 0, "is_user_annotation": "user" in activity}
    answers = {fact: lambda value=value: value for fact, value in facts.items()}
    assert [e.kind for e in events_of([SimpleNamespace(**answers)], 0)] == [f"device {kind}"]


def event(kind: Kind, begin: float, end: float) -> Event:
    return Event(kind, 0, begin, end)


STEP = [
    event("device matmul", 1, 4),
    event("device compute", 3, 5),  # on another stream until 4
    event("device communication", 4, 6),  # overlapped until 5
    event("device attention", 6, 6.5),
    event("device copy", 6.5, 7),
    event("device optimizer", 7.5, 9.5),
    event("device matmul", 7.5, 8),  # Muon multiplies in its step
    event("device update", 8.5, 9.5),
]


def test_parts_of_a_gpus_step_match_those_worked_out_by_hand() -> None:
    """The step takes ten seconds of wall time; events of the next step do not count."""
    found = gpu_parts([*STEP, event("device matmul", 11, 12)], 0.0, 9.9, 10.0)
    assert found == {
        "gpu_matmul": 3.0,
        "gpu_attention": 0.5,
        "gpu_optimizer": 1.5,
        "gpu_kernels": 1.0,
        "gpu_communication": 1.0,
        "gpu_copy": 0.5,
        "gpu_idle": pytest.approx(2.5),
    }
    assert sum(found.values()) == pytest.approx(10.0)
    assert gpu_parts([Event("operator", 1, 0, 1)], 0.0, 1.0, 1.0) == {}


def test_components_do_not_depend_on_the_kernels_classes() -> None:
    """Matrix products and attention count as compute, like other kernels."""
    plain = [
        replace(e, kind="device compute") if e.kind in ("device matmul", "device attention") else e
        for e in STEP
    ]
    fine, coarse = (breakdown(e, 1, 0.0, 9.9, pipeline=False, alone=False) for e in (STEP, plain))
    assert fine == coarse
    assert sum(fine[name] for name in COMPONENTS) == pytest.approx(9.9)


def of_rank(rank: int, *parts: float) -> RankAnswer:
    """Returns a rank whose GPU spent these seconds in GPU_PARTS in every profiled step."""
    told = answer(rank, sum(parts), 0.0)
    assert told.profiled is not None
    on_gpu = {f"gpu_{name}": seconds for name, seconds in zip(GPU_PARTS, parts, strict=True)}
    step = {**told.profiled.profiled[0], "step": sum(parts), **on_gpu}
    return replace(told, profiled=replace(told.profiled, profiled=(step,), plain_seconds=(0.8,)))


def profile_of(*ranks: RankAnswer) -> ProfileRecord:
    return profile_record("run-1", CELL, 1, Outcome("ok", "", 0.0, 1.0, answers=ranks))


PROFILE = profile_of(
    of_rank(0, 0.4, 0.1, 0.1, 0.1, 0.0, 0.0, 0.3), of_rank(1, 0.4, 0.1, 0.1, 0.1, 0.1, 0.0, 0.2)
)


def test_the_gap_to_the_cards_rate_matches_that_worked_out_by_hand() -> None:
    """The step takes 1 s. Without the profiler it takes 0.8 s, and only idle time is shorter. At
    the measured rate, its matrix products take 0.3 s."""
    assert PROFILE.gpu_matmul_seconds == (0.4, 0.4)
    assert PROFILE.gpu_communication_seconds == (0.0, 0.1)
    found = gpu_time(PROFILE, 240e12, 800e12)
    assert found is not None
    assert found.step_seconds == pytest.approx(0.8)
    assert found.seconds == pytest.approx(
        {
            AT_RATE: 0.3,
            BELOW_RATE: 0.1,
            "attention": 0.1,
            "optimizer": 0.1,
            "kernels": 0.1,
            "communication": 0.05,
            "copy": 0.0,
            "idle": 0.05,
        }
    )
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert "copies" not in found.sentence


def test_the_gap_if_rates_are_unknown_or_exceeded() -> None:
    """Without a measured rate, products stay one part; faster ones than measured leave no gap."""
    unknown, faster = gpu_time(PROFILE, 240e12, None), gpu_time(PROFILE, 900e12, 800e12)
    assert unknown is not None
    assert faster is not None
    assert unknown.seconds["matmul"] == pytest.approx(0.4)
    assert (faster.seconds[AT_RATE], faster.seconds[BELOW_RATE]) == (0.4, 0.0)
    assert gpu_time(profile_of(answer(0, 1.0, 0.0)), 240e12, 800e12) is None


def test_a_cell_is_compared_with_the_rate_of_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-sheet peaks lack fp8; failed measurements and CPUs have no rate."""
    install(monkeypatch, h100_node())

    def rates(workload: str, measured: SpeedMeasurement = MEASURED, **changes: Any) -> Peaks:
        cell = CELL.model_copy(update={"workload": workload, **changes})
        return peaks_of(cell, make_workload(workload), measured.as_json)

    assert rates("llama-mini") == Peaks(989.5e12, SPEED["bf16"])
    assert rates("llama-mini+bf16", precision="fp32") == Peaks(989.5e12, SPEED["bf16"])
    assert rates("llama-mini+float8").matmul == SPEED["fp8"]
    assert rates("llama-mini", FAILED) == Peaks(989.5e12, None)
    assert rates("llama-mini", device="cpu") == Peaks()
    assert [matmul_rate(text, "bf16") for text in (None, "{]", "[]")] == [None] * 3


@pytest.mark.parametrize("measured", [MEASURED, FAILED])
def test_a_run_measures_its_gpu_once(tmp_path: Path, measured: SpeedMeasurement) -> None:
    """A run without GPU cells measures nothing."""
    asked: list[int] = []

    def measure() -> SpeedMeasurement:
        asked.append(1)
        return measured

    for device in ("cuda", "cpu"):
        cell = CELL.model_copy(update={"device": device})
        store = Store(tmp_path / device)
        Runner(store, Plan("run-1", "test", (cell,), 1), measure_gpu=measure).begin()
        kept = SpeedMeasurement.read(store.run_row("run-1")["device_speed"])
        assert kept == (measured if device == "cuda" else None)
    assert asked == [1]


FLOPS = {"flops_per_step": 1504e12, "mfu": 0.38, "matmul_utilization": 0.47}


def recorded(folder: Path, measured: SpeedMeasurement = MEASURED) -> Results:
    """Stores a run of one cell: a step takes two seconds, so two GPUs reach 752 TFLOP/s."""
    rows = trial_rows(CELL, [4.0, 4.0, 4.0], **FLOPS)
    run = {"gpus": 2 * ["NVIDIA H100 80GB HBM3"], "device_speed": measured.as_json}
    results = stored(folder, rows, **run)
    store = Store(folder)
    (run_id,) = store.run_ids()
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    store.write_profile(replace(PROFILE, run_id=run_id, started_at=started))
    assert len(results.trials) == 3
    return store.load()


def test_a_reader_is_told_both_shares(tmp_path: Path) -> None:
    """Each GPU reaches 376 TFLOP/s: 38% of 989 by the data sheet, 47% of 800 as measured."""
    results = recorded(tmp_path / "results")
    told = " ".join(commands.told(show, "ddp", "--results", str(tmp_path / "results")).split())
    assert [f for f in ("38%", "989 TFLOP/s", "47%", "800 TFLOP/s") if f not in told] == []
    words = ("ddp", "--results", str(tmp_path / "results"), "--json")
    detail = json.loads(commands.told(show, *words))
    assert detail["cell"]["matmul_utilization"] == 0.47
    assert detail["cell"]["matmul_flops_per_second"] == pytest.approx(800e12)
    assert sum(detail["time"]["gpu_seconds"].values()) == pytest.approx(0.8)
    page = page_of(results, tmp_path)
    assert page.rows[f"cell-{CELL.id}"]["matmul_utilization"] == "0.47"
    shares = {field: value for _, field, value in page.grids if field.endswith("_percent")}
    assert sum(map(float, shares.values())) == pytest.approx(100.0)


def test_a_measurement_that_failed_says_why(tmp_path: Path) -> None:
    page = page_of(recorded(tmp_path / "results", FAILED), tmp_path)
    assert FAILED.reason in page.text
