"""A made-up event log with every section of a report, for tests of the reports."""

from __future__ import annotations

import math
from typing import Any

PROMPTS = (
    "Explain how a lock-free queue differs from one with a mutex.",
    "Write a short story about a robot that waters <plants> & sings.",
    "Translate 'the evening is quiet' into three languages | one per line.",
)


def topk_payload() -> dict[str, Any]:
    prompts = []
    for index, text in enumerate(PROMPTS):
        same = index == 0
        agreed = "A lock-free queue uses atomic operations so that no thread ever has to wait"
        prompts.append(
            {
                "index": index,
                "text": text,
                "prompt_tokens": 31 + index,
                "n_steps": 32,
                "divergence_step": None if same else 7 * index,
                "npu_token": None if same else 253,
                "hf_token": None if same else 260,
                "npu_token_text": None if same else " a",
                "hf_token_text": None if same else " the",
                "npu_topk": [] if same else [253, 260, 281, 638, 701],
                "hf_topk": [] if same else [260, 253, 281, 701, 638],
                "npu_rank_in_hf": None if same or index == 2 else 2,
                "hf_rank_in_npu": None if same else 2,
                "npu_text": agreed + (" for another." if same else " for a long time, which"),
                "hf_text": agreed + (" for another." if same else " for the others, which"),
                "agreed_prefix": agreed + (" for another." if same else ""),
                "status": "FAIL" if index == 2 else "OK",
                "reason": "the NPU's token 253 is not in the reference's top 5" if index == 2 else "",
            }
        )
    return {"k": 5, "n_tokens": 32, "status": "FAIL", "reasons": [], "prompts": prompts}


def diagnosis_payload(layers: int = 30) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for path, noise in (("prefill", 1.0), ("decode", 0.55)):
        for layer in range(layers):
            drop = noise * (0.0006 * layer + 0.004 * (1 + math.sin(layer * 1.7)) / 2)
            rows.append(
                {
                    "layer": layer,
                    "path": path,
                    "probe": "final_norm" if layer == layers - 1 else "ffn_out",
                    "cos_min": 1 - 2.6 * drop,
                    "cos_p5": 1 - 1.8 * drop,
                    "cos_median": 1 - drop,
                    "cos_mean": 1 - 1.1 * drop,
                    "max_abs": 0.5 + layer,
                    "mean_abs": 0.01,
                    "max_rel": None,
                    "mean_rel": 0.02,
                }
            )
    return {"prompt": "The capital of France is", "rows": rows, "missing": [], "problems": []}


def profile_payload(ttft: float = 41.3, tpot: float = 11.87) -> dict[str, Any]:
    rows = []
    for section, scale in (("prefill", 3.4), ("decode", 1.0)):
        for kind, name, calls, total in (
            ("elf", "rms_gemms_rope" if section == "prefill" else "rms_gemv_rope", 30, 4.1 * scale),
            ("elf", "o_ffn" if section == "prefill" else "o_gemv_ffn", 30, 5.2 * scale),
            ("kernel", "FlashAttention" if section == "prefill" else "Down", 30, 2.2 * scale),
            ("kernel", "LM head", 1, 1.3),
            ("host", "decode_attention_cpu" if section == "decode" else "kv_cache_extract", 30, 1.9),
            ("host", "tokenize", 1, 0.4),
            ("bo_write", "x", 60, 0.8 * scale),
            ("bo_read", "out", 31, 0.5 * scale),
        ):
            row = {"section": section, "kind": kind, "name": name, "calls": calls, "total_ms": total}
            rows.append({**row, "per_call_ms": total / calls})
    return {
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "tps": 1e3 / tpot,
        "clock": "twin (modelled)",
        "seq_len": 128,
        "breakdown": rows,
    }


def cache_payload(layers: int = 30, heads: int = 3) -> dict[str, Any]:
    """Two prompts; the first is the worse one everywhere, and once beyond the limit of the ladder's rung."""

    def matrix(scale: float) -> list[list[float]]:
        return [
            [
                1 - scale * 10 ** (-5.5 + 3.0 * layer / layers + (0.9 if (layer + head) % 7 == 0 else 0.0))
                for head in range(heads)
            ]
            for layer in range(layers)
        ]

    prompts = []
    for index, scale in enumerate((1.0, 0.1)):
        ratios = [[1.001] * heads for _ in range(layers)]
        prompts.append(
            {
                "index": index,
                "text": PROMPTS[index],
                "key_min_cosine": matrix(scale),
                "key_worst_ratio": ratios,
                "value_min_cosine": matrix(scale * 0.5),
                "value_worst_ratio": ratios,
            }
        )
    return {"prompts": prompts}


def _measured(statistic: str, value: float, limit: float, ok: bool = True) -> dict[str, Any]:
    where = "prompt 0, layer 11 head 1 slot 67 (decode step 24)"
    entry = {"statistic": statistic, "value": value, "where": where, "limit": limit, "ok": ok}
    return {**entry, "pedigree": "limit 0.01 (clean up to 0.004)"}


def ladder_payload() -> dict[str, Any]:
    """A rung that fails, one that is not offered and one without figures."""
    cache = [
        _measured("cache_check.key_cosine", 0.0121, 0.01, ok=False),
        _measured("cache_check.value_cosine", 0.002, 0.012),
        _measured("cache_check.key_norm", 0.018, 0.0794),
    ]
    failure = "key_cosine 0.0121 at prompt 0, layer 28 head 0"
    rungs = [
        {"name": "cache_check", "status": "failed", "reason": "K and V", "measured": cache},
        {"name": "self_consistency", "status": "not offered", "reason": "no cache", "measured": []},
        {"name": "determinism", "status": "passed", "reason": "identical bits", "measured": []},
    ]
    rungs[0]["failures"] = [failure]
    return {"rungs": rungs, "prompts": list(PROMPTS[:2]), "n_tokens": 32}


def gate_records() -> list[tuple[str, dict[str, Any]]]:
    """Records of the other gates, as `llms.verify` and its callers make them."""
    kl = [[1e-15, *(10 ** (-4 + 2 * math.sin(step)) for step in range(31))], [2e-3] * 32]
    merge = {"name": "multi-launch merge", "status": "applied", "reason": "42.4 % faster"}
    merge |= {"before_ms": 217.9, "after_ms": 125.5, "gain_percent": 42.4, "equal": "bit for bit"}
    skipped = {"name": "layout", "status": "skipped", "reason": "nothing to change", "before_ms": None}
    optimisation = {"phase": 4, "section": "prefill", "clock": "twin (modelled)", "seq_len": 128}
    optimisation |= {"baseline_ms": {"prefill": 217.9}, "production_ms": {"prefill": 125.5}}
    row = {"text": PROMPTS[1], "path": "prefill", "ok": True, "positions": 43, "cos_whole": 0.99982}
    row |= {"cos_min": 0.99974, "size": 0.99156, "max_abs": 0.75}
    limits = {"whole": 0.99, "position": 0.99, "size": 0.05}
    refusal = {"call": "prefill", "length": 129, "error": "SequenceTooLong: the prompt has 129 tokens"}
    weights = {
        "check": "weights",
        "status": "OK",
        "problems": [],
        "notes": ["not offered: x"],
        "index": False,
    }
    return [
        ("ladder", ladder_payload()),
        ("teacher_forced", {"prompts": [{"index": i, "kl": values} for i, values in enumerate(kl)]}),
        ("phase0", weights),
        ("block", {"head_dim": 64, "limits": limits, "rows": [row]}),
        ("optimisation", {**optimisation, "steps": [merge, skipped]}),
        ("limits", {"lengths": [{"limit": 128, "length": 128, "kl": 0.0046}], "refusals": [refusal]}),
    ]


def kernel_payload(kernel: str, over: int, error: float = 2.9e-3) -> dict[str, Any]:
    """A kernel that was judged alone; `over` elements are beyond the tolerance, 20 are allowed."""
    limit = 4e-3
    status = "FAIL" if over > 20 or error > limit else f"in tier, {over} elements over" if over else "pass"
    return {
        "kernel": kernel,
        "op": "gemm",
        "shape": [256, 576, 576],
        "method": "drain",
        "tile": {"m": 64},
        "herd": [8, 4],
        "cores": 32,
        "utilisation": 1.0,
        "row": "gemm-1",
        "provenance": "published-silicon",
        "used_by": ["smollm2_135m"],
        "mean_rel_L1": error,
        "baseline": {"value": 2.9e-3, "limit": limit, "source": "published"},
        "rtol": 0.05,
        "atol": 0.1,
        "elements": {"over": over, "allowed": 20, "expected": 9.5, "total": 147456, "worst": 0.02},
        "status": status,
        "problems": [],
    }


def events(model: str = "smollm2_135m", t0: float = 1.79e9) -> list[dict[str, Any]]:
    """Events of a run with a failure, a blocked phase, an error in a fixture, lock waits and all records."""
    found: list[dict[str, Any]] = []
    clock = [t0]

    def add(event: str, after: float = 0.01, **fields: Any) -> None:
        clock[0] += after
        found.append({"v": 1, "seq": len(found), "t": clock[0], "event": event, "model": model, **fields})

    def test(name: str, phase: int | None, outcome: str, seconds: float, **fields: Any) -> None:
        nodeid = f"llms/{model}/tests/{name}"
        add("test_start", nodeid=nodeid, phase=phase, worker="")
        broken = fields.pop("at", "call")
        for when in ("setup", "call", "teardown"):
            if outcome == "failed" and broken == "setup" and when == "call":
                continue
            bad = when == broken and outcome != "passed"
            extra = fields if when == broken else {}
            took = seconds if when == "call" else 0.01
            add(
                "test_phase",
                took,
                nodeid=nodeid,
                phase=phase,
                when=when,
                outcome=outcome if bad else "passed",
                duration_s=took,
                **extra,
            )
            if bad and outcome == "skipped":
                break
        add("test_finish", nodeid=nodeid)

    add(
        "session_start",
        run_id="20261130-101500",
        argv=["--npu-prompts", "3", f"llms/{model}"],
        rootdir="/home/user/llm-npu",
        host="strix-07",
        pid=4242,
        python="3.11.7",
        platform="Linux-6.14-x86_64",
        cpu="Some CPU (6/1/2); avx512f",
        versions={"pytest": "9.2.0", "torch": "2.13.0", "transformers": "5.24.0"},
        options={"prompts": 3, "n_tokens": 32, "model": None},
    )
    add("device", name="twin", label="twin (modelled)", details={})
    names = [
        ("test_phase0_reference.py::test_every_tensor_is_loaded", 0),
        ("test_phase6_topk_gate.py::test_gate", 6),
    ]
    tests = [{"nodeid": f"llms/{model}/tests/{name}", "phase": phase, "perf": False} for name, phase in names]
    never = {
        "nodeid": f"llms/{model}/tests/test_phase7_audit.py::test_fresh_process",
        "phase": 7,
        "perf": False,
    }
    add("collected", tests=[*tests, never])
    checkpoint = {
        "label": "SmolLM2-135M-Instruct, Q4_1 dequantised to bf16",
        "kind": "packaged",
        "path": "/home/user/.cache/x",
        "content_hash": "sha256:5f1d3c",
    }
    config = {"n_layers": 30, "emb_dim": 576}
    add("deployment", checkpoint=checkpoint, config=config, folder=f"llms/{model}", variant="instruct")
    facts = [("memlock limit", "unlimited", True, ""), ("RAM available", "21.4 GiB", True, "")]
    facts.append(("power mode", "balanced", False, "xrt-smi configure --pmode performance"))
    add("preflight", facts=[{"name": n, "value": v, "ok": ok, "remedy": r} for n, v, ok, r in facts])
    test("test_phase0_reference.py::test_every_tensor_is_loaded", 0, "passed", 2.4)
    for kernel, over in (("gemm-256x576x576", 12), ("rope-256x64", 0)):
        name = f"test_phase1_kernels.py::test_kernel[{kernel}]"
        record = kernel_payload(kernel, over)
        add("record", nodeid=f"llms/{model}/tests/{name}", kind="phase1", payload=record)
        test(name, 1, "passed", 0.8)
    test("test_phase2_block.py::test_layer_0", 2, "passed", 1.9, lock_wait_s=0.7)
    lock = {"path": "/tmp/mlir-air-npu.lock", "nodeid": "llms/x::test_layer_0"}
    add("lock", action="acquired", waited_s=0.7, holder="", **lock)
    add("lock", action="released", held_s=1.1, **lock)
    gate = f"llms/{model}/tests/test_phase6_topk_gate.py::test_gate"
    add("record", nodeid=gate, kind="topk_gate", payload=topk_payload())
    text = (
        ">       assert outcome.ok, outcome.message\n"
        "E       AssertionError: token-set gate FAIL (k=5, 32 tokens)\n"
        "E         prompt 2 (33 tokens): Translate 'the evening is quiet' into three languages\n\ntest.py:31"
    )
    sections = [("Captured stdout call", "compiled rms_gemms_rope\ncompiled o_ffn\n")]
    test("test_phase6_topk_gate.py::test_gate", 6, "failed", 21.7, longrepr=text, sections=sections)
    add("record", nodeid=gate, kind="diagnosis", payload=diagnosis_payload())
    test("test_diagnosis_cosine.py::test_cosine", 6, "passed", 6.2)
    for kind, payload in gate_records():
        add("record", nodeid=gate, kind=kind, payload=payload)
    add("record", nodeid=gate, kind="cache_check", payload=cache_payload())
    add("record", nodeid=gate, kind="profile", payload=profile_payload())
    bench = {
        "name": "test_ttft",
        "min": 0.0411,
        "median": 0.0413,
        "mean": 0.0413,
        "max": 0.042,
        "stddev": 0.0,
    }
    bench |= {"rounds": 3, "device": "twin (modelled)", "seq_len": 128, "breakdown": None, "checkpoint": None}
    add("record", nodeid=gate, kind="benchmark", payload=bench)
    silicon = {"what": "llama32_1b", "device": "NPU2 Strix (measured)", "checkpoint": "Llama-3.2-1B, bf16"}
    silicon |= {"seq_len": 2048, "ttft_ms": 1210.0, "tpot_ms": 82.0, "source": "published 2026-06"}
    unknown = {"what": "other", "device": "twin (modelled)", "seq_len": 2048, "ttft_ms": None, "tpot_ms": 0}
    beside = {"definition": "TTFT: from before tokenising.", "rows": [silicon, unknown]}
    add("record", nodeid=gate, kind="comparison", payload=beside)
    comparison = {
        "title": "Herds and their cores",
        "note": "per program",
        "columns": ["model", "twin (modelled)", "published", "ratio"],
        "rows": [["Llama-3.2-1B", 1234.5678, 1200, 1.0288], ["SmolLM2-135M", 41.3, None, None]],
    }
    add("record", nodeid=gate, kind="table", payload=comparison)
    add("retry", nodeid=gate, attempt=1, cause="DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-16)")
    add(
        "record",
        nodeid=gate,
        kind="herd_utilisation",
        payload={"rms_gemms_rope": {"q_gemm": 0.5}, "bad": "nan"},
    )
    test("test_profile_benchmark.py::test_ttft", 6, "passed", 3.3)
    reason = "E   FileNotFoundError: [Errno 2] No such file or directory: 'model-00002-of-00002.safetensors'"
    test("test_profile_benchmark.py::test_broken_fixture", 6, "failed", 0.1, at="setup", longrepr=reason)
    blocked = f"blocked: phase 6 finalize of {model} failed ({gate}); --no-phase-order runs it anyway"
    test(
        "test_phase7_audit.py::test_fresh_process",
        7,
        "skipped",
        0.0,
        at="setup",
        longrepr=blocked,
        blocked_by=gate,
    )
    add("session_finish", exit_status=1)
    return found
