"""Phase 7, the independent audit: is the gate real, can it fail, and does it pass again without caches?

    outcome = audit.in_fresh_process(audit.AuditRequest(folder), folder_for_reports)

Whoever starts one (`npu_deploy.audit`) brings what it needs of device, toolkit and catalogue, a `Setting`;
the plugin makes the report. Payload `audit` (also in `audit.json`): {"model", "verdict" ("PASS" |
"PASS-with-warnings" | "FAIL"), "device", "checkpoint": {label, kind, content_hash}, "environment", "date",
"seconds", "command",
"findings": [{key, question, status ("PASS" | "WARN" | "FAIL"), evidence}], "figures": {ttft_ms, tpot_ms,
predicted_ttft_ms, predicted_tpot_ms, prompt_rows, programs_started, faults_planted, faults_seen}, "gate":
payload of `topk_gate`, "ladder": [{name, status, reason, nearest: {statistic, value, limit, share, where} or
null}]}.
"""

from llms.verify.gates.phase7.fresh import AuditOutcome, for_options, in_fresh_process
from llms.verify.gates.phase7.types import Audit, AuditRequest, Finding, Setting

__all__ = ["Audit", "AuditOutcome", "AuditRequest", "Finding", "Setting", "for_options", "in_fresh_process"]
